"""docs/serving.md says what the command takes, and schemathesis finds no request that the server cannot answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from outrider.cli.serve import serve
from tests.server.running import Server, running

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--max-model-len", "64") as server:
        yield server


def options() -> dict[str, Any]:
    """The long options of the command, with their defaults."""
    return {f"--{name.replace('_', '-')}": given.default for name, given in signature(serve).parameters.items()}


def test_every_option_on_the_page_is_there() -> None:
    ours = [line.rsplit("|", 2)[1] for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 4]
    named = set(re.findall(r"--[a-z][a-z-]+", "\n".join(ours)))
    assert {"--max-num-seqs", "--api-key-file", "--ssl-certfile"} <= named
    assert named <= {*options(), "--no-prefix-caching"}


def test_the_limits_are_those_of_the_page() -> None:
    section = PAGE.partition("## Limits")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+) \| ", section, re.MULTILINE)
    told = {name: value.replace(",", "") for name, value in rows}
    defaults = {name: str(options()[name]) for name in told}
    assert len(told) == 7
    assert told == {**defaults, "--max-model-len": "the model's", "--request-seconds": "none"}


def test_no_request_of_the_document_brings_it_down(server: Server) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    quiet = settings(
        max_examples=40, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True
    )
    for operation in document.get_all_operations():

        @quiet
        @given(case=operation.ok().as_strategy())
        def ask(case: Any) -> None:
            for body in (case.body, _shortened(case.body)):
                case.body = body
                response = case.call(base_url=server.url, timeout=60)
                assert response.status_code < 500, response.text

        ask()
    assert server.metric("outrider:http_requests_total", 'path="/v1/completions"', 'status="200"') > 0
    assert server.rests()
    assert server.metric("outrider:broken_steps_total") == 0


def _shortened(body: Any) -> Any:
    """What must be there, and one field more: values that are all in range, and fit each other, are rare among many."""
    if not isinstance(body, dict):
        return body
    others = [name for name in body if name not in ("prompt", "messages", "model", "tokens")]
    return {name: value for name, value in body.items() if name in ("prompt", "messages", "tokens", *others[:1])}

"""The pages about the server say what it takes, and schemathesis finds no request that the server cannot answer."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from outrider import LLM, SamplingParams
from outrider.cli.serve import serve
from outrider.config import Flag, declared
from outrider.errors import ForwardError, NonFiniteLogitsError, NoTokenLeftError, ProcessingError, StepAbortedError
from outrider.server.errors import TYPES, api_error
from outrider.server.schemas import SAME
from outrider.server.settings import ServerSettings
from tests.server.running import ROOT, Server, running

PAGE = (ROOT / "docs" / "reference" / "server.md").read_text("utf-8")
FROM_OTHERS = (ROOT / "docs" / "how-to" / "come_from_another_server.md").read_text("utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--max-model-len", "64") as server:
        yield server


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_cache_tokens=1024)


def options() -> dict[str, Any]:
    """The long options of the command, with their defaults."""
    return {f"--{name.replace('_', '-')}": given.default for name, given in signature(serve).parameters.items()}


def test_every_option_on_the_page_is_there() -> None:
    ours = [line.rsplit("|", 2)[1] for line in FROM_OTHERS.splitlines() if line.startswith("| ") and line.count("|") == 4]
    named = set(re.findall(r"--[a-z][a-z-]+", "\n".join(ours)))
    assert {"--max-num-seqs", "--api-key-file", "--ssl-certfile"} <= named
    assert named <= {*options()}


def test_the_limits_are_those_of_the_page() -> None:
    section = PAGE.partition("## Limits")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+) \| ", section, re.MULTILINE)
    told = {name: value.replace(",", "") for name, value in rows}
    defaults = {name: str(options()[name]).removesuffix(".0") for name in told}
    assert len(told) == 19
    limits = {f"--{name.replace('_', '-')}" for name, _ in declared(ServerSettings, Flag) if not name.endswith("_parser")}
    assert limits <= told.keys()
    unset = {"--max-model-len": "the model's", "--request-seconds": "none", "--stalled-seconds": "60 not with `--replicas`"}
    unset |= {"--header-seconds": "30 not with `--replicas`", "--body-seconds": "60 not with `--replicas`"}
    unset |= {"--max-connections": "as files leave room for not with `--replicas`"}
    assert told == defaults | unset


def test_every_field_of_requests_that_is_a_parameter_is_on_the_page() -> None:
    assert [name for name in SAME if f"`{name}`" not in PAGE] == []


def test_every_code_of_an_error_is_on_the_page_and_is_written_like_the_others() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "src" / "outrider" / "server").rglob("*.py")]
    codes = {code for source in sources for code in re.findall(r'code="([^"]+)"', source)}
    raised = (NoTokenLeftError, ProcessingError, NonFiniteLogitsError, ForwardError, StepAbortedError)
    codes |= {"queue_full", "concurrency_limit"}
    codes |= {str(api_error(kind(1, "p", "R.")).code) for kind in raised}
    assert {"timeout", "queue_full", "no_token_left"} <= codes
    assert [code for code in codes if not re.fullmatch(r"[a-z_]+", code)] == []
    section = PAGE.partition("## Errors")[2].partition("\n## ")[0]
    assert [code for code in sorted(codes) if f"`{code}`" not in section] == []


def test_every_status_of_an_error_is_on_the_page() -> None:
    section = PAGE.partition("## Errors")[2].partition("\n## ")[0]
    assert {int(row) for row in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)} == {500, *TYPES} - {499}


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_no_request_of_the_document_brings_it_down(server: Server, count: int) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    quiet = settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
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


def test_the_example_of_the_readme_writes(server: Server, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (example,) = (block for block in blocks if "openai" in block)
    assert "max_tokens=64" in example
    exec(example.replace("http://127.0.0.1:8000", server.url).replace("max_tokens=64", "max_tokens=16, seed=7"), {})
    (want,) = llm.generate("def parse(", SamplingParams(seed=7, max_tokens=16))
    assert capsys.readouterr().out == want.text


def test_the_dockerfile_installs_and_starts_what_there_is() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ").splitlines()
    (entry,) = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT"))
    assert entry[1:] == ["serve", "--host", "0.0.0.0"]
    (install,) = (line for line in lines if "pip install" in line)
    environment = re.findall(r"(/\S+)/bin/pip", install)
    assert entry[0] == f"{environment[0]}/bin/outrider"
    assert f"COPY --from=build {environment[0]} {environment[0]}" in lines
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"/src\[([a-z,]+)\]", install)
    assert set(wanted.split(",")) == {"serve", "grammar"} <= extras.keys()
    left_out = (ROOT / ".dockerignore").read_text("utf-8").split()
    needed = ["src", "pyproject.toml", "constraints.txt", "hatch_build.py", "README.md", "LICENSE"]
    assert not [name for name in needed if name in left_out or not (ROOT / name).exists()]


def _shortened(body: Any) -> Any:
    """What must be there, and one field more: values that are all in range, and fit each other, are rare among many."""
    if not isinstance(body, dict):
        return body
    others = [name for name in body if name not in ("prompt", "messages", "model", "tokens")]
    return {name: value for name, value in body.items() if name in ("prompt", "messages", "tokens", *others[:1])}

"""What is larger than the server takes is refused before it costs any work."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.errors import InvalidParameterError
from outrider.server.errors import ApiError
from outrider.server.requests import check_lists, check_values
from outrider.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from tests.server.running import Server, running

#: Of a server that takes hardly anything.
LIMITS = {
    "n": 2,
    "stops": 2,
    "list-items": 2,
    "list-characters": 2,
    "structure-bytes": 20,
    "body-values": 20,
    "body-bytes": 900,
}
SETTINGS = ServerSettings(model_name="small", max_list_items=3, max_list_characters=10)

_TEXTS = st.text(st.sampled_from('ab,:"\\[]{}\n\u00e9'), max_size=6)
_JSON = st.recursive(
    st.none() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=30,
)


@pytest.fixture(scope="module")
def limited() -> Iterator[Server]:
    with running(*(part for name, most in LIMITS.items() for part in (f"--max-{name}", str(most)))) as server:
        yield server


def num_separators(value: Any) -> int:
    """Commas and colons of its JSON that stand outside texts."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = len(value) if isinstance(value, dict) else 0
    return own + max(0, len(inner) - 1) + sum(map(num_separators, inner))


@given(_JSON, st.booleans(), st.booleans())
def test_values_are_counted_without_reading_them(value: Any, tight: bool, ascii_only: bool) -> None:
    separators = (",", ":") if tight else (", ", ": ")
    body = json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode()
    count = 1 + num_separators(value)
    check_values(body, count)
    if count > 1:
        with pytest.raises(ApiError) as raised:
            check_values(body, count - 1)
        assert (raised.value.status, raised.value.code) == (413, "body_too_large")


def test_a_text_full_of_punctuation_is_one_value() -> None:
    check_values(json.dumps({"prompt": '"a, b": {c}\\' * 10_000}).encode(), 2)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bad_words": ["a"] * 4}, "bad_words"),
        ({"bad_words": ["a" * 6, "b" * 5]}, "bad_words"),
        ({"stop": ["a" * 6, "b" * 5]}, "stop"),
        ({"stop": "a" * 11}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {str(token): 1.0 for token in range(4)}}, "logit_bias"),
        ({"stop_token_ids": [1] * 4}, "stop_token_ids"),
        ({"allowed_token_ids": [1] * 4}, "allowed_token_ids"),
    ],
)
def test_lists_that_cost_work_are_limited(fields: dict[str, Any], field: str) -> None:
    asked = CompletionRequest.read(json.dumps({"prompt": "x", **fields}).encode())
    with pytest.raises(
        InvalidParameterError, match=rf"^{field}='\d+ (entries|characters in all)': too many. Use \d+ or"
    ) as raised:
        check_lists(asked, SETTINGS)
    assert re.search("--max-(list-items|list-characters|stops) of the server", str(raised.value))


@pytest.mark.parametrize(
    ("option", "fields"),
    [
        ("--max-n", {"n": 3}),
        ("--max-stops", {"stop": ["a", "b", "c"]}),
        ("--max-list-items", {"bad_words": ["a", "b", "c"]}),
        ("--max-list-characters", {"stop": "abc"}),
        ("--max-structure-bytes", {"guided_regex": "a{1,2}b{1,2}"}),
        ("--max-body-values", {"logit_bias": {str(token): 1 for token in range(20)}}),
        ("--max-body-bytes", {"prompt": "x" * 1000}),
    ],
)
def test_a_limit_that_refuses_a_request_is_an_option_that_it_names(
    limited: Server, option: str, fields: dict[str, Any]
) -> None:
    found = limited.post("/v1/completions", {"prompt": "x", "max_tokens": 2, **fields})
    assert found.status_code in (400, 413)
    assert f"The option {option} of the server allows more" in found.json()["error"]["message"]


def test_lists_up_to_the_limit_are_taken() -> None:
    fields = {"bad_words": ["aaaa", "bbb", "ccc"], "logit_bias": {"1": 1, "2": 1, "3": 1}, "stop": ["a" * 10]}
    check_lists(
        CompletionRequest.read(json.dumps({"prompt": "x", **fields, "stop_token_ids": [1, 2, 3]}).encode()), SETTINGS
    )
    check_lists(CompletionRequest.read(b'{"prompt": "x", "bad_words": null, "stop": "0123456789"}'), SETTINGS)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"prompt": "x", "bad_words": [1] * 50}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["a"] * 50}),
        (DetokenizeRequest, {"tokens": ["a"] * 50}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * 50}] * 50}),
    ],
)
def test_a_list_is_read_up_to_its_first_fault(kind: Any, fields: dict[str, Any]) -> None:
    """Otherwise the description of a million faults would hold up everybody for seconds."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(fields)
    assert raised.value.error_count() <= 3, "of the kinds that the value may have, one each"


def test_large_bodies_are_read_in_another_thread() -> None:
    """Small ones are not: to wait for a turn would take longer."""
    service: Any = object.__new__(Service)
    service.settings = ServerSettings(model_name="small")
    found: list[tuple[str | None, bool]] = []

    class Body:
        @classmethod
        def read(cls, body: bytes) -> int:
            found.append((None, threading.current_thread() is threading.main_thread()))
            return len(body)

    async def ask() -> None:
        with ThreadPoolExecutor(1) as pool:

            async def prepared(tenant: str | None, call: Any) -> Any:
                answer = await asyncio.get_running_loop().run_in_executor(pool, call)
                found[-1] = (tenant, found[-1][1])
                return answer

            service.engine = SimpleNamespace(prepared=prepared)
            for size in (1000, 1_000_000):

                async def body(limit: int, size: int = size) -> bytes:
                    return b"x" * size

                assert await service.read(Body.read, SimpleNamespace(body=body, tenant="ann")) == size

    asyncio.run(ask())
    assert found == [(None, True), ("ann", False)]

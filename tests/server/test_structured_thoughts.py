"""Structures and required calls behind thoughts: these are free, and the structure holds what follows, with drafts too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoModelForCausalLM

from outrider.config import default_model
from outrider.loading.tokenizers import given_tokenizer
from tests.server.running import TEMPLATE, Server, running
from tests.server.test_calls import TOOLS

MARKS = ("<think>", "</think>")
#: Thoughts are begun by the model, by the template, or by nobody.
_TEMPLATE = (
    TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif begins %}<think>\n{% endif %}"
)
PROMPT = [{"role": "user", "content": "def f(x):"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
BEGUN = {"chat_template_kwargs": {"begins": True}}


def save_thinker(folder: Path, *, special: bool) -> tuple[str, int, int]:
    """The embedded target with the marks as tokens. Returns its folder and the tokens."""
    tokenizer = given_tokenizer(default_model("target"))
    model = AutoModelForCausalLM.from_pretrained(default_model("target"))
    tokenizer.add_tokens([*MARKS], special_tokens=special)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = _TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    begin, end = tokenizer.convert_tokens_to_ids([*MARKS])
    return str(folder), begin, end


class Thinker:
    """A server whose model thinks, since the bias of a request makes the marks likely."""

    def __init__(self, server: Server, begin: int, end: int, *, special: bool) -> None:
        self.server, self.begin, self.end = server, begin, end
        self.bias = {str(end): 6.0, str(begin): 30.0 if special else 8.0}

    def ask(self, *, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
        """The answer to a chat."""
        asked = {"messages": PROMPT, "max_tokens": 200, "seed": 1, "logit_bias": self.bias}
        found = self.server.post(path, {**asked, **fields})
        assert found.status_code == 200, found.text
        answer: dict[str, Any] = found.json()
        return answer


_SPECIAL = pytest.mark.by_change("src/outrider/server/thoughts.py", "src/outrider/structured/")


@pytest.fixture(scope="module", params=[pytest.param(False, id="text"), pytest.param(True, id="special", marks=_SPECIAL)])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    folder, begin, end = save_thinker(tmp_path_factory.mktemp("thinker"), special=request.param)
    with running(folder, "--method", "suffix", "--served-model-name", "thinker") as server:
        yield Thinker(server, begin, end, special=request.param)


@pytest.mark.parametrize("begun", [True, False], ids=["by the template", "by the model"])
def test_a_structure_begins_behind_the_mark_with_drafts_and_without(thinker: Thinker, begun: bool) -> None:
    origins: list[str] = []
    for seed in range(1, 4):
        bias = {str(thinker.end): 6.0} if begun else thinker.bias
        asked = {**FORMAT, **(BEGUN if begun else {}), "logit_bias": bias, "seed": seed, "return_token_ids": True}
        plain = thinker.ask(**asked, speculation="off")
        (choice,) = plain["choices"]
        message, tokens = choice["message"], choice["token_ids"]
        assert json.loads(message["content"])["a"] in (1, 22)
        assert choice["finish_reason"] == "stop"
        told = plain["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert tokens.index(thinker.end) + 1 == told
        assert (tokens[0] == thinker.begin) is not begun
        written = thinker.server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        for more in ({}, {"prediction": {"type": "content", "content": written}}):
            drafted = thinker.ask(**asked, **more, trace=True)
            (choice,) = drafted["choices"]
            assert (choice["token_ids"], choice["message"]) == (tokens, message)
            assert drafted["usage"]["completion_tokens_details"]["reasoning_tokens"] == told
        origins += choice["trace"]["origins"][told - 1 : told + 1]
    assert "accepted" in origins[::2], "the mark was drafted"
    assert "accepted" in origins[1::2], "what stands behind it was drafted"


def test_a_structure_begins_at_once_where_the_model_is_not_to_think(thinker: Thinker) -> None:
    asked = {"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True, **FORMAT}
    answer = thinker.ask(**asked)
    (choice,) = answer["choices"]
    assert json.loads(choice["message"]["content"])["a"] in (1, 22)
    assert "reasoning_content" not in choice["message"]
    assert thinker.begin not in choice["token_ids"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}], ids=["any", "named"])
def test_required_calls_stand_behind_thoughts(thinker: Thinker, choice: Any) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, **BEGUN}
    message = thinker.ask(**asked)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    json.loads(call["function"]["arguments"])
    assert call["function"]["name"] in ("move", "stop") if choice == "required" else ("move",)


def test_a_stream_counts_thoughts_too(thinker: Thinker) -> None:
    asked: dict[str, Any] = {"messages": PROMPT, "max_tokens": 200, "seed": 2, "logit_bias": thinker.bias, **FORMAT}
    whole = thinker.server.post("/v1/chat/completions", asked).json()["usage"]
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    with thinker.server.stream("/v1/chat/completions", streamed) as response:
        lines = [line.removeprefix("data: ") for line in response.read().decode().split("\n") if line]
    last = json.loads(lines[-2])["usage"]
    assert last["completion_tokens_details"] == whole["completion_tokens_details"]
    assert 0 < last["completion_tokens_details"]["reasoning_tokens"] < last["completion_tokens"]


def test_other_apis_have_structures_behind_thoughts(thinker: Thinker) -> None:
    more = {"logit_bias": thinker.bias, "seed": 3, **BEGUN}
    client = anthropic.Anthropic(base_url=thinker.server.url, api_key="any", max_retries=0)
    prompt: Any = PROMPT
    output = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    found = client.messages.create(model="thinker", messages=prompt, max_tokens=200, extra_body={**output, **more})
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.usage.output_tokens_details is not None
    assert 0 < found.usage.output_tokens_details.thinking_tokens < found.usage.output_tokens
    assert json.loads(found.content[1].text)["a"] in (1, 22)  # type: ignore[union-attr]
    tools: Any = [{"name": "stop", "input_schema": {"type": "object"}}]
    called = client.messages.create(
        model="thinker", messages=prompt, max_tokens=200, tools=tools, tool_choice={"type": "any"}, extra_body=more
    )
    assert [block.type for block in called.content][:2] == ["thinking", "tool_use"]
    other = openai.OpenAI(base_url=f"{thinker.server.url}/v1", api_key="any", max_retries=0)
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    response = other.responses.create(model="thinker", input="def f(x):", max_output_tokens=200, text=form, extra_body=more)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert json.loads(response.output_text)["a"] in (1, 22)
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_a_refused_schema_is_told_in_the_words_of_the_request(thinker: Thinker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = thinker.server.post("/v1/chat/completions", {**body, "response_format": named})
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, "response_format.json_schema.schema")
    assert "nothing" in error["message"]
    assert "start:" not in error["message"]
    anthropic = {"format": {"type": "json_schema", "schema": schema}}
    found = thinker.server.post("/v1/messages", {**body, "output_config": anthropic})
    assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "output_config.format" in found.json()["error"]["message"]

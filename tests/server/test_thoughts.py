"""Thoughts of a model whose messages say for whom they are (gpt-oss), in whole and streamed answers of a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoModelForCausalLM

from outrider.config import default_model
from outrider.loading.tokenizers import given_tokenizer
from tests.server.running import TEMPLATE, Server, running
from tests.server.test_calls import TOOLS
from tests.server.test_tool_forms import HARMONY

#: It thinks, and gives the answer, or calls a tool.
_THOUGHT = '<|channel|> "analysis" <|message|> /[a-z ]{30}/ "</think>" <|end|> <|start|> "assistant" '
FINAL = f'start: {_THOUGHT} <|channel|> "final" <|message|> "It is 5."'
_CALL = f"""start: {_THOUGHT} " to=functions.stop" <|channel|> "commentary json" <|message|> "{{}}\""""
#: With these, thoughts come to their end (`<|end|>`).
LIKELY_ENDS = {"0": 9.0}
_TEMPLATE = TEMPLATE.replace("{{ ending }}", "<|start|>assistant{# <|channel|>analysis<|message|> to=functions. #}")


def save_harmony(folder: Path) -> str:
    """The embedded target with the tokens of gpt-oss for messages; returns its folder."""
    tokenizer, model = (
        given_tokenizer(default_model("target")),
        AutoModelForCausalLM.from_pretrained(default_model("target")),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*HARMONY], "eos_token": "<|return|>"})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.chat_template = _TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(save_harmony(tmp_path_factory.mktemp("harmony"))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.mark.parametrize(
    "fields", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}], ids=["", "tools", "none"]
)
def test_thoughts_are_told_beside_the_answer(client: openai.OpenAI, fields: Any) -> None:
    asked: Any = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": "x"}], **fields}
    asked |= {"max_tokens": 90, "seed": 3, "extra_body": {"guided_grammar": FINAL}}
    message: Any = client.chat.completions.create(**asked).choices[0].message
    assert message.content == "It is 5."
    assert re.fullmatch("[a-z ]{30}</think>", message.reasoning_content)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "It is 5."
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert "".join(thoughts) == message.reasoning_content
    assert len(thoughts) > 2, "told while they are written"


def test_thoughts_stand_before_a_call_and_calls_of_tools_that_nobody_gave_are_not_told(client: openai.OpenAI) -> None:
    asked: Any = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": "x"}]}
    asked |= {"max_tokens": 90, "extra_body": {"guided_grammar": _CALL}}
    for tools in (TOOLS, []):
        choice = client.chat.completions.create(**asked, tools=tools or openai.omit).choices[0]
        assert getattr(choice.message, "reasoning_content", "").endswith("</think>")
        assert [call.function.name for call in choice.message.tool_calls or []] == ["stop"] * len(tools[:1])
        assert choice.finish_reason == ("tool_calls" if tools else "stop")
        assert choice.message.content == (None if tools else "")


def test_a_history_with_thoughts_and_a_forced_call_still_work(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "assistant", "content": "5", "reasoning_content": "hm"}, {"role": "user", "content": "x"}]
    asked: Any = {"model": client.models.list().data[0].id, "messages": turns, "tools": TOOLS, "tool_choice": "required"}
    asked |= {"max_tokens": 200, "logit_bias": LIKELY_ENDS}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.function.name in ("move", "stop")


def test_structures_and_required_calls_stand_behind_thoughts(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "logit_bias": LIKELY_ENDS}
    required = {"tools": TOOLS, "tool_choice": "required"}
    thoughts = []
    for seed in range(6):
        answer = server.post("/v1/chat/completions", {**asked, "seed": seed, **form}).json()
        message, used = answer["choices"][0]["message"], answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert json.loads(message["content"])["a"] in (1, 22)
        called = server.post("/v1/chat/completions", {**asked, "seed": seed, **required}).json()["choices"][0]["message"]
        json.loads(called["tool_calls"][0]["function"]["arguments"])
        assert used > 3 if "reasoning_content" in message else used <= 3, "beside text there are three marks"
        thoughts += [each.get("reasoning_content") for each in (message, called)]
    assert any(thoughts)

"""Anthropic's Messages API of a real server, by its own client: whole and streamed, tools, stops, counts and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from outrider import LLM, SamplingParams
from tests.server.running import TEMPLATE, Server, running
from tests.server.test_thoughts import FINAL, save_harmony

NAME = "outrider-embedded"
KEY = {"x-api-key": "secret"}
PROMPT = "def f(x):"
USER: Any = [{"role": "user", "content": PROMPT}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "move", "description": "Moves.", "input_schema": POINT, "cache_control": {"type": "ephemeral"}},
    {"name": "stop", "input_schema": {"type": "object", "properties": {}}},
]
#: What the client has no arguments for.
_EXTRA = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "guided_regex",
    "guided_grammar",
    "guided_choice",
    "logit_bias",
    "speculation",
)


@pytest.fixture(scope="module")
def template() -> str:
    return TEMPLATE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, template: str) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("server") / "template.jinja"
    file.write_text(template, "utf-8")
    arguments = ("--method", "draft_model", "--chat-template", str(file), "--max-body-values", "20000")
    with running(*arguments, OUTRIDER_API_KEYS="web: secret") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    """What the offline API writes behind the prompt."""
    return llm.chat(USER, SamplingParams(temperature=0, max_tokens=24))[0].text


def asked(**fields: Any) -> Any:
    """The arguments of the client, for a greedy text unless these fields say otherwise."""
    given = {"model": NAME, "messages": USER, "max_tokens": 24, "temperature": 0, **fields}
    extra = {name: given.pop(name) for name in _EXTRA if name in given}
    return {**given, "extra_body": extra}


def events(server: Server, **fields: Any) -> list[tuple[str, Any]]:
    """The events of a stream, with their names."""
    body = {"messages": USER, "max_tokens": 24, "temperature": 0, "stream": True, **fields}
    with server.stream("/v1/messages", body, headers=KEY) as response:
        found = [part.split("\n") for part in response.read().decode().split("\n\n") if part]
    assert response.status_code == 200, found
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


def both(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    """A whole answer. The streamed one says the same, but for the names of calls."""
    whole = client.messages.create(**asked(**fields))
    with client.messages.stream(**asked(**fields)) as stream:
        streamed = stream.get_final_message()
    named = {"id": None, "parsed_output": None}
    blocks = [[{**block.model_dump(), **named} for block in each.content] for each in (whole, streamed)]
    assert blocks[0] == blocks[1]
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


# -- texts -------------------------------------------------------------------------------------------------------------


def test_a_text_is_that_of_the_offline_api_and_of_a_chat(client: anthropic.Anthropic, server: Server, text: str) -> None:
    message = both(client)
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [("text", text)]
    assert (message.role, message.type, message.model, message.stop_reason) == ("assistant", "message", NAME, "max_tokens")
    chat = server.post("/v1/chat/completions", {"messages": USER, "temperature": 0, "max_tokens": 24}, headers=KEY).json()
    assert (message.model_extra or {})["speculation"] == chat["speculation"]
    assert message.usage.output_tokens == chat["usage"]["completion_tokens"] == 24
    assert message.usage.input_tokens == chat["usage"]["prompt_tokens"]
    seeded = {"temperature": 1, "seed": 7}
    chat = server.post("/v1/chat/completions", {"messages": USER, **seeded, "max_tokens": 24}, headers=KEY).json()
    assert both(client, **seeded).content[0].model_dump()["text"] == chat["choices"][0]["message"]["content"]


def test_a_stream_has_the_events_of_the_api_in_their_order(server: Server, text: str) -> None:
    found = events(server)
    assert all(name == data["type"] for name, data in found)
    names = [name for name, _ in found]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert len(names) > 8, "told while it is written"
    assert "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta") == text
    start, end = found[0][1]["message"], found[-2][1]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] == end["usage"]["input_tokens"] > 0
    whole = server.post("/v1/messages", {"messages": USER, "max_tokens": 24, "temperature": 0}, headers=KEY).json()
    assert (end["speculation"], end["usage"]) == (whole["speculation"], whole["usage"])
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert {data["index"] for _, data in found if "index" in data} == {0}


def test_the_beta_client_asks_the_same_way(client: anthropic.Anthropic, text: str) -> None:
    message = client.beta.messages.create(**asked(), betas=["interleaved-thinking-2025-05-14"])
    assert message.content[0].model_dump()["text"] == text


def test_a_text_that_meets_a_stop_sequence_says_which(client: anthropic.Anthropic, text: str) -> None:
    message = both(client, stop_sequences=["\x00", text[10:14]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[10:14])
    assert message.content[0].model_dump()["text"] == text.partition(text[10:14])[0]
    assert both(client, guided_choice=["self"]).stop_reason == "end_turn"


def test_the_log_says_where_a_system_prompt_changes(client: anthropic.Anthropic, server: Server) -> None:
    lines = [f"{place}: a line" for place in range(180)]
    for date in ("Monday", "Tuesday"):
        system = "\n".join([*lines[:40], f"Today is {date}.", *lines[40:]])
        message = client.messages.create(**asked(system=system, max_tokens=1))
    line = server.logged(event="a system prompt changes, and the prefix cache ends there")
    assert (line["level"], line["request_id"], line["line"]) == ("warning", message._request_id, 41)


def test_what_the_prefix_cache_has_is_told(client: anthropic.Anthropic) -> None:
    """It is told of a stream at its end: at its beginning nobody knows."""
    messages = [{"role": "user", "content": "import os\n" * 40}]
    first, second = (client.messages.create(**asked(messages=messages)).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0
    assert (second.cache_read_input_tokens or 0) >= 16
    assert first.input_tokens == second.input_tokens + (second.cache_read_input_tokens or 0)
    with client.messages.stream(**asked(messages=messages)) as stream:
        assert stream.get_final_message().usage == second


def test_the_schema_of_an_answer_holds_it(client: anthropic.Anthropic) -> None:
    fields: Any = {"output_config": {"format": {"type": "json_schema", "schema": POINT}}, "max_tokens": 60}
    assert 0 <= json.loads(both(client, **fields).content[0].model_dump()["text"])["x"] <= 9


# -- tools -------------------------------------------------------------------------------------------------------------


def test_a_call_goes_back_with_its_result(client: anthropic.Anthropic, server: Server) -> None:
    fields: Any = {"tools": TOOLS, "max_tokens": 200}
    message = both(client, **fields, tool_choice={"type": "tool", "name": "move", "disable_parallel_tool_use": True})
    (call,) = message.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (call.name, message.stop_reason) == ("move", "tool_use")
    assert isinstance(call.input["x"], int)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "done"}]}
    turns: Any = [*USER, message.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}]
    again = client.messages.create(**asked(messages=turns, tools=TOOLS))
    assert again.content[0].type == "text"
    function = {"name": "move", "arguments": json.dumps(call.input)}
    chat = [*USER, {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}]
    chat += [{"role": "tool", "tool_call_id": call.id, "content": "done"}, {"role": "user", "content": "go on"}]
    functions = [{"type": "function", "function": {"name": tool["name"]}} for tool in TOOLS]
    body = {"messages": chat, "tools": functions, "temperature": 0, "max_tokens": 24}
    told = server.post("/v1/chat/completions", body, headers=KEY).json()
    assert told["choices"][0]["message"]["content"] == again.content[0].model_dump()["text"]


def test_a_choice_of_tools_is_kept_to(client: anthropic.Anthropic) -> None:
    fields: Any = {"tools": TOOLS, "max_tokens": 200}
    for seed in range(3):
        choice = {"type": "any", "disable_parallel_tool_use": True}
        (call,) = both(client, **fields, temperature=1, seed=seed, tool_choice=choice).content
        assert call.type == "tool_use"
    called = r'<tool_call>\{"name": "stop", "arguments": \{\}\}</tool_call>'
    fields["guided_regex"] = f"ok{called}{called}"
    assert [block.type for block in both(client, **fields).content] == ["text", "tool_use", "tool_use"]
    alone: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = both(client, **fields, tool_choice=alone)
    assert ([block.type for block in message.content], message.stop_reason) == (["text", "tool_use"], "tool_use")
    (only,) = both(client, **fields, tool_choice={"type": "none"}).content
    assert only.type == "text"


def test_the_input_of_a_call_is_told_in_parts(server: Server) -> None:
    schema = {**POINT, "properties": {"x": {"type": "string", "minLength": 40, "maxLength": 60}}}
    tool = {"name": "say", "input_schema": schema}
    choice = {"type": "tool", "name": "say"}
    found = events(server, tools=[tool], tool_choice=choice, max_tokens=200, seed=1, temperature=1, speculation="off")
    parts = [data["delta"]["partial_json"] for name, data in found if name == "content_block_delta"]
    assert len(parts) > 3
    assert 40 <= len(json.loads("".join(parts))["x"]) <= 60
    begun = next(data["content_block"] for name, data in found if name == "content_block_start")
    assert (begun["type"], begun["name"], begun["input"]) == ("tool_use", "say", {})


def test_a_call_that_a_stop_sequence_cuts_off_ends_with_it(server: Server) -> None:
    tool = {"name": "say", "input_schema": {**POINT, "properties": {"x": {"const": "rm -r x/y"}}}}
    choice = {"type": "tool", "name": "say"}
    found = events(server, tools=[tool], tool_choice=choice, max_tokens=200, stop_sequences=["/y"])
    assert [data["delta"] for name, data in found if name == "message_delta"] == [
        {"stop_reason": "stop_sequence", "stop_sequence": "/y"}
    ]


@pytest.mark.parametrize("speculation", [None, "off"])
def test_blocks_stand_in_the_order_in_which_they_were_written(client: anthropic.Anthropic, speculation: Any) -> None:
    call = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    fields: Any = {"tools": TOOLS, "guided_choice": [f"A\n{call}\nB\n{call}\nC"], "max_tokens": 200}
    content = both(client, **fields, speculation=speculation).content
    assert [block.type for block in content] == ["text", "tool_use", "text", "tool_use", "text"]
    assert [block.text.strip() for block in content if block.type == "text"] == ["A", "B", "C"]


def test_an_input_that_is_no_json_is_told_in_an_object(client: anthropic.Anthropic) -> None:
    for arguments in ('{"x": 1e999}', '{"x": NaN}', '{"x": tru}'):
        regex = '<tool_call>{"name": "stop", "arguments": ' + arguments + "}</tool_call>"
        fields: Any = {"tools": TOOLS, "guided_choice": [regex], "max_tokens": 100}
        (call,) = client.messages.create(**asked(**fields)).content
        assert call.model_dump()["input"] == {"INVALID_JSON": arguments}


# -- thoughts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    with running(save_harmony(tmp_path_factory.mktemp("harmony"))) as server:
        yield anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


def test_thoughts_are_a_block_before_the_text_and_go_back(thinker: anthropic.Anthropic) -> None:
    fields: Any = {"model": thinker.models.list().data[0].id, "guided_grammar": FINAL, "max_tokens": 90}
    message = both(thinker, **fields)
    thoughts, answer = message.content
    assert isinstance(thoughts, anthropic.types.ThinkingBlock)
    assert len(thoughts.thinking) > 30
    assert len(thoughts.signature) == 32
    assert answer.model_dump()["text"] == "It is 5."
    with thinker.messages.stream(**asked(**fields)) as stream:
        kinds = [event.type for event in stream]
    assert kinds.count("thinking") > 2, "told while they are written"
    assert kinds.count("signature") == 1
    turns: Any = [*USER, message.to_param(), *USER]
    assert thinker.messages.create(**asked(**{**fields, "messages": turns})).content[1].type == "text"


# -- counts, keys, headers and errors ----------------------------------------------------------------------------------


def test_tokens_are_counted_as_they_are_written(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": NAME, "messages": USER, "system": [{"type": "text", "text": "import os"}], "tools": TOOLS}
    counted = client.messages.count_tokens(**fields).input_tokens
    assert counted == client.messages.create(**fields, max_tokens=1).usage.input_tokens
    assert counted > client.messages.count_tokens(model=NAME, messages=USER).input_tokens


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [
        ({"x-api-key": "secret"}, 200, None),
        ({"authorization": "Bearer secret", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}, 200, None),
        ({"x-api-key": "other"}, 401, "authentication_error"),
        ({}, 401, "authentication_error"),
        ({**KEY, "origin": "http://elsewhere.example"}, 403, "permission_error"),
    ],
)
def test_keys_are_taken_in_both_headers(server: Server, headers: Any, status: int, kind: str | None) -> None:
    body = {"messages": USER, "max_tokens": 1}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = server.post(path, body, headers=headers)
        assert response.status_code == status, response.text
        if kind is not None:
            assert response.json()["type"] == "error"
            assert response.json()["error"]["type"] == kind
    body = {"prompt": "x", "max_tokens": 1}
    assert server.post("/v1/completions", body, headers=headers).status_code == status


def test_what_is_passed_over_is_named(server: Server) -> None:
    cached = [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}, "citations": None}]
    body: Any = {"messages": [{"role": "user", "content": cached}], "system": cached, "tools": TOOLS}
    paths = {"/v1/messages": {"max_tokens": 1}, "/v1/messages/count_tokens": {}}
    for path, needed in paths.items():
        assert "x-ignored-fields" not in server.post(path, {**body, **needed}, headers=KEY).headers
    cached[0]["odd field\n"] = 1
    thinking = {"type": "enabled", "budget_tokens": 1024}
    more: Any = {"metadata": {"user_id": "a"}, "service_tier": "auto", "thinking": thinking, "fallback": 1}
    more |= {"output_config": {"task_budget": {"total": 1}}, "tool_choice": {"type": "auto", "oddity": 1}}
    for path, needed in paths.items():
        found = server.post(path, {**body, **more, **needed}, headers=KEY).headers["x-ignored-fields"]
        names = ("fallback", "messages.content.odd?field?", "metadata", "output_config.task_budget", "service_tier")
        assert found == ", ".join((*names, "thinking", "tool_choice.oddity"))
    streamed = server.post("/v1/messages", {**body, **more, "stream": True, "max_tokens": 1}, headers=KEY)
    assert streamed.headers["x-ignored-fields"] == found


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages=[]: there is no message"),
        ({"messages": [*USER, {"role": "assistant", "content": "x"}]}, "messages.1.role="),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}, "messages.0.content.1.type="),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text: the field is missing.",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.type="),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role="),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
            "messages.0.content.0.content.0.type=",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content="),
        ({"system": [IMAGE]}, "system.0.type="),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type="),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: the field is missing"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name="),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "fly"}}, "tool_choice.name="),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type="),
        (
            {"tools": [*TOOLS, {"name": "f", "input_schema": {"type": "no such"}}], "tool_choice": {"type": "any"}},
            "tools.2.input_schema=",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no such"}}}},
            "output_config.format.sch",
        ),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "tools": TOOLS,
                "tool_choice": {"type": "any"},
            },
            "tool_choice.type='any': the text cannot be a call",
        ),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences="),
        ({"max_tokens": None}, "max_tokens: the field is missing"),
        ({"max_tokens": 0}, "max_tokens="),
        ({"temperature": "hot"}, "temperature="),
        ({"min_p": 7}, "min_p="),
        ({"container": "x"}, "container="),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"max_completion_tokens": 5}, "max_completion_tokens="),
        ({"reasoning_effort": "low"}, "reasoning_effort="),
        (
            {"tools": [{"name": "f", "input_schema": {"$ref": "#"}}], "tool_choice": {"type": "any"}},
            "tools.0.input_schema=",
        ),
        ({"mcp_servers": [{}]}, "mcp_servers="),
    ],
)
def test_what_is_wrong_is_told_by_its_name(server: Server, fields: Any, said: str) -> None:
    response = server.post("/v1/messages", {"messages": USER, "max_tokens": 1, **fields}, headers=KEY)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error"), body
    assert body["error"]["message"].startswith(said), body
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def test_errors_have_the_types_of_the_client(client: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**asked(), "model": "claude"})
    assert (missing.value.type, missing.value.error_code) == ("not_found_error", "model_not_found")
    with pytest.raises(anthropic.RequestTooLargeError) as large:
        client.messages.create(**asked(messages=[{"role": "user", "content": "x"}] * 10_000))
    assert large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
    for method, path, status in (("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404)):
        response = (server.get if method == "GET" else server.post)(path, headers=KEY)
        assert (response.status_code, response.json()["type"]) == (status, "error")
    assert "it has /v1/messages instead" in response.json()["error"]["message"]


def test_a_fault_behind_the_beginning_of_a_stream_is_an_event(client: anthropic.Anthropic, server: Server) -> None:
    fields: Any = {"allowed_token_ids": [5], "bad_words": [], "min_tokens": 2, "stop_token_ids": [5], "max_tokens": 4}
    *_, (name, last) = events(server, **fields)
    assert (name, last["type"], last["error"]["details"]) == ("error", "error", {"error_code": "no_token_left"})
    with pytest.raises(anthropic.APIStatusError, match="forbid every token"):
        list(client.messages.create(model=NAME, messages=USER, stream=True, max_tokens=4, extra_body=fields))


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_its_memory(server: Server, streamed: bool) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient() as client:
            body = {"messages": USER, "stream": streamed, "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
            task = asyncio.create_task(client.post(f"{server.url}/v1/messages", json=body, headers=KEY, timeout=60))
            await asyncio.to_thread(server.busy)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    before = server.metric("vllm:generation_tokens_total")
    asyncio.run(ask())
    assert server.rests()
    assert server.metric("vllm:generation_tokens_total") - before < 1500
    server.logged(status=499)


def test_requests_are_counted_and_rest_behind(server: Server) -> None:
    name = "vllm:generation_tokens_total"
    before = server.metric(name), server.metric("outrider:http_requests_total", 'path="/v1/messages"', 'status="200"')
    server.post("/v1/messages", {"messages": USER, "max_tokens": 24, "temperature": 0}, headers=KEY)
    events(server)
    assert server.metric(name) - before[0] == 48
    count = server.metric("outrider:http_requests_total", 'path="/v1/messages"', 'status="200"')
    assert count - before[1] == 2
    assert server.rests()

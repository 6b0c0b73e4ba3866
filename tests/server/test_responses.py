"""OpenAI's Responses API of a real server, by its own client: whole and streamed, tools, formats, thoughts and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from outrider import LLM, SamplingParams
from tests.server.running import TEMPLATE, Server, running
from tests.server.test_thoughts import FINAL, save_harmony

NAME, PROMPT = "outrider-embedded", "def f(x):"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "move", "description": "Moves.", "parameters": POINT, "strict": True},
    {"type": "function", "name": "stop", "parameters": {"type": "object", "properties": {}}},
]
#: What the client has no arguments for.
_EXTRA = ("seed", "guided_regex", "guided_grammar", "guided_choice", "stop")


@pytest.fixture(scope="module")
def template() -> str:
    return TEMPLATE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, template: str) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("server") / "template.jinja"
    file.write_text(template, "utf-8")
    with running("--method", "draft_model", "--chat-template", str(file)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    """What the offline API writes behind the prompt."""
    return llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(temperature=0, max_tokens=24))[0].text


def asked(**fields: Any) -> Any:
    """The arguments of the client, for a greedy text unless these fields say otherwise."""
    given = {"model": NAME, "input": PROMPT, "max_output_tokens": 24, "temperature": 0, **fields}
    extra = {name: given.pop(name) for name in _EXTRA if name in given}
    return {**given, "extra_body": extra}


def items(response: Response) -> list[dict[str, Any]]:
    """The items without the names of items and calls, which are drawn."""
    return [{**item.model_dump(), "id": None, "call_id": None} for item in response.output]


def both(client: openai.OpenAI, **fields: Any) -> Response:
    """A whole answer. The streamed one says the same, but for names that are drawn."""
    whole = client.responses.create(**asked(**fields))
    last = list(client.responses.create(**asked(**fields, stream=True)))[-1]
    assert last.type == f"response.{whole.status}"
    streamed = last.response
    assert items(streamed) == items(whole)
    assert (streamed.status, streamed.incomplete_details) == (whole.status, whole.incomplete_details)
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def test_a_text_is_that_of_the_offline_api_and_of_a_chat(client: openai.OpenAI, server: Server, text: str) -> None:
    response = both(client)
    assert response.output_text == text
    assert (response.object, response.model, response.status) == ("response", NAME, "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item["status"] for item in items(response)] == ["incomplete"]
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 24}
    chat = server.post("/v1/chat/completions", body).json()
    assert (response.model_extra or {})["speculation"] == chat["speculation"]
    assert response.usage is not None
    assert response.usage.output_tokens == chat["usage"]["completion_tokens"] == 24
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    seeded = server.post("/v1/chat/completions", {**body, "temperature": 1, "seed": 7}).json()
    assert both(client, temperature=1, seed=7).output_text == seeded["choices"][0]["message"]["content"]


def test_a_stream_has_the_events_of_the_api_in_their_order(client: openai.OpenAI, text: str) -> None:
    found = list(client.responses.create(**asked(stream=True)))
    names = [event.type.removeprefix("response.") for event in found]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert len(names) > 12, "told while it is written"
    assert [event.sequence_number for event in found] == [*range(len(found))]
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == text
    ids = {event.item_id for event in found if hasattr(event, "item_id")}
    assert len(ids) == 1


def test_items_of_a_conversation_are_the_turns_of_a_chat(client: openai.OpenAI, server: Server) -> None:
    given: Any = [
        {"role": "developer", "content": "import os"},
        {"role": "user", "content": [{"type": "input_text", "text": PROMPT}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        {"role": "user", "content": "go on"},
    ]
    response = client.responses.create(**asked(input=given, instructions="Write code."))
    chat = [
        {"role": "system", "content": "Write code."},
        {"role": "developer", "content": "import os"},
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
        {"role": "user", "content": "go on"},
    ]
    told = server.post("/v1/chat/completions", {"messages": chat, "temperature": 0, "max_tokens": 24}).json()
    assert told["choices"][0]["message"]["content"] == response.output_text
    assert response.instructions == "Write code."


def test_a_call_goes_back_with_its_output(client: openai.OpenAI, server: Server) -> None:
    fields: Any = {"tools": TOOLS, "max_output_tokens": 200}
    response = both(client, **fields, tool_choice={"type": "function", "name": "move"}, parallel_tool_calls=False)
    with client.responses.stream(**asked(**fields, tool_choice="required", parallel_tool_calls=False)) as stream:
        assert stream.get_final_response().output[0].type == "function_call"
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, response.status) == ("move", "completed")
    assert 0 <= json.loads(call.arguments)["x"] <= 9
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    again = client.responses.create(
        **asked(input=[{"role": "user", "content": PROMPT}, call.model_dump(), output], tools=TOOLS)
    )
    function = {"name": "move", "arguments": call.arguments}
    chat: Any = [{"role": "user", "content": PROMPT}]
    chat += [{"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]}]
    chat += [{"role": "tool", "tool_call_id": call.call_id, "content": "done"}]
    functions = [{"type": "function", "function": {"name": tool["name"]}} for tool in TOOLS]
    body = {"messages": chat, "tools": functions, "temperature": 0, "max_tokens": 24}
    told = server.post("/v1/chat/completions", body).json()
    assert told["choices"][0]["message"]["content"] == again.output_text


def test_functions_of_a_namespace_are_called_by_it(client: openai.OpenAI, server: Server) -> None:
    tools: Any = [{**TOOLS[1], "tools": []}, {"type": "namespace", "name": "robot", "description": "Acts.", "tools": TOOLS}]
    fields: Any = {"tools": tools, "max_output_tokens": 200}
    choice: Any = {"type": "function", "name": "move", "namespace": "robot"}
    (call,) = both(client, **fields, tool_choice=choice, parallel_tool_calls=False).output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.namespace, call.name) == ("robot", "move")
    assert 0 <= json.loads(call.arguments)["x"] <= 9
    (plain,) = both(client, **fields, tool_choice={"type": "function", "name": "stop"}).output
    assert isinstance(plain, ResponseFunctionToolCall)
    assert (plain.namespace, plain.name) == (None, "stop")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    turns = [{"role": "user", "content": PROMPT}, call.model_dump(), output]
    again = client.responses.create(**asked(input=turns, tools=tools))
    named = {"name": "robot.move", "arguments": call.arguments}
    chat: Any = [{"role": "user", "content": PROMPT}]
    chat += [{"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": named}]}]
    chat += [{"role": "tool", "tool_call_id": call.call_id, "content": "done"}]
    names = ("stop", "robot.move", "robot.stop")
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    body = {"messages": chat, "tools": functions, "temperature": 0, "max_tokens": 24}
    told = server.post("/v1/chat/completions", body).json()
    assert told["choices"][0]["message"]["content"] == again.output_text


def test_a_call_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    tools = [{**TOOLS[0], "parameters": {**POINT, "properties": {"x": {"const": "rm -r x/y"}}}}]
    fields: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    for more, status in (({"stop": "/y"}, "incomplete"), ({}, "completed")):
        *_, last = client.responses.create(**asked(**fields, **more, stream=True))
        assert last.type == "response.completed"
        assert [item.status for item in last.response.output] == [status]


def test_a_text_before_calls_is_an_item_of_its_own(client: openai.OpenAI) -> None:
    called = r'<tool_call>\{"name": "stop", "arguments": \{\}\}</tool_call>'
    response = both(client, tools=TOOLS, max_output_tokens=200, guided_regex=f"ok{called}{called}")
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert response.output_text == "ok"


def test_items_stand_in_the_order_in_which_they_were_written(client: openai.OpenAI) -> None:
    call = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    response = both(client, tools=TOOLS, max_output_tokens=200, guided_choice=[f"A\n{call}\nB\n{call}"])
    assert [item.type for item in response.output] == ["message", "function_call"] * 2
    assert "".join(response.output_text.split()) == "AB"


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_whole_where_the_call_behind_it_is_cut_off(client: openai.OpenAI, stream: bool) -> None:
    text = 'Sure. <tool_call>{"name": "move", "arguments": {"x": ' + "1" * 600
    found = client.responses.create(**asked(tools=TOOLS, max_output_tokens=60, guided_choice=[text], stream=stream))
    response = list(found)[-1].response if stream else found
    assert response.status == "incomplete"
    assert [item.status for item in response.output] == ["completed", *(["incomplete"] if stream else [])]


def test_a_format_holds_the_text(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "point", "schema": POINT, "strict": True}
    response = both(client, text={"format": form, "verbosity": "low"}, max_output_tokens=60)
    assert 0 <= json.loads(response.output_text)["x"] <= 9
    json.loads(both(client, text={"format": {"type": "json_object"}}, max_output_tokens=200, seed=3).output_text)


def test_log_probabilities_are_told_with_the_text(client: openai.OpenAI) -> None:
    response = both(client, top_logprobs=2, include=["message.output_text.logprobs"])
    (message,) = response.output
    found = message.model_dump()["content"][0]["logprobs"]
    assert len(found) == 24
    assert all(len(entry["top_logprobs"]) == 2 for entry in found)


def test_thoughts_are_an_item_before_the_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(save_harmony(tmp_path_factory.mktemp("harmony"))) as server:
        thinker = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        fields: Any = {"model": thinker.models.list().data[0].id, "guided_grammar": FINAL, "max_output_tokens": 90}
        response = both(thinker, **fields)
        thoughts, answer = response.output
        assert thoughts.type == "reasoning"
        assert len(thoughts.model_dump()["content"][0]["text"]) > 30
        assert response.output_text == "It is 5."
        kinds = [event.type for event in thinker.responses.create(**asked(**fields, stream=True))]
        assert kinds.count("response.reasoning_text.delta") > 2, "told while they are written"
        turns: Any = [
            {"role": "user", "content": PROMPT},
            *(item.model_dump(exclude_none=True) for item in response.output),
        ]
        turns += [{"role": "user", "content": PROMPT}]
        assert thinker.responses.create(**asked(**{**fields, "input": turns})).output_text == "It is 5."
        assert answer.type == "message"


CUT = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": '}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id="),
        ({"background": True}, "background="),
        ({"conversation": "conv_1"}, "conversation="),
        ({"messages": []}, "messages="),
        ({"input": None}, "input: the field is missing"),
        ({"input": []}, "input="),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input.0.role='assistant'"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0.type='reasoning'"),
        ({"input": [{"type": "reasoning"}], "instructions": "x"}, "input.0.type="),
        (
            {"input": [{"type": None, "content": "x"}]},
            "input.0.role: the field is missing. An item",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type="),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type="),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input.0.output: the field is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type="),
        ({"tools": [{"type": "function", "name": ""}]}, "tools.0.name="),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools.0.tools: the field is missing"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": []}]}, "tools.0.tools=[]"),
        ({"tools": [{"type": "function", "name": "a", "tools": TOOLS}]}, "tools.0.tools=['"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.type="),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice.name='fly'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.name=None"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type="),
        ({"tool_choice": "required"}, "tool_choice="),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "no such"}}}}, "text.format.schema={"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: the field is missing"),
        ({"text": {"format": {"type": "json_schema", "schema": False}}}, "text.format.schema="),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "name": 5}}}, "text.format.name="),
        ({"input": [{"role": "user", "content": "x"}, CUT, OUTPUT]}, "input.1.arguments="),
        ({"input": [CUT, OUTPUT], "instructions": "x"}, "input.0.arguments="),
        ({"max_output_tokens": 0}, "max_output_tokens="),
        ({"temperature": "hot"}, "temperature="),
    ],
)
def test_what_is_wrong_is_told_by_its_name(server: Server, fields: Any, said: str) -> None:
    response = server.post("/v1/responses", {"input": PROMPT, "max_output_tokens": 1, **fields})
    body = response.json()
    assert response.status_code == 400, body
    assert body["error"]["message"].startswith(said), body


def test_what_is_passed_over_is_named(server: Server) -> None:
    habits = {"store": False, "metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}
    body = {"input": PROMPT, "max_output_tokens": 1, **habits}
    assert "x-ignored-fields" not in server.post("/v1/responses", body).headers
    more: Any = {"truncation": "auto", "reasoning": {"effort": "low", "summary": "auto"}, "oddity": 1}
    more["text"] = {"odd": 1, "format": {"type": "text", "odd": 1}}
    found = server.post("/v1/responses", {**body, **more})
    names = ("oddity", "reasoning.effort", "reasoning.summary", "text.format.odd", "text.odd", "truncation")
    assert found.headers["x-ignored-fields"] == ", ".join(names)
    assert found.json()["metadata"] == {"a": "b"}
    odd = b'{"input": "x", "max_output_tokens": 1, "metadata": {"a": 1e999}}'
    headers = {"content-type": "application/json"}
    assert httpx.post(f"{server.url}/v1/responses", content=odd, headers=headers).json()["metadata"] is None
    odd = odd.replace(b'"metadata": ', b'"tools": [{"type": "function", "name": "f", "parameters": ').replace(
        b"}}", b"}}]}"
    )
    assert httpx.post(f"{server.url}/v1/responses", content=odd, headers=headers).json()["tools"] == []
    assert "does not speak" in server.post("/v1/responses/resp_1/cancel", {}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "prompt", "limit", "stop"),
    [
        ("/v1/responses", {"input": PROMPT}, "max_output_tokens", "stop"),
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}]}, "max_tokens", "stop_sequences"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}, "max_tokens", "stop"),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}, "max_tokens", "stop"),
    ],
)
def test_the_first_piece_is_what_the_model_wrote(server: Server, path: str, prompt: Any, limit: str, stop: str) -> None:
    """And not what stands at the beginning of each stream: it comes before the prompt is read."""
    for stops in (["no"], ["other"]):
        body = {**prompt, limit: 24, stop: stops, "guided_choice": ["no"], "stream": True}
        response = server.post(path, body)
        logged = server.logged(event="request", request_id=response.headers["x-request-id"])
        assert response.status_code == logged["status"] == 200
        assert ("first_piece_seconds" in logged) is (stops == ["other"])

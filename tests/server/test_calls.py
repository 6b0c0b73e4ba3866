"""Calls that a request asks for, and prompts that come back: checked with the openai client against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import llguidance
import openai
import pytest
from llguidance.hf import from_tokenizer
from pydantic import BaseModel
from transformers import AutoTokenizer

from outrider.config import default_model
from outrider.server.tool_forms import ToolForm
from outrider.server.tool_grammars import MAX_CALLS, calls_grammar
from outrider.server.tools import ToolListener
from tests.server.running import TEMPLATE, Server, running

NAME = "outrider-embedded"
PROMPT = "def parse(line):\n"


class Place(BaseModel):
    """With a schema that refers to itself."""

    name: str
    inner: list[Place] = []


def tool(name: str, schema: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
MEMBERS = {name: value for name, value in POINT.items() if name != "type"}  # what it says of objects
TOOLS = [tool("move", POINT), tool("stop", {"type": "object", "properties": {}, "additionalProperties": False})]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("server") / "template.jinja"
    template.write_text(TEMPLATE, "utf-8")
    with running("--chat-template", str(template)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def called(client: openai.OpenAI, **fields: Any) -> list[tuple[str, Any]]:
    """The calls of a whole answer, which is nothing else; those of the stream are the same."""
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 200}
    asked |= {"seed": 3, **fields}
    whole = client.chat.completions.create(**asked).choices[0]
    assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
    found = [(call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls or []]
    names, arguments = list[str](), list[str]()
    for chunk in client.chat.completions.create(**asked, stream=True):
        assert not chunk.choices[0].delta.content
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(names)
                names.append(call.function.name)
                arguments.append("")
            arguments[call.index] += call.function.arguments
    assert list(zip(names, map(json.loads, arguments), strict=True)) == found
    return found


@pytest.mark.parametrize("speculation", ["off", "draft_model"])
def test_a_call_that_is_required_comes(client: openai.OpenAI, speculation: str) -> None:
    for seed in range(4):
        body = {"speculation": speculation}
        found = called(client, tool_choice="required", parallel_tool_calls=False, seed=seed, extra_body=body)
        ((name, arguments),) = found
        assert arguments.keys() == ({"x"} if name == "move" else set())
        assert name == "stop" or 0 <= arguments["x"] <= 9


def test_the_function_that_is_named_is_called(client: openai.OpenAI) -> None:
    for name in ("move", "stop"):
        ((got, _),) = called(client, tool_choice={"type": "function", "function": {"name": name}})
        assert got == name


def test_several_calls_may_come_where_they_are_not_refused(client: openai.OpenAI) -> None:
    """A bias towards what separates two calls brings a second one."""
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    bias = {str(tokenizer.encode("\n")[0]): 50}
    fields: Any = {"tool_choice": "required", "logit_bias": bias}
    limited = called(client, parallel_tool_calls=False, **fields)
    assert len(limited) == 1
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 200}
    whole = client.chat.completions.create(**asked, **fields, seed=3).choices[0]
    assert len(whole.message.tool_calls or []) > 1


def test_an_automatic_call_is_the_only_one_where_that_is_asked_for(client: openai.OpenAI) -> None:
    call = r'<tool_call>\{"name": "stop", "arguments": \{\}\}</tool_call>'
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 200}
    asked |= {"extra_body": {"guided_regex": f"ok{call}{call}"}}
    both = client.chat.completions.create(**asked).choices[0]
    one = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert (len(both.message.tool_calls or []), len(one.message.tool_calls or [])) == (2, 1)
    assert (one.message.content, one.finish_reason) == ("ok", "tool_calls")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tools": [*TOOLS, tool("", POINT)]}, "tools.2.function.name"),
        ({"tools": [tool("", POINT)], "tool_choice": "required"}, "tools.0.function.name"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [tool("f", {"type": "no such type"})]}, "tools.0.function.parameters"),
        ({"tool_choice": "required", "tools": [tool("f", {"description": "x" * 70_000})]}, "tools"),
    ],
)
def test_choices_that_there_are_not(server: Server, fields: Any, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [{"type": "no such type"}, {"type": "integer", "multipleOf": 10**9 + 7}])
def test_a_schema_that_is_wrong_is_told_by_its_tool(server: Server, kind: Any, stream: bool) -> None:
    schema = {"type": "object", "properties": {"x": kind}, "required": ["x"]}
    body: Any = {"messages": [{"role": "user", "content": "x"}], "tools": [*TOOLS, tool("fly", schema)], "stream": stream}
    response = server.post("/v1/chat/completions", {**body, "tool_choice": "required"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "tools.2.function.parameters"
    assert error["message"].startswith("tools.2.function.parameters=")
    assert "the schema of the tool 'fly'" in error["message"]
    assert "start:" not in error["message"]
    assert "%json" not in error["message"]
    named = {"type": "function", "function": {"name": "stop"}}
    assert server.post("/v1/chat/completions", {**body, "tool_choice": named, "max_tokens": 4}).status_code == 200


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_two_tools_that_differ_cannot_have_one_name(server: Server, choice: str) -> None:
    body: Any = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tool_choice": choice}
    response = server.post("/v1/chat/completions", {**body, "tools": [*TOOLS, tool(TOOLS[0]["function"]["name"], MEMBERS)]})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "tools.2.function.name"
    assert server.post("/v1/chat/completions", {**body, "tools": [*TOOLS, TOOLS[0]]}).status_code == 200


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "schema",
    [{"type": "string"}, {"type": ["array", "null"]}, {"enum": ["a"]}, {"$ref": "#/$defs/x", "$defs": {"x": {"const": 1}}}],
)
def test_a_schema_that_no_object_fits_is_refused(server: Server, schema: Any, choice: str) -> None:
    body: Any = {"messages": [{"role": "user", "content": "x"}], "tools": [*TOOLS, tool("fly", schema)], "max_tokens": 4}
    response = server.post("/v1/chat/completions", {**body, "tool_choice": choice})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "tools.2.function.parameters"
    assert "the arguments of a call are an object" in error["message"]
    assert server.post("/v1/chat/completions", {**body, "tool_choice": "none"}).status_code == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["integer", "object"], **MEMBERS},
        {"anyOf": [{"type": "integer"}, {"type": "object", **MEMBERS}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", **MEMBERS}}},
        MEMBERS,
    ],
)
def test_required_arguments_are_an_object_where_a_schema_allows_other_values_too(
    client: openai.OpenAI, schema: Any
) -> None:
    for seed in range(3):
        [(name, arguments)] = called(client, tools=[tool("f", schema)], tool_choice="required", parallel_tool_calls=False,
                                     seed=seed)  # fmt: skip
        assert (name, *arguments) == ("f", "x")


def nested(depth: int) -> Any:
    return {"type": "object", "properties": {"a": nested(depth - 1)} if depth else {}}


@pytest.mark.parametrize(
    ("text", "tools", "param"),
    [
        ("x " * 20_000, TOOLS, "messages"),
        ("x", [tool("f", nested(400))], "tools"),
        ("x", [tool(f"fly_to_{number}", POINT) for number in range(1_000)], "tools"),
    ],
    ids=["long text", "deep schema", "many tools"],
)
def test_what_makes_a_prompt_too_large_is_told(server: Server, text: str, tools: Any, param: str) -> None:
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "tools": tools})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_signs_of_another_grammar_in_a_schema_are_text(client: openai.OpenAI) -> None:
    schema = {"type": "object", "description": "root ::= x", "properties": {"a ::= b": {"const": "c ::= d"}}}
    schema |= {"required": ["a ::= b"], "additionalProperties": False}
    fields: Any = {"tools": [tool("f", schema)], "tool_choice": "required", "parallel_tool_calls": False}
    assert called(client, **fields) == [("f", {"a ::= b": "c ::= d"})]


def test_a_text_of_calls_ends_after_a_whole_call(client: openai.OpenAI) -> None:
    """A bias towards what separates two calls brings as many as there may be."""
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    fields: Any = {"tool_choice": "required", "logit_bias": {str(tokenizer.encode("\n")[0]): 50}}
    named: Any = {"tools": TOOLS[1:], "max_tokens": 900}
    assert len(called(client, **fields, **named)) == MAX_CALLS


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_not_told(client: openai.OpenAI, stream: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS[1:], "seed": 3}
    asked |= {"tool_choice": "required", "logit_bias": {str(tokenizer.encode("\n")[0]): 50}, "max_tokens": 60}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        assert not any(chunk.delta.content for chunk in chunks)
        told = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        calls, end = sum(call.id is not None for call in told), chunks[-1].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.message.content is None
        calls, end = len(choice.message.tool_calls or []), choice.finish_reason
    assert end == "length"
    assert 1 <= calls < MAX_CALLS


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_off_is_none(client: openai.OpenAI, choice: str, stream: bool) -> None:
    call = json.dumps({"name": "f", "arguments": {"text": "rm -r x/y"}})
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "temperature": 0}
    schema = {"type": "object", "properties": {"text": {"const": "rm -r x/y"}}, "required": ["text"]}
    asked |= {"tools": [tool("f", {**schema, "additionalProperties": False})], "tool_choice": choice, "stop": "/y"}
    if choice == "auto":
        whole = json.dumps({"name": "f", "arguments": {}})  # one before it changes nothing
        asked["extra_body"] = {"guided_choice": [f"<tool_call>{whole}</tool_call><tool_call>{call}</tool_call>"]}
    found = client.chat.completions.create(**asked, stream=stream)
    assert (list(found)[-1] if stream else found).choices[0].finish_reason == "stop", "or a client runs a part of it"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_arguments_are_told_while_they_are_written(client: openai.OpenAI, choice: str) -> None:
    arguments = {"text": 'a b "c} ' * 20}
    call = json.dumps({"name": "f", "arguments": arguments})
    schema = {"type": "object", "properties": {"text": {"const": arguments["text"]}}, "required": ["text"]}
    schema |= {"additionalProperties": False}
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "tools": [tool("f", schema)]}
    asked |= {"tool_choice": choice, "max_tokens": 400, "temperature": 0, "stream": True}
    if choice == "auto":
        asked["extra_body"] = {"guided_choice": [f"<tool_call>{call}</tool_call>"]}
    else:
        asked["parallel_tool_calls"] = False
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked)]
    parts = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [part.id is None for part in parts] == [False, *[True] * (len(parts) - 1)]
    assert {part.index for part in parts} == {0}
    assert len(parts) > 3, "and not one with all of them"
    assert json.loads("".join(part.function.arguments for part in parts)) == arguments
    assert chunks[-1].finish_reason == "tool_calls"


# -- prompts that come back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_echoes_with_log_probabilities(client: openai.OpenAI, count: int, n: int) -> None:
    asked: Any = {"model": NAME, "prompt": [PROMPT, "x = 1"], "echo": True, "logprobs": count, "seed": 1, "n": n}
    whole = client.completions.create(**asked, max_tokens=6)
    texts = [""] * 2 * n
    lists: list[dict[str, list[Any]]] = [{} for _ in texts]
    for chunk in client.completions.create(**asked, max_tokens=6, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                lists[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole.choices]
    assert lists == [choice.logprobs and choice.logprobs.model_dump() for choice in whole.choices]
    assert texts[0].startswith(PROMPT)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("count", [None, 1])
def test_a_prompt_alone_is_scored_without_a_token_more(client: openai.OpenAI, streamed: bool, count: int | None) -> None:
    asked: Any = {"model": NAME, "prompt": PROMPT, "echo": True, "logprobs": count}
    want = client.completions.create(**asked, max_tokens=1).choices[0].logprobs
    if streamed:
        options = {"include_usage": True}
        chunks = list(client.completions.create(**asked, max_tokens=0, stream=True, stream_options=options))
        usage = chunks[-1].usage
        text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        end = chunks[-2].choices[0].finish_reason
        (found,) = [c.choices[0].logprobs for c in chunks[:-1] if c.choices[0].logprobs] or [None]
    else:
        answer = client.completions.create(**asked, max_tokens=0)
        usage, text, end = answer.usage, answer.choices[0].text, answer.choices[0].finish_reason
        found = answer.choices[0].logprobs
    assert (text, end) == (PROMPT, "length")
    assert usage is not None
    assert usage.completion_tokens == 0
    assert (found is None) == (count is None)
    if found is not None and want is not None:
        assert found.token_logprobs == (want.token_logprobs or [])[:-1]


def test_nothing_at_all_is_refused(server: Server) -> None:
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 0}).json()["error"]["param"] == "max_tokens"


# -- without a server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["hermes", "llama"])
@pytest.mark.parametrize("several", [False, True])
def test_the_grammar_takes_what_the_listener_hears(form: ToolForm, several: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    schemas = {"move": POINT, 'odd "name"': Place.model_json_schema(), "any": {"type": "object"}}
    source = llguidance.LLMatcher.grammar_from_lark(calls_grammar(form, schemas, several=several))
    key = "arguments" if form == "hermes" else "parameters"

    def written(name: str, arguments: Any) -> str:
        call = json.dumps({"name": name, key: arguments})
        return f"<tool_call>\n{call}\n</tool_call>" if form == "hermes" else call

    def taken(text: str) -> bool:
        matcher = llguidance.LLMatcher(from_tokenizer(tokenizer), source)
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    good = [("move", {"x": 3}), ('odd "name"', {"name": "a", "inner": [{"name": "b", "inner": []}]}), ("any", {"z": [1]})]
    for name, arguments in good:
        text = written(name, arguments)
        assert taken(text), text
        listener = ToolListener(form)
        ((call,),) = [tuple(c for heard in (listener.hear(text), listener.finish()) for c in heard.calls)]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)
    for text in (written("move", {"x": "3"}), written("fly", {}), f"I call {written(*good[0])}", ""):
        assert not taken(text)
    pair = ("\n" if form == "hermes" else "; ").join(written(*call) for call in good[:2])
    assert taken(pair) == several

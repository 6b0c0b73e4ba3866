"""The server as its clients see it: the texts of the offline API, OpenAI's shapes, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from outrider import LLM, SamplingParams, StructuredOutputs
from tests.conftest import PROMPTS
from tests.server.running import TEMPLATE, Server, running

GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"seed": 11, "max_tokens": 24}
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
NAME = "outrider-embedded"
JSON = {"content-type": "application/json"}
_FILTERED = {"seed": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.05}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("server") / "template.jinja"
    template.write_text(TEMPLATE, "utf-8")
    allowed = ("--allow", "suffix", "--allow", '{"method": "ngram", "min_match": 1}')
    with running("--method", "draft_model", "--chat-template", str(template), *allowed, "--max-n", "64") as server:
        yield server


@pytest.fixture(scope="module")
def template() -> str:
    return TEMPLATE


@pytest.fixture(autouse=True)
def nothing_is_left(server: Server) -> Iterator[None]:
    yield
    assert server.rests()
    assert server.metric("outrider:broken_steps_total") == 0


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def coroutines(server: Server) -> Any:
    """Clients for asyncio belong to one event loop, so this makes one."""
    return lambda: openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=300)


def complete(server: Server, **fields: Any) -> Any:
    response = server.post("/v1/completions", {"prompt": PROMPTS[0], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: Server, content: str = "x", **fields: Any) -> Any:
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: Server, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    response = server.post(path, {**body, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return dict(error)


def events(server: Server, path: str, **fields: Any) -> list[Any]:
    with server.stream(path, {**fields, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
        assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# -- the same texts as offline -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("speculation", [None, "off", "suffix", "ngram", {"method": "draft_model", "tree": [2, 1]}])
def test_texts_are_those_of_the_offline_api(server: Server, llm: LLM, fields: Any, speculation: Any) -> None:
    want = [output.text for output in llm.generate(PROMPTS, SamplingParams(**fields))]
    asked = {"prompt": PROMPTS, **fields, "speculation": speculation}
    assert [choice["text"] for choice in complete(server, **asked)["choices"]] == want
    streamed = [""] * len(PROMPTS)
    for chunk in events(server, "/v1/completions", **asked):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == want


def test_texts_are_the_same_among_many_others(server: Server, llm: LLM, coroutines: Any) -> None:
    want = {
        (prompt, mode): llm.generate(prompt, SamplingParams(**fields))[0].text
        for prompt in PROMPTS
        for mode, fields in enumerate((GREEDY, SEEDED))
    }

    async def whole(client: openai.AsyncOpenAI, prompt: str, fields: Any, more: Any) -> str:
        return (await client.completions.create(model=NAME, prompt=prompt, **fields, extra_body=more)).choices[0].text

    async def streamed(client: openai.AsyncOpenAI, prompt: str, fields: Any, more: Any) -> str:
        stream = await client.completions.create(model=NAME, prompt=prompt, stream=True, **fields, extra_body=more)
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def ask() -> list[str]:
        async with coroutines() as client:
            calls = []
            for i in range(64):
                way, method = (whole, streamed)[i // 8 % 2], (None, "off", "suffix", "ngram")[i // 16]
                more = {} if method is None else {"speculation": method}
                calls.append(way(client, PROMPTS[i % 4], (GREEDY, SEEDED)[i // 4 % 2], more))
            return list(await asyncio.gather(*calls))

    assert asyncio.run(ask()) == [want[PROMPTS[i % 4], i // 4 % 2] for i in range(64)]


def test_chats_are_those_of_the_offline_api(server: Server, llm: LLM, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def f(x):"}]
    for fields in (GREEDY, SEEDED):
        want = llm.chat(messages, SamplingParams(**fields))[0].text
        whole = client.chat.completions.create(model=NAME, messages=messages, **fields)
        assert whole.choices[0].message.content == want
        assert whole.choices[0].finish_reason == "length"
        stream = client.chat.completions.create(model=NAME, messages=messages, stream=True, **fields)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == want


def test_samples_are_numbered_prompt_by_prompt(server: Server, llm: LLM) -> None:
    want = [s.text for o in llm.generate(PROMPTS[:2], SamplingParams(**SEEDED, n=3)) for s in o.outputs]
    choices = complete(server, prompt=PROMPTS[:2], n=3, **SEEDED)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["text"] for choice in choices] == want
    assert len(set(want)) > 2, "samples differ"


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"stop": "self"}, {"stop": "self"}),
        ({"stop": ["\n\n", "self"]}, {"stop": ("\n\n", "self")}),
        ({"logit_bias": {"199": 50}}, {"logit_bias": {199: 50.0}}),
        ({"presence_penalty": 1.5, "frequency_penalty": 1}, {"presence_penalty": 1.5, "frequency_penalty": 1.0}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        (_FILTERED, _FILTERED),
        ({"min_tokens": 20, "ignore_eos": True}, {"min_tokens": 20, "ignore_eos": True}),
        ({"stop_token_ids": [199]}, {"stop_token_ids": (199,)}),
        ({"bad_words": ["self"]}, {"bad_words": ("self",)}),
        ({"allowed_token_ids": [5, 199]}, {"allowed_token_ids": (5, 199)}),
        ({"guided_regex": "[0-9]{4}x"}, {"structured_outputs": StructuredOutputs(regex="[0-9]{4}x")}),
        ({"guided_choice": ["ab", "cd"]}, {"structured_outputs": StructuredOutputs(choice=("ab", "cd"))}),
        ({"structured_outputs": {"regex": "[0-9]{4}x"}}, {"structured_outputs": StructuredOutputs(regex="[0-9]{4}x")}),
        ({"guided_grammar": 'start: "a" "b"'}, {"structured_outputs": StructuredOutputs(grammar='start: "a" "b"')}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_every_parameter_arrives(server: Server, llm: LLM, fields: Any, params: Any) -> None:
    (want,) = llm.generate(PROMPTS[0], SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params}))
    (choice,) = complete(server, **{**GREEDY, **fields})["choices"]
    assert (choice["text"], choice["finish_reason"]) == (want.text, want.finish_reason)
    assert choice["stop_reason"] == want.first.stop_reason


def test_a_prompt_may_be_tokens_and_may_be_echoed(server: Server, llm: LLM) -> None:
    tokens = list(llm.encode(PROMPTS[0]))
    whole = complete(server, prompt=tokens, echo=True, return_token_ids=True, **GREEDY)["choices"][0]
    (want,) = llm.generate(PROMPTS[0], SamplingParams(**GREEDY))
    assert whole["text"] == PROMPTS[0] + want.text
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (tokens, list(want.token_ids))
    chunks = events(server, "/v1/completions", prompt=[tokens], echo=True, **GREEDY)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPTS[0] + want.text


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_usage_counts_text_and_not_drafts(server: Server, llm: LLM) -> None:
    body = complete(server, **GREEDY)
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["prompt_tokens"] == len(llm.encode(PROMPTS[0]))
    assert "completion_tokens_details" not in body["usage"]
    told, stats = body["speculation"], llm.generate(PROMPTS[0], SamplingParams(**GREEDY))[0].stats
    assert told["method"] == "draft_model"
    assert (told["target_passes"], told["drafts"]) == (stats.num_target_passes, stats.num_drafts)
    assert told["accepted_per_position"] == stats.accepted_per_position
    plain = complete(server, speculation="off", **GREEDY)["speculation"]
    assert (plain["method"], plain["draft_tokens"], plain["target_passes"]) == ("none", 0, 24)


def test_what_the_prefix_cache_had_of_a_prompt_counts_once_for_all_samples(server: Server) -> None:
    fields = {"prompt": "# A sentence that nobody else has written.\n" * 6, "max_tokens": 2, "seed": 1}
    found = [complete(server, n=n, **fields)["usage"] for n in (1, 3)]
    first, again = (usage["prompt_tokens_details"]["cached_tokens"] for usage in found)
    assert found[0]["prompt_tokens"] == found[1]["prompt_tokens"]
    assert first == 0
    assert found[0]["prompt_tokens"] / 2 < again < found[0]["prompt_tokens"]


def test_a_stream_tells_its_usage_where_it_is_asked_to(server: Server) -> None:
    chunks = events(server, "/v1/completions", prompt="x", stream_options={"include_usage": True}, **GREEDY)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-2]["speculation"]["accepted_tokens"] > 0
    assert all("usage" not in chunk for chunk in events(server, "/v1/completions", prompt="x", **GREEDY))


def test_a_trace_tells_of_every_token(server: Server, llm: LLM) -> None:
    (want,) = llm.generate(PROMPTS[0], SamplingParams(**GREEDY), trace=True)
    told = complete(server, trace=True, **GREEDY)["choices"][0]["trace"]
    assert told["origins"] == [str(origin) for origin in want.origins]
    assert [r["accepted"] for r in told["rounds"]] == [list(r.accepted) for r in want.first.rounds or ()]
    pieces = [c["choices"][0]["trace"] for c in events(server, "/v1/completions", prompt=PROMPTS[0], trace=True, **GREEDY)]
    assert [origin for piece in pieces for origin in piece["origins"]] == told["origins"]
    assert len(pieces[-1]["rounds"]) == len(told["rounds"])


def test_logprobs_of_completions(server: Server, llm: LLM) -> None:
    params = SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=2)
    (want,) = llm.generate(PROMPTS[0], params)
    told = complete(server, logprobs=2, **GREEDY)["choices"][0]["logprobs"]
    own = [next(iter(entry.values())) for entry in want.logprobs or ()]
    assert told["token_logprobs"] == pytest.approx([found.logprob for found in own])
    assert told["tokens"] == [found.decoded_token for found in own]
    assert all(token in likely for token, likely in zip(told["tokens"], told["top_logprobs"], strict=True))
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert want.text[offset:].startswith(token)
    chunks = events(server, "/v1/completions", prompt=PROMPTS[0], logprobs=2, **GREEDY)
    for name in told:
        assert [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"][name]] == told[name]
    echoed = complete(server, logprobs=2, echo=True, **GREEDY)["choices"][0]["logprobs"]
    assert echoed["token_logprobs"][0] is None
    assert "".join(echoed["tokens"]) == PROMPTS[0] + want.text
    assert echoed["token_logprobs"][len(want.prompt_token_ids) :] == told["token_logprobs"]


def test_logprobs_of_chats(server: Server, client: openai.OpenAI, llm: LLM) -> None:
    messages: Any = [{"role": "user", "content": "def f(x):"}]
    found = client.chat.completions.create(model=NAME, messages=messages, logprobs=True, top_logprobs=3, **GREEDY)
    entries = found.choices[0].logprobs
    assert entries is not None
    assert entries.content is not None
    assert "".join(entry.token for entry in entries.content) == found.choices[0].message.content
    for entry in entries.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy text takes the likeliest"
        assert bytes(entry.bytes or []).decode() == entry.token


def test_what_the_client_predicted_is_counted_and_changes_no_text(server: Server, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "def f(x):"}]
    plain = client.chat.completions.create(model=NAME, messages=messages, **GREEDY)
    text = plain.choices[0].message.content or ""
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    prediction: Any = {"type": "content", "content": text.replace("self", "this")}
    found = client.chat.completions.create(model=NAME, messages=messages, prediction=prediction, **GREEDY)
    assert found.choices[0].message.content == text
    assert found.usage is not None
    details = found.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 0
    assert found.usage.completion_tokens == 24


def test_models_and_tokens(server: Server, client: openai.OpenAI, llm: LLM) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    tokens = server.post("/tokenize", {"prompt": PROMPTS[0]}).json()
    assert tokens["tokens"] == list(llm.encode(PROMPTS[0]))
    assert tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": PROMPTS[0]}
    conversation = {"messages": [{"role": "user", "content": "x"}]}
    assert server.post("/tokenize", conversation).json()["tokens"] == llm.chat_prompt(conversation["messages"])
    assert server.get("/version").json()["version"]
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.get("/health").json()["num_rebuilds"] == 0


# -- structure and tools -----------------------------------------------------------------------------------------------


class Point(BaseModel):
    x: int
    y: bool


def test_parse_gives_objects(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(
        model=NAME, messages=[{"role": "user", "content": "x"}], response_format=Point, temperature=0, max_tokens=200
    )
    assert isinstance(found.choices[0].message.parsed, Point)


def test_any_json_object(server: Server) -> None:
    fields = {"response_format": {"type": "json_object"}, "seed": 3, "max_tokens": 400, "logit_bias": {}}
    choice = chat(server, **fields)["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = r'ok<tool_call>\{"name": "add", "arguments": \{"a": [0-9]\}\}</tool_call>'


def test_tools_are_called(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "temperature": 0}
    asked |= {"max_tokens": 100, "extra_body": {"guided_regex": CALLS}}
    whole = client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls or []
    assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("tool_calls", "ok")
    assert call.type == "function"
    assert call.function.name == "add"
    assert json.loads(call.function.arguments).keys() == {"a"}
    content, streamed = "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        content += chunk.choices[0].delta.content or ""
        streamed += chunk.choices[0].delta.tool_calls or []
    assert content == "ok"
    functions = [part.function for part in streamed if part.function]
    assert {part.index for part in streamed} == {0}
    assert [function.name for function in functions] == ["add", *[None] * (len(functions) - 1)]
    assert "".join(function.arguments or "" for function in functions) == call.function.arguments
    back = [*asked["messages"], whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    again = client.chat.completions.create(model=NAME, messages=back, tools=asked["tools"], max_tokens=3)
    assert again.choices[0].message.tool_calls is None


# -- other clients -----------------------------------------------------------------------------------------------------


def test_curl(server: Server) -> None:
    body = json.dumps({"prompt": PROMPTS[0], **GREEDY})
    done = subprocess.run(
        ["curl", "-sS", f"{server.url}/v1/completions", "--json", body], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["choices"] == complete(server, **GREEDY)["choices"]


def test_langchain(server: Server, llm: LLM) -> None:
    model = ChatOpenAI(
        model=NAME, base_url=f"{server.url}/v1", api_key=SecretStr("any"), temperature=0, max_tokens=24, max_retries=0
    )
    want = llm.chat([{"role": "user", "content": "def f(x):"}], SamplingParams(**GREEDY))[0].text
    answer = model.invoke("def f(x):")
    assert answer.content == want
    assert answer.usage_metadata["output_tokens"] == 24
    assert "".join(chunk.content for chunk in model.stream("def f(x):")) == want


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1_000_000]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [1] * 5000}, "prompt"),
        ({"seed": -2}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"min_tokens": 30, "max_tokens": 20}, "min_tokens"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"type": 3}}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"speculation": "early_exit"}, "speculation"),
        ({"speculation": {"method": "draft_model", "model": "/etc"}}, "speculation.model"),
        ({"speculation": {"method": "/etc/passwd"}}, "speculation.method"),
        ({"speculation": {"method": "ngram", "max_match": 60}}, "speculation.max_match"),
        ({"speculation": {"num_draft_tokens": 0}}, "speculation.num_draft_tokens"),
        ({"speculation": {"tree": [2000]}}, "speculation.tree"),
        ({"speculation": "off", "prediction": {"type": "content", "content": "x"}}, "speculation"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": "high"}, "priority"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_what_cannot_be_served_is_refused_by_its_name(server: Server, fields: Any, param: str) -> None:
    error = refused(server, **fields)
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_the_same_for_chats(server: Server, fields: Any, param: str | None) -> None:
    error = refused(server, "/v1/chat/completions", **fields)
    assert error["param"] == param or param is None, error


def test_fields_that_ask_for_nothing_are_taken(server: Server) -> None:
    fields = {"best_of": 1, "suffix": None, "store": False, "n": None, "stop": None, "service_tier": "auto"}
    assert complete(server, **GREEDY, **fields)["choices"]
    assert chat(server, max_tokens=2, functions=[], modalities=["text"], parallel_tool_calls=True)["choices"]
    assert chat(server, max_tokens=2, chat_template_kwargs={"ending": "class"})["usage"]["prompt_tokens"] > 2


MALFORMED = [
    *(b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "x", "n": 1e999}'),
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "x", "logit_bias": ' + b'{"a":' * 3000 + b"1" + b"}" * 3001,
    b'{"prompt": "x", "guided_json": ' + b'{"not":' * 300 + b"{}" + b"}" * 301,
    b'{"prompt": "\\ud800"}',
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_bodies(server: Server, body: bytes) -> None:
    response = server.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="x", temperature=-3)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")


def test_routes_that_there_are_not(server: Server) -> None:
    assert server.get("/v1/nothing").json()["error"]["code"] == "no_such_route"
    response = server.get("/v1/completions")
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
    assert response.json()["error"]["code"] == "no_such_method"
    assert "Use POST." in response.json()["error"]["message"]
    assert len(response.headers["x-request-id"]) == 24
    named = server.get("/v1/nothing", headers={"x-request-id": "mine"})
    assert (named.status_code, named.headers["x-request-id"]) == (404, "mine")
    slash = server.post("/v1/completions/", {"prompt": "x"}, follow_redirects=False)
    assert (slash.status_code, slash.json()["error"]["code"]) == (404, "no_such_route")
    assert "Did you mean /v1/completions?" in slash.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "whose", "instead"),
    [
        ("/v1/responses/r_1", "OpenAI's API for responses that are kept", "it has /v1/responses instead"),
        ("/v1/conversations", "OpenAI's API for conversations that are kept", "it has /v1/responses instead"),
        ("/v1/complete", "Anthropic's older API", "it has /v1/completions instead"),
        ("/v1/embeddings", "OpenAI's API for embeddings", "it writes texts, by /v1/completions and /v1/chat/completions"),
        ("/api/generate", "Ollama's API", "it has /v1/completions instead"),
        ("/api/chat", "Ollama's API", "it has /v1/chat/completions instead"),
    ],
)
def test_routes_of_other_apis_say_whose_they_are_and_what_there_is_instead(
    server: Server, path: str, whose: str, instead: str
) -> None:
    response = server.post(path, {"model": NAME, "input": "x"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "no_such_route")
    assert f"{path}: Not Found. This is {whose}, which this server does not speak; {instead}" in error["message"]


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n{}", 400, "invalid_http"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
            b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            400,
            "invalid_http",
        ),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01 garbage\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"x" * 66_000, 431, "headers_too_large"),
    ],
    ids=["length", "two lengths", "host", "garbage", "headers"],
)
def test_what_is_no_http_gets_an_error_object_too(server: Server, request_bytes: bytes, status: int, code: str) -> None:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request_bytes)
        answer = HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert (answer.status, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert len(answer.headers["x-request-id"]) == 24


@pytest.mark.parametrize(
    ("target", "status"),
    [("http://x/health", 200), ("HTTP://x:80/health?deep=1", 200), ("http://x", 200), ("http://x/healthy", 404)],
)
def test_a_whole_url_asks_for_its_path(server: Server, target: str, status: int) -> None:
    """As clients write it that take the server for a proxy (RFC 9112, 3.2.2)."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == status, answer.read()


def test_a_fault_after_the_first_token_is_an_event(server: Server) -> None:
    """Every token is forbidden at once: the only one that is allowed would end the text."""
    fields = {"allowed_token_ids": [5], "bad_words": [], "guided_regex": None, "min_tokens": 2, "max_tokens": 4}
    chunks = events(server, "/v1/completions", prompt="x", stop_token_ids=[5], **fields)
    error = chunks[-1]["error"]
    said = "at the first token of the text, its parameters together forbid every token. "
    assert error["message"] == f"{said}Allow more tokens, or ask for fewer min_tokens."
    assert error["code"] == "no_token_left"


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_its_memory(server: Server, streamed: bool) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient() as client:
            body = {"prompt": "x", "stream": streamed, **ENDLESS}
            task = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body, timeout=60))
            await asyncio.to_thread(server.busy)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    before = server.metric("vllm:generation_tokens_total")
    asyncio.run(ask())
    assert server.rests()
    assert server.metric("vllm:generation_tokens_total") - before < 1500
    server.logged(status=499)


# -- what is seen ------------------------------------------------------------------------------------------------------


def test_metrics_count_what_was_written(server: Server) -> None:
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:spec_decode_num_drafts_total")
    names += ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    before = [server.metric(name) for name in names]
    body = complete(server, **GREEDY)
    tokens, prompt, drafts, accepted, by_place = (
        server.metric(name) - old for name, old in zip(names, before, strict=True)
    )
    assert (tokens, prompt) == (24, body["usage"]["prompt_tokens"])
    assert drafts == body["speculation"]["drafts"]
    assert accepted == by_place == body["speculation"]["accepted_tokens"]
    assert server.metric("outrider:accepted_per_draft_count", 'method="draft_model"') >= drafts


def test_metrics_count_by_member(server: Server) -> None:
    """What a structure forces is a member of the draft, and no part of what its method is credited with."""
    names = [f"outrider:member_{kind}_tokens_total" for kind in ("draft", "accepted")]
    labels = [('method="draft_model"', f'member="{member}"') for member in ("draft_model", "forced")]
    before = [server.metric(name, *which) for name in names for which in labels]
    body = complete(server, **GREEDY | {"max_tokens": 40}, structured_outputs={"choice": ["temperature", "pressure"]})
    drafted, forced, accepted, stood = (
        server.metric(name, *which) - old
        for (name, which), old in zip([(name, which) for name in names for which in labels], before, strict=True)
    )
    assert (drafted + forced, accepted + stood) == (
        body["speculation"]["draft_tokens"],
        body["speculation"]["accepted_tokens"],
    )
    assert forced == stood > 0


def test_the_log_knows_requests_and_no_text(server: Server) -> None:
    response = server.post("/v1/completions", {"prompt": "a secret", **GREEDY}, headers={"x-request-id": "mine-7"})
    assert response.headers["x-request-id"] == "mine-7"
    other = server.post("/v1/completions", {"prompt": "a secret"}, headers={"x-request-id": "not\tallowed"})
    assert other.headers["x-request-id"] not in ("", "not\tallowed")
    line = server.logged(event="request", request_id="mine-7")
    server.logged(event="request", request_id=other.headers["x-request-id"])
    assert (line["status"], line["completion_tokens"]) == (200, 24)
    assert "secret" not in json.dumps(server.lines)


def test_the_document_names_every_field(server: Server) -> None:
    found = server.get("/openapi.json").json()
    fields = found["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "speculation", "guided_regex"} <= fields.keys()
    page = (Path(__file__).parents[2] / "docs" / "reference" / "server.md").read_text("utf-8")
    chats = found["components"]["schemas"]["ChatRequest"]["properties"]
    assert [name for name in {**fields, **chats} if f"`{name}`" not in page] == []

"""Faults under load: whoever is concerned gets a typed error, nobody else notices, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from tests.server.bodies import VALID, mutants
from tests.server.running import Server, running
from tests.server.wire import Connection
from tests.waiting import wait_until

PROMPTS = ["def parse(line):\n", "class Reader:\n", "import os\n", "for name in names:\n"]
MODES: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 11}]
MAX_TOKENS = 48


@dataclass
class Told:
    """What a client was told: the text so far, and how it ended."""

    status: int = 0
    text: str = ""
    error: dict[str, Any] | None = None
    done: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)


#: What the system takes of an answer for a reader that does not read, in bytes; and an answer that is far larger.
TAKES = "20000"
LARGE = {"prompt": "x", "stream": True, "max_tokens": 100, "ignore_eos": True, "logprobs": 20, "n": 2, "trace": True}

#: A text that takes longer than anything that a test waits for.
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def texts() -> list[tuple[dict[str, Any], str]]:
    """Requests, and what the offline API writes for them."""
    with LLM(kv_cache_tokens=4096) as llm:
        asked = [(prompt, {**mode, "max_tokens": MAX_TOKENS}) for prompt in PROMPTS for mode in MODES]
        return [({"prompt": p, **m}, llm.generate(p, SamplingParams(**m))[0].text) for p, m in asked]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = ("--max-num-seqs", "4", "--kv-cache-tokens", "2048", "--stalled-seconds", "1", "--max-body-bytes", "200000")
    with running(*limits, module="tests.server.broken_server", OUTRIDER_TAKES=TAKES) as server:
        yield server
        ends_well(server)


@pytest.fixture(scope="module")
def broken() -> Iterator[Server]:
    """A server whose engine fails at a signal."""
    with running("--max-num-seqs", "4", module="tests.server.broken_server") as server:
        yield server
        ends_well(server)


def ends_well(server: Server) -> None:
    """At SIGTERM it ends in good order, and its books agree."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert [line["books"] for line in server.ended() if line["event"] == "ended"] == ["agree"]


async def stream(url: str, fields: dict[str, Any], told: Told) -> Told:
    """Ask for a text, and read it to its end."""
    async with Connection(url) as connection:
        answer = await connection.ask("/v1/completions", json.dumps({**fields, "stream": True}).encode())
        told.status = answer.status
        if answer.status != 200:
            told.error = json.loads(await answer.body())["error"]
            told.begun.set()
            return told
        async for event in answer.events():
            chunk = {} if event == b"[DONE]" else json.loads(event)
            told.done = not chunk
            told.error = chunk.get("error", told.error)
            told.text += "".join(choice["text"] for choice in chunk.get("choices", ()))
            told.begun.set()
    return told


async def disturb(
    url: str, asked: Sequence[dict[str, Any]], begun: int, act: Callable[[], Awaitable[None] | None]
) -> list[Told]:
    """Stream all texts at a time, and do something when so many of them have begun."""
    told = [Told() for _ in asked]
    tasks = [asyncio.create_task(stream(url, fields, each)) for fields, each in zip(asked, told, strict=True)]
    for each in told[:begun]:
        await asyncio.wait_for(each.begun.wait(), 60)
    await (act() or asyncio.sleep(0))
    return list(await asyncio.gather(*tasks))


async def post(url: str, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
    """One request; the status, and the answer's JSON."""
    async with Connection(url) as connection:
        answer = await connection.ask(path, body, **headers)
        return answer.status, json.loads(await answer.body())


async def get(url: str, path: str) -> int:
    async with Connection(url) as connection:
        return (await connection.ask(path)).status


@asynccontextmanager
async def undisturbed(url: str, texts: Sequence[tuple[dict[str, Any], str]]) -> AsyncGenerator[None, None]:
    """Texts are written meanwhile, one after another, and all of them are right."""
    over = asyncio.Event()

    async def write() -> None:
        while not over.is_set():
            for fields, want in texts[:2]:
                found = await stream(url, fields, Told())
                assert (found.text, found.done) == (want, True)

    task = asyncio.create_task(write())
    yield
    over.set()
    await task


# -- the engine --------------------------------------------------------------------------------------------------------


def test_a_server_whose_engine_hangs_comes_to_its_end() -> None:
    with running("--drain-seconds", "1", module="tests.server.broken_server", OUTRIDER_HANGS="1") as server:

        async def ask() -> Any:
            asked = asyncio.create_task(stream(server.url, {"prompt": "x", **ENDLESS}, told := Told()))
            await asyncio.wait_for(told.begun.wait(), 60)
            server.process.send_signal(signal.SIGUSR1)
            await asyncio.to_thread(lambda: server.logged(event="it hangs"))
            server.process.send_signal(signal.SIGTERM)
            return (await asked).error

        assert asyncio.run(ask())["code"] == "drain_timeout"
        assert server.process.wait(60) == 1
        assert [line["event"] for line in server.ended()][-1] == "the engine does not come to its end"


@pytest.mark.parametrize(
    ("number", "counted"),
    [
        (signal.SIGUSR1, "outrider:broken_steps_total"),
        (signal.SIGUSR2, "outrider:engine_rebuilds_total"),
    ],
    ids=["a step breaks off", "the books are wrong too"],
)
def test_a_fault_of_the_engine_ends_those_concerned_alone(
    broken: Server, texts: list[tuple[dict[str, Any], str]], number: int, counted: str
) -> None:
    def strike() -> None:
        broken.process.send_signal(number)

    asked, before = [texts[i % len(texts)] for i in range(12)], broken.metric(counted)
    found = asyncio.run(disturb(broken.url, [fields for fields, _ in asked], 4, strike))
    failed = [told for told in found if told.error is not None]
    assert 1 <= len(failed) <= (12 if number == signal.SIGUSR2 else 4)
    for told in failed:
        assert told.done
        assert told.error is not None
        assert (told.error["type"], told.error["code"]) == ("server_error", "step_aborted")
    for told, (_, want) in zip(found, asked, strict=True):
        assert (told.text == want) if told.error is None else want.startswith(told.text)
    assert broken.metric(counted) == before + 1
    assert broken.rests()
    again = asyncio.run(disturb(broken.url, [fields for fields, _ in texts], 0, lambda: None))
    assert [told.text for told in again] == [want for _, want in texts]
    strike()
    status, body = asyncio.run(post(broken.url, json.dumps({"prompt": "x"}).encode()))
    assert (status, body["error"]["code"]) == (500, "step_aborted")


def test_memory_that_is_short_costs_time_and_no_text(texts: list[tuple[dict[str, Any], str]]) -> None:
    asked = [texts[i % len(texts)] for i in range(12)]
    with running("--kv-cache-tokens", "256", "--max-num-seqs", "16") as server:
        found = asyncio.run(disturb(server.url, [fields for fields, _ in asked], 0, lambda: None))
        assert [told.text for told in found] == [want for _, want in asked]
        assert server.metric("vllm:num_preemptions_total") > 0
        status, body = asyncio.run(post(server.url, json.dumps({"prompt": [5] * 300, "max_tokens": 2}).encode()))
        assert (status, body["error"]["param"]) == (400, "prompt")
        longest = server.get("/v1/models").json()["data"][0]["max_model_len"]
        assert server.post("/tokenize", {"prompt": "x"}).json()["max_model_len"] == longest
        fitting = {"prompt": [5] * (longest - 1), "max_tokens": 1}
        assert server.post("/v1/completions", fitting).status_code == 200, "a text of the length that it says"
        assert server.rests()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_after_sigterm_texts_are_finished_and_new_ones_refused(texts: list[tuple[dict[str, Any], str]]) -> None:
    asked = [texts[i % len(texts)] for i in range(10)]
    body = json.dumps({"prompt": "x"}).encode()
    with running("--max-num-seqs", "2") as server:

        async def end() -> None:
            async with Connection(server.url) as late:  # what comes late of its body holds up the end for so long
                held = asyncio.create_task(late.ask("/v1/completions", body[:9], size=len(body)))
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(wait_until, lambda: server.get("/health").status_code == 503, "answer of 503")
                assert await get(server.url, "/ready") == 503
                assert await get(server.url, "/metrics") == 200
                for more in ({}, {"stream": True}):
                    status, answer = await post(server.url, json.dumps({"prompt": "x", **more}).encode())
                    assert (status, answer["error"]["code"]) == (503, "shutting_down")
                late.send(body[9:])
                assert (await held).status == 503

        found = asyncio.run(disturb(server.url, [fields for fields, _ in asked], 2, end))
        assert [told.text for told in found] == [want for _, want in asked]
        assert server.process.wait(60) == 0
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            asyncio.run(post(server.url, body))
        assert [line["books"] for line in server.ended() if line["event"] == "ended"] == ["agree"]
        assert [line for line in server.lines if line.get("level") in ("warning", "error")] == []


def test_what_is_cut_off_at_the_end_is_told_why_and_leaves_nothing_behind() -> None:
    endless = {"prompt": "x", **ENDLESS, "n": 2}
    whole = json.dumps(endless).encode()

    async def ask(server: Server) -> tuple[list[Told], list[tuple[int, Any, str]]]:
        told = [Told() for _ in range(4)]
        streams = [asyncio.create_task(stream(server.url, endless, each)) for each in told]
        answers = [asyncio.create_task(named(server.url, body)) for body in (whole, whole, whole[:9])]
        await asyncio.gather(*(each.begun.wait() for each in told[:2]))
        server.process.send_signal(signal.SIGTERM)
        return list(await asyncio.gather(*streams)), list(await asyncio.gather(*answers))

    async def named(url: str, body: bytes) -> tuple[int, Any, str]:
        """The status, the JSON and the request's id of an answer to a body, which may be cut short."""
        async with Connection(url) as connection:
            answer = await connection.ask("/v1/completions", body, size=len(whole))
            return answer.status, json.loads(await answer.body()), answer.headers["x-request-id"]

    with running("--drain-seconds", "1", "--max-num-seqs", "4", "--kv-cache-tokens", "65536") as server:
        streams, answers = asyncio.run(ask(server))
        assert server.process.wait(60) == 0
        lines = server.ended()
        for told in streams:
            assert told.error is not None
            assert told.done or told.status == 503, "an event with the error, then [DONE]; those that wait get a status"
        for error in [*(told.error for told in streams), *(body["error"] for _, body, _ in answers)]:
            assert (error["type"], error["code"]) == ("service_unavailable_error", "drain_timeout")
        assert [status for status, _, _ in answers] == [503] * 3
        logged = [line for line in lines if line["event"] == "request"]
        assert {(line["status"], line["code"]) for line in logged} == {(503, "drain_timeout")}
        assert {name for _, _, name in answers} < {line["request_id"] for line in logged}
        assert [line["level"] for line in lines if line["event"] == "the time to finish is over"] == ["warning"]
        assert not [line for line in lines if line.get("level", "error") == "error" or "traceback" in line]
        assert [line["books"] for line in lines if line["event"] == "ended"] == ["agree"]


def test_a_reader_that_has_stopped_does_not_hold_up_the_end() -> None:

    async def ask(server: Server) -> None:
        async with Connection(server.url, receive_bytes=4096) as connection:
            await connection.ask("/v1/completions", json.dumps(LARGE).encode())
            await asyncio.to_thread(wait_until, lambda: written(server) == LARGE["max_tokens"] * 2, "text that is written")
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, 60) == 0

    def written(server: Server) -> float:
        return server.metric("vllm:generation_tokens_total")

    with running("--drain-seconds", "1", module="tests.server.broken_server", OUTRIDER_TAKES=TAKES) as server:
        asyncio.run(ask(server))
        lines = server.ended()
        assert [line["code"] for line in lines if line["event"] == "request"] == ["drain_timeout"]
        assert not [line for line in lines if line.get("level", "error") == "error" or "traceback" in line]
        assert [line["books"] for line in lines if line["event"] == "ended"] == ["agree"]


# -- readers -----------------------------------------------------------------------------------------------------------


def test_readers_that_stop_reading_are_cut_off_and_hold_up_nobody(
    server: Server, texts: list[tuple[dict[str, Any], str]]
) -> None:
    """What they do not read is more than the system takes, so that the server has to wait for them."""

    async def ask() -> None:
        async def stop() -> None:
            async with Connection(server.url, receive_bytes=4096) as connection:
                answer = await connection.ask("/v1/completions", json.dumps(LARGE).encode())
                name = answer.headers["x-request-id"]
                await asyncio.to_thread(lambda: server.logged(event="request", request_id=name))  # it has ended

        async with undisturbed(server.url, texts):
            await asyncio.gather(*(stop() for _ in range(3)))

    memory = server.memory()
    asyncio.run(ask())
    assert server.rests()
    assert server.memory() - memory < 100 * 2**20


# -- what clients send -------------------------------------------------------------------------------------------------


def test_huge_headers_disturb_nobody(server: Server, texts: list[tuple[dict[str, Any], str]]) -> None:
    async def ask() -> None:
        body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        async with undisturbed(server.url, texts):
            for headers in ({"x": "y" * 10_000_000}, {f"x{i}": "y" * 50 for i in range(20_000)}):
                with suppress(ConnectionError, asyncio.IncompleteReadError):  # it need not read what it refuses
                    async with Connection(server.url) as connection:
                        assert (await connection.ask("/v1/completions", body, **headers)).status in (400, 431)

    asyncio.run(ask())
    assert server.rests()


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_bodies(server: Server, texts: list[tuple[dict[str, Any], str]], count: int) -> None:
    statuses: list[int] = []

    async def send(bodies: Iterator[tuple[str, bytes]]) -> None:
        async with Connection(server.url) as connection:
            for path, body in bodies:
                answer = await connection.ask(path, body)
                found = json.loads(await answer.body()) if "json" in answer.headers["content-type"] else {}
                statuses.append(answer.status)
                assert answer.status in (200, 400, 404, 413), (path, body, found)
                if answer.status != 200:
                    names = {"message", "type", "param", "code"}
                    if path.startswith("/v1/messages"):
                        names = {"message", "type", "details"}
                        assert (found["type"], found["request_id"]) == ("error", answer.headers["request-id"]), body
                    assert found["error"].keys() == names, body
                    assert len(json.dumps(found, ensure_ascii=False)) < 2000, body

    async def ask() -> None:
        bodies = mutants(count)
        async with undisturbed(server.url, texts):
            await asyncio.gather(*(send(bodies) for _ in range(4)))

    asyncio.run(ask())
    assert len(statuses) == count
    assert statuses.count(400) > count / 2
    assert server.rests()
    assert not [line for line in server.lines if line.get("level") in ("error", "critical")]


def test_valid_bodies_are_valid(server: Server) -> None:
    """Otherwise all that is made from them would be refused for the same reason."""
    for path, body in VALID:
        if not body.keys() & {"messages", "input"}:  # the model cannot converse
            assert asyncio.run(post(server.url, json.dumps(body).encode(), path))[0] == 200, body


def test_what_costs_much_work_is_refused_by_name(server: Server) -> None:
    """What of it the limits let through is the business of tests/server/test_sizes.py."""
    words = {"bad_words": [f"word {number}" for number in range(5000)]}
    biases = {"logit_bias": {str(token): 1 for token in range(2000)}}
    for fields, name in ((words, "bad_words"), (biases, "logit_bias"), ({"stop": "x" * 20_000}, "stop")):
        status, found = asyncio.run(post(server.url, json.dumps({"prompt": "x", **fields}).encode()))
        assert (status, found["error"]["param"], found["error"]["code"]) == (400, name, "invalid_value")
    long = "x" * 190_000
    for path, body, name in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": "x", "prediction": {"type": "content", "content": long}}, "prediction"),
        ("/tokenize", {"prompt": long}, "prompt"),
    ):
        status, found = asyncio.run(post(server.url, json.dumps(body).encode(), path))
        assert (status, found["error"]["param"]) == (400, name)
        assert "190,000 characters" in found["error"]["message"]
    many = b'{"prompt": [' + b"1," * 90_000 + b"1]}"
    status, found = asyncio.run(post(server.url, many, "/tokenize"))
    assert (status, found["error"]["param"]) == (400, "prompt"), "few enough to be read"


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


#: Structures that are deep, long, or much work for an automaton.
STRUCTURES: dict[str, dict[str, Any]] = {
    "a deep schema": {"guided_json": _nested(150)},
    "many properties": {
        "guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    },
    "a schema of itself": {"guided_json": {"$ref": "#"}},
    "a product of choices": {
        "guided_json": {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"k{i}{j}": {"type": "integer"}}} for j in range(8)]}
                for i in range(8)
            ]
        }
    },
    "a million items": {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}},
    "repeated repetitions": {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    "counts of counts": {"guided_regex": "((((a{100}){100}){100}){100})"},
    "a billion": {"guided_regex": "a{1000000000}"},
    "counts of counts behind a letter": {"guided_regex": "[ab]((((a{100}){100}){100}){100})"},
    "counts in a pattern": {"guided_json": {"type": "string", "pattern": "^((((a{100}){100}){100}){100})$"}},
    "references that double": {
        "guided_json": {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)}
            | {"a60": {"type": "string", "pattern": "^a+$"}},
        }
    },
    "a hundred steps": {
        "guided_json": {
            "type": "array",
            "prefixItems": [{"type": "integer", "multipleOf": 99_991 - i} for i in range(100)],
            "minItems": 100,
        }
    },
    "an ambiguous rule": {"guided_grammar": "start: e\ne: e e e e e e | /./ | "},
    "a large step": {"guided_json": {"type": "integer", "multipleOf": 4_294_967_291}},
    "many stars": {"guided_regex": "(a|b|ab)*" * 2000},
    "deep brackets": {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
    "a rule of itself": {"guided_grammar": "start: start"},
    "many rules": {
        "guided_grammar": "start: " + " | ".join(f"r{i}" for i in range(2000)) + "\n"
        + "\n".join(f'r{i}: "{i}" r{(i + 1) % 2000}' for i in range(2000))
    },
}  # fmt: skip


def test_structures_that_are_too_much_are_refused_and_disturb_nobody(
    server: Server, texts: list[tuple[dict[str, Any], str]]
) -> None:
    async def ask() -> dict[str, Any]:
        async with undisturbed(server.url, texts):
            bodies = {name: {"prompt": "x", "max_tokens": 8, **fields} for name, fields in STRUCTURES.items()}
            answers = await asyncio.gather(*(post(server.url, json.dumps(body).encode()) for body in bodies.values()))
            return dict(zip(bodies, answers, strict=True))

    found = asyncio.run(ask())
    assert {status for status, _ in found.values()} == {200, 400}
    for name, (status, body) in found.items():
        if status == 400:
            error = body["error"]
            assert error["type"] == "invalid_request_error", name
            named = error["param"] in ("guided_json", "guided_regex", "guided_grammar")
            assert named or error["code"] in ("processing", "invalid_json"), name
    assert server.rests()

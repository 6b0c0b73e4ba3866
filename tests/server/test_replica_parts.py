"""The parts of replicas that need no Ray."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner

from outrider.building import Profile
from outrider.cli import serve
from outrider.cli import serve as replicas
from outrider.errors import ClosedError, ContradictionError, InvalidParameterError, MissingExtraError, ModelTooLargeError
from outrider.loading.fit import Needs
from outrider.server import errors
from outrider.server.replicas.ingress import Inside
from outrider.server.replicas.machines import Machine, Share, check_cluster, share, threads_of
from outrider.server.replicas.routing import PIECE_BYTES, Opening, Parcel, PrefixIndex, beginnings, merged
from outrider.server.replicas.run import watched

PIECE = "a" * PIECE_BYTES


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_beginnings_are_equal_as_far_as_prompts_are() -> None:
    short, long = (beginnings(body(prompt=prompt), None) for prompt in (PIECE * 2 + "x", PIECE * 3))
    assert (len(short), len(long)) == (2, 3)
    assert long[:2] == short
    other = beginnings(body(prompt="b" + PIECE * 3), None)
    assert not set(other) & set(long)
    assert not set(beginnings(body(prompt=PIECE * 3), "ann")) & set(long)  # caches of tenants are apart
    tokens = list(range(40))
    assert len(beginnings(body(prompt=tokens), None)) == 2
    assert beginnings(body(prompt=[tokens, [1]]), None) == beginnings(body(prompt=tokens), None)
    said = [{"role": "user", "content": PIECE * 2}]
    first, second = (beginnings(body(messages=[*said, *more]), None) for more in ([], [{"role": "user", "content": PIECE}]))
    assert second[:2] == first[:2]
    assert first != beginnings(body(messages=said, tools=[{}]), None)
    asked = [beginnings(body(input=each), None) for each in (PIECE * 2, PIECE * 2 + "x", "b" + PIECE * 2, [*said, *said])]
    assert asked[0][:2] == asked[1][:2] != asked[2][:2], "requests of the Responses API"
    assert len(asked[3]) > 3
    assert asked[0] != beginnings(body(input=PIECE * 2, instructions="b"), None)


@pytest.mark.parametrize(
    "request_body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"prompt": 7}',
        b'{"prompt": [-1]}',
        b'{"prompt": ["x", 1]}',
        b'{"prompt": {}}',
        b"[" * 99999,
        b'{"prompt": [1e99, 2]}',
        b'{"prompt": [null]}',
        b'{"prompt": "\\ud800"}',
    ],
)
def test_what_cannot_be_read_has_no_beginnings(request_body: bytes) -> None:
    assert beginnings(request_body, None) == ()


def test_the_longest_beginning_wins_unless_too_much_runs_there() -> None:
    index: PrefixIndex[str] = PrefixIndex(slack=3)
    pieces = beginnings(body(prompt=PIECE * 4), None)
    assert index.choose(pieces, {"a": 1, "b": 0, "c": 2}) == ["b", "a", "c"]
    index.add("c", pieces[:3])
    index.add("a", pieces[:1])
    assert index.choose(pieces, {"a": 1, "b": 0, "c": 2}) == ["c", "b", "a"]
    assert index.choose(pieces, {"a": 1, "b": 0, "c": 3}) == ["b", "a", "c"]
    assert index.choose(pieces[:1], {"a": 1, "b": 0, "c": 2}) == ["a", "b", "c"]  # equally long: the less loaded one
    assert index.choose((), {"a": 1, "b": 0, "c": 2})[0] == "b"
    index.keep(["a", "b"])
    assert index.choose(pieces, {"a": 1, "b": 0}) == ["a", "b"]
    assert {index.choose((), {"a": 0, "b": 0})[0] for _ in range(100)} == {"a", "b"}


def test_memory_of_beginnings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.server.replicas.routing._MEMORY", 3)
    index: PrefixIndex[str] = PrefixIndex(slack=9)
    for text in ("old", "new"):
        index.add("a", [f"{text} {number}".encode() for number in range(3)])
    assert index.choose([b"old 0"], {"a": 1, "b": 0})[0] == "b"
    assert index.choose([b"new 0"], {"a": 1, "b": 0})[0] == "a"
    index.add("a", [b"other 0"])
    assert index.choose([b"new 0", b"new 1"], {"a": 1, "b": 0})[0] == "a"  # the longest beginning went first


class App:
    """Sends a head, then a part whenever it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": scope["method"].encode() + message["body"], "more_body": True})
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if scope["path"] == "/broken":
            raise KeyError("broken")
        for part in (b"2", b"3"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})


def parcel(path: str = "/") -> Parcel:
    return Parcel("POST", path, b"", (), b"1", ())


def test_an_application_answers_without_a_socket() -> None:
    async def ask() -> list[Opening | bytes]:
        app = App()
        parts = Inside(app).answer(parcel())
        first = await anext(parts)
        app.go.set()
        return [first, *[part async for part in parts]]

    assert asyncio.run(ask()) == [Opening(201, ((b"a", b"b"),), b"POST1"), b"23"]


def test_a_reader_that_leaves_ends_the_answer() -> None:
    async def leave() -> bool:
        app = App()
        parts = Inside(app).answer(parcel())
        await anext(parts)
        await parts.aclose()
        return app.cancelled

    assert asyncio.run(leave())


def test_what_is_cut_off_or_fails_is_told() -> None:
    async def cut() -> None:
        inside = Inside(App())
        parts = inside.answer(parcel())
        await anext(parts)
        inside.cut_off()
        await anext(parts)

    async def fail() -> None:
        app = App()
        parts = Inside(app).answer(parcel("/broken"))
        await anext(parts)
        app.go.set()
        await anext(parts)

    with pytest.raises(ClosedError):
        asyncio.run(cut())
    with pytest.raises(KeyError, match="broken"):
        asyncio.run(fail())


def test_metrics_of_replicas_stand_side_by_side() -> None:
    text = '# HELP x_total Things.\n# TYPE x_total counter\nx_total{a="1"} 2.0\n# HELP h H.\n# TYPE h histogram\n'
    text += 'h_bucket{le="1.0"} 1.0\nh_bucket{le="+Inf"} 2.0\nh_count 2.0\nh_sum 3.0\n'
    found = merged([("one", text), ("two", text)]).decode()
    families = {family.name: family for family in text_string_to_metric_families(found)}
    assert {name: family.type for name, family in families.items()} == {"x": "counter", "h": "histogram"}
    assert [sample.labels for sample in families["x"].samples] == [{"a": "1", "replica": name} for name in ("one", "two")]
    assert len(families["h"].samples) == 8


def test_what_a_replica_gets() -> None:
    needs, machine = [Needs(100, 2), Needs(50, 1)], Machine(1000, 8)
    assert share("m", needs, 2, [machine], None, 10**6).kv_tokens == int(0.25 * (500 - 150) / 3)
    assert share("m", needs, 2, [machine], None, 5).kv_tokens == 5
    found = share("m", needs, 3, [machine, Machine(500, 2)], 7, 5)
    assert (found.kv_tokens, found.num_threads, found.per_machine) == (7, 1, 2)
    assert share("m", needs, 2, [machine], 7, 5).num_threads == 4
    assert share("m", [], 2, [machine], None, 5).kv_tokens is None


def test_too_many_for_the_memory() -> None:
    with pytest.raises(ModelTooLargeError, match=r"7 replicas are 7 on a machine.*Use --replicas 6 or less") as found:
        share("m", [Needs(150, 1)], 7, [Machine(1000, 8)], None, 5)
    assert (found.value.weight_bytes, found.value.available_bytes) == (150, 1000)
    with pytest.raises(ModelTooLargeError, match="Use a smaller model"):
        share("m", [Needs(1500, 1)], 1, [Machine(1000, 8)], None, 5)
    with pytest.raises(ModelTooLargeError, match=r"keys and values.*Use --replicas 1 or less"):
        share("m", [Needs(150, 1)], 2, [Machine(1000, 8)], 500, 5)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto", "", "127.0.0.1:99999"])
def test_a_cluster_that_is_not_there(address: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"RAY_ADDRESS=.*Use host:port"):
        check_cluster(address)


def refused(*arguments: str) -> BaseException:
    found = CliRunner().invoke(_application(), list(arguments))
    assert found.exception is not None
    return found.exception


def _application() -> Any:
    import typer

    app = typer.Typer()
    app.command()(serve.serve)
    return app


def test_replicas_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in ("0", "-1"):
        error = refused("--replicas", count)
        assert isinstance(error, InvalidParameterError)
        assert error.field == "replicas"
    assert isinstance(refused("--replicas", "2", "--stalled-seconds", "9"), ContradictionError)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = refused("--replicas", "2")
    assert isinstance(missing, MissingExtraError)
    assert "outrider[serve,ray]" in missing.remedy
    alone = refused("no-such-model")  # so that without the check it ends at once
    assert isinstance(alone, MissingExtraError)
    assert "starlette" in str(alone)


@pytest.mark.parametrize(("option", "value", "least"), [("--drain-seconds", "-1", 0), ("--stalled-seconds", "0", 1)])
def test_times_that_are_too_short_are_refused(option: str, value: str, least: int) -> None:
    with pytest.raises(InvalidParameterError, match=f"Use {least} or more"):
        raise refused(option, value)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_log_is_for_people_on_a_terminal_and_json_elsewhere(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = io.StringIO()
    monkeypatch.setattr(paper, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", paper)
    root, own = logging.getLogger(), logging.getLogger("outrider")
    before = (root.handlers[:], root.level, own.level)
    try:
        errors.write_logs()
        errors.log("loading", {"model": "m", "from": "a folder"})
        errors.log("listening", {"url": "http://127.0.0.1:8000", "model": "m"})
    finally:
        root.handlers[:], root.level = before[:2]
        own.setLevel(before[2])
    told = paper.getvalue()
    if terminal:
        assert 'loading model=m from="a folder"' in told
        assert "Open http://127.0.0.1:8000/ to try it, and http://127.0.0.1:8000/learn" in told
        assert "use http://127.0.0.1:8000/v1" in told
    else:
        events = [json.loads(line) for line in told.splitlines()]
        assert [(event["event"], event["model"]) for event in events] == [("loading", "m"), ("listening", "m")]


def test_the_log_tells_how_many_replicas_run(caplog: pytest.LogCaptureFixture) -> None:
    counts: list[int | Exception] = [0, 0, 1, RuntimeError("asked too early"), 2, 2, 1, 2]
    seen = threading.Event()

    def num_running() -> int:
        if not counts:
            seen.set()
            return 2
        found = counts.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    with caplog.at_level(logging.INFO, "outrider.server"), watched(2, num_running):
        assert seen.wait(30)
    said = [(record.getMessage(), record.facts["running"], record.levelname) for record in caplog.records]  # type: ignore[attr-defined]
    assert said == [
        ("replicas start", 0, "INFO"),
        ("replicas run", 1, "INFO"),
        ("replicas run", 2, "INFO"),
        ("a replica was lost", 1, "ERROR"),
        ("replicas run", 2, "INFO"),
    ]


@pytest.mark.parametrize(("threads", "is_ignored"), [("2", False), ("2,1", False), ("1", True), ("12", True)])
def test_the_log_tells_that_a_profile_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, threads: str, is_ignored: bool
) -> None:
    identity = {"model": "m", "config": "c", "dtype": "bfloat16", "quantization": None, "processor": "p", "kernels": "k"}
    profile = Profile.model_validate(
        {"identity": {**identity, "threads": 2}, "speculation": {}, "concurrency": 1, "gain": 1.0, "measured": True}
    )
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with caplog.at_level(logging.INFO, "outrider.server"):
        replicas._say_if_ignored(profile, threads_of(Share(None, 4, 1)))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * is_ignored


def test_replicas_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of(Share(None, 4, 1)) == "4"

"""What the ingress does when a replica is lost, with replicas that are lost exactly where a test says so."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.types import Message

from outrider.errors import EngineDiedError, OtherEngineError
from outrider.server.replicas.routing import Opening, Parcel

if find_spec("ray") is None:
    pytest.skip("Ray is not installed; it comes with outrider[ray]", allow_module_level=True)

from ray.exceptions import RayActorError

from outrider.cli import serve
from outrider.server.replicas.ingress import Ingress
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from outrider.server.tenants import ApiKeys
from tests.waiting import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, of pydantic
    from outrider.server.replicas.run import EngineReplica, cluster

EVENTS = Opening(200, ((b"content-type", b"text/event-stream; charset=utf-8"),), b"data: 1\n\n")
FILE = Opening(200, ((b"content-type", b"text/javascript"), (b"content-length", b"6")), b"abc")
LOST = RayActorError()
SETTINGS = ServerSettings(
    model_name="m", hosts=("10.0.0.1",), origins=("http://friend",), max_body_bytes=1000, max_body_values=100
)


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both deployments take over the log of their process."""
    for name in ("ingress", "run"):
        monkeypatch.setattr(f"outrider.server.replicas.{name}.write_logs", lambda: None)


class Engine:
    """Replicas that answer as they are told, call by call: the parts of an answer, the last of which may be an error.

    Attributes:
        parcels: The requests that reached one.
        num_cancelled: Answers that the ingress has let go.
    """

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.answers, self.parcels, self.num_cancelled = list(answers), list[Parcel](), 0

    @property
    def answer(self) -> Engine:
        return self

    def options(self, *, stream: bool) -> Engine:
        assert stream
        return self

    def remote(self, parcel: Parcel) -> Parts:
        self.parcels.append(parcel)
        return Parts(self, list(self.answers.pop(0)))


class Parts:
    """The parts of an answer."""

    def __init__(self, engine: Engine, parts: list[Any]) -> None:
        self._engine, self._parts = engine, parts

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> Any:
        if not self._parts:
            raise StopAsyncIteration
        part = self._parts.pop(0)
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self) -> None:
        self._engine.num_cancelled += 1


def asked(
    engine: Engine, path: str = "/v1/completions", body: bytes = b'{"prompt": "x"}', **headers: str
) -> tuple[int, bytes]:
    """The status and the body that a client gets."""
    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": given}
    scope |= {"asgi": {"spec_version": "2.4"}}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        response = await Ingress(engine, ApiKeys.of(None), SETTINGS)(Request(scope, receive))
        await response(scope, receive, send)

    try:
        asyncio.run(ask())
    finally:
        statuses = [message["status"] for message in sent if message["type"] == "http.response.start"]
        assert len(statuses) <= 1
    return statuses[0], b"".join(message.get("body", b"") for message in sent)


def events(body: bytes) -> list[Any]:
    """The events of a stream; what is not JSON stays as it is."""
    found = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    return [json.loads(each) if each.startswith(b"{") else each for each in found]


def test_a_request_of_which_nothing_was_sent_goes_to_another_replica() -> None:
    engine = Engine([LOST], [EVENTS, b"data: [DONE]\n\n"])
    assert asked(engine) == (200, b"data: 1\n\ndata: [DONE]\n\n")
    assert len(engine.parcels) == 2
    assert engine.parcels[0] == engine.parcels[1]
    assert engine.parcels[0].body == b'{"prompt": "x"}'


@pytest.mark.parametrize("sent", [(), (b"data: 2\n\n",)])
def test_a_stream_that_has_begun_is_never_begun_again(sent: tuple[bytes, ...]) -> None:
    engine = Engine([EVENTS, *sent, LOST], [EVENTS, b"data: [DONE]\n\n"])
    status, body = asked(engine)
    assert (status, len(engine.parcels), engine.num_cancelled) == (200, 1, 1)
    *begun, error, done = events(body)
    assert begun == [b"1", b"2"][: 1 + len(sent)]
    assert (error["error"]["code"], error["error"]["type"]) == ("replica_lost", "service_unavailable_error")
    assert done == b"[DONE]"


def test_a_message_that_is_lost_ends_with_an_error_of_its_api() -> None:
    status, body = asked(Engine([EVENTS, LOST]), "/v1/messages", b'{"messages": []}')
    name, data = body.decode().removeprefix("data: 1\n\n").strip().split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (status, name, error["type"]) == (200, "event: error", "error")
    assert error["error"]["type"] == "overloaded_error"
    assert error["error"]["details"] == {"error_code": "replica_lost"}


def test_a_request_that_kills_its_replica_kills_no_third_one() -> None:
    engine = Engine([LOST], [LOST], [EVENTS])
    status, body = asked(engine)
    assert (status, json.loads(body)["error"]["code"], len(engine.parcels)) == (503, "replica_lost", 2)


def test_a_body_that_is_no_stream_gets_no_event_in_its_middle() -> None:
    engine = Engine([FILE, LOST], [FILE, b"def"])
    with pytest.raises(RayActorError):
        asked(engine, "/assets/page.js")
    assert (len(engine.parcels), engine.num_cancelled) == (1, 1)


@pytest.mark.parametrize("body", [b'{"prompt": [%s]}' % b",".join([b"1"] * 200), b'{"prompt": "%s"}' % (b"x" * 1000)])
def test_a_body_that_is_too_large_reaches_no_replica(body: bytes) -> None:
    engine = Engine([EVENTS])
    status, found = asked(engine, body=body)
    assert (status, json.loads(found)["error"]["code"], engine.parcels) == (413, "body_too_large", [])


@pytest.mark.parametrize("path", ["/v1/completions", "/metrics"])
def test_headers_that_are_too_large_reach_no_replica(path: str) -> None:
    engine = Engine([EVENTS])
    status, found = asked(engine, path, x="y" * 70_000)
    assert (status, json.loads(found)["error"]["code"], engine.parcels) == (431, "headers_too_large", [])


@pytest.mark.parametrize("path", ["/v1/completions", "/metrics", "/"])
@pytest.mark.parametrize(("name", "value"), [("host", "evil.example"), ("origin", "http://evil.example")])
def test_a_request_from_elsewhere_reaches_no_replica(path: str, name: str, value: str) -> None:
    engine = Engine([EVENTS])
    status, found = asked(engine, path, **{"host": "10.0.0.1:8000", name: value})
    assert (status, json.loads(found)["error"]["code"], engine.parcels) == (403, f"{name}_not_allowed", [])


def test_a_friend_reaches_a_replica() -> None:
    assert asked(Engine([EVENTS]), host="10.0.0.1:8000", origin="http://friend")[0] == 200


def test_what_an_engine_raises_is_not_asked_of_another_one() -> None:
    engine = Engine([KeyError("secret")], [EVENTS])
    status, body = asked(engine)
    assert (status, len(engine.parcels)) == (500, 1)
    assert b"secret" not in body


def test_ray_serve_learns_of_an_engine_that_has_died() -> None:
    service = SimpleNamespace(status="ok", settings=SETTINGS)
    replica = EngineReplica(lambda: cast(Any, service))
    replica.check_health()
    service.status = "stopping"
    replica.check_health()
    service.status = "dead"
    with pytest.raises(EngineDiedError):
        replica.check_health()


@pytest.mark.parametrize("stream", [True, False])
def test_what_has_not_finished_is_told_so_as_by_a_single_server(stream: bool) -> None:
    """A text under way, one that waits, and one that comes too late."""
    endless = {"prompt": "import os\n", "max_tokens": 1500, "ignore_eos": True, "stream": stream}

    def service() -> Service:
        settings, limits = ServerSettings(model_name="m"), {"max_num_seqs": 1, "kv_cache_tokens": 4096}
        made.append(serve._service(None, None, None, settings, [], ApiKeys(), **limits))
        return made[0]

    async def ask() -> tuple[list[tuple[int, bytes]], str]:
        replica = EngineReplica(service)

        async def told() -> tuple[int, bytes]:
            opening, *rest = [part async for part in replica.answer(_parcel(endless))]
            assert isinstance(opening, Opening)
            return opening.status, opening.part + b"".join(part for part in rest if isinstance(part, bytes))

        early = [asyncio.create_task(told()) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: made[0].num_texts == 2, "place of both texts")
        end = asyncio.create_task(replica.end(0.5))
        await asyncio.sleep(0)
        late = await told()
        return [*await asyncio.gather(*early), late], await end

    made: list[Service] = []
    (*early, late), books = asyncio.run(ask())
    assert books == "agree"
    for status, body in early:
        if status == 200:
            error, done = events(body)[-2:]
            assert (stream, done) == (True, b"[DONE]")
        else:
            error = json.loads(body)
            assert status == 503
        assert error["error"]["code"] == "drain_timeout"
    assert (late[0], json.loads(late[1])["error"]["code"]) == (503, "shutting_down")


def _parcel(body: dict[str, Any]) -> Parcel:
    return Parcel("POST", "/v1/completions", b"", ((b"content-type", b"application/json"),), json.dumps(body).encode(), ())


@pytest.mark.parametrize(
    "error", [RuntimeError("Version mismatch"), Exception("timed out"), OSError("no space"), ValueError(""), LOST]
)
@pytest.mark.parametrize("address", [None, "127.0.0.1:6379"])
def test_what_ray_raises_at_the_start_is_typed(
    monkeypatch: pytest.MonkeyPatch, error: Exception, address: str | None
) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("RAY_ADDRESS", address) if address else monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(OtherEngineError, match="joined" if address else "started here") as caught, cluster():
        pass
    assert str(error).splitlines()[-1:] == [] or str(error).splitlines()[-1] in str(caught.value)
    assert caught.value.__cause__ is error


def test_metrics_do_not_wait_for_ever() -> None:
    class Slow:
        def broadcast(self, name: str) -> Slow:
            return self

        async def results_async(self, *, timeout_s: float | None = None, return_exceptions: bool = False) -> list[Any]:
            await asyncio.wait_for(asyncio.Event().wait(), min(timeout_s or 60, 0.05))
            return []

    status, body = asked(cast(Any, Slow()), "/metrics")
    assert (status, json.loads(body)["error"]["code"]) == (503, "replica_slow")

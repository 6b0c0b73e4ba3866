"""The process that clients reach: it has no model, and passes requests on to replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Scope

from outrider.errors import ClosedError
from outrider.server.access import check_access
from outrider.server.app import answer
from outrider.server.errors import ApiError, api_error, log, write_logs
from outrider.server.lifecycle import api_key, read_body
from outrider.server.metrics import MEDIA_TYPE
from outrider.server.replicas.machines import keep_replica_local
from outrider.server.replicas.routing import Opening, Parcel, beginnings, merged
from outrider.server.requests import check_headers, check_values
from outrider.server.settings import ServerSettings
from outrider.server.tenants import ApiKeys
from outrider.server.wire import DONE, error_body, failure, is_of_messages

# --- The ingress: the process that clients reach; it has no model and passes requests on to replicas.


#: A request is sent to a second replica if the first one dies before anything of the answer was sent. Not to a third one: a
#: request that kills its replica would kill them all.
_ATTEMPTS = 2
#: Prometheus itself waits for 10 seconds.
_METRICS_SECONDS = 8.0
_EVENTS = b"text/event-stream"


class Ingress:
    """Passes requests on."""

    def __init__(self, engine: Any, keys: ApiKeys, settings: ServerSettings) -> None:
        write_logs()
        keep_replica_local()
        self._engine, self._keys, self._settings = engine, keys, settings

    async def __call__(self, request: Request) -> Response:
        """One request."""
        try:
            check_headers(request.scope.get("raw_path", b""), request.headers.raw)  # Ray Serve's proxy takes larger ones
            check_access(request.headers, self._settings)
            if request.url.path == "/metrics":
                return await self._metrics()
            return await self._passed_on(await self._parcel(request))
        except Exception as error:
            found = api_error(error)
            if found.status >= 500:
                log("a request failed", {"path": request.url.path, "code": found.code}, logging.ERROR, error=error)
            return answer(error_body(found, request.url.path), found.status, found.headers)

    async def _metrics(self) -> Response:
        try:
            texts = await self._engine.broadcast("metrics").results_async(
                timeout_s=_METRICS_SECONDS, return_exceptions=True
            )
        except TimeoutError:
            problem = f"a replica has not told its metrics within {_METRICS_SECONDS:.0f} seconds"
            raise ApiError(503, problem, code="replica_slow") from None
        return Response(merged([text for text in texts if isinstance(text, tuple)]), media_type=MEDIA_TYPE)

    async def _parcel(self, request: Request) -> Parcel:
        body = await read_body(request, self._settings.max_body_bytes)
        tenant = self._keys.tenant(api_key(request))
        pieces: tuple[bytes, ...] = ()
        if tenant is not None or not self._keys:
            check_values(body, self._settings.max_body_values)
            pieces = await asyncio.to_thread(beginnings, body, tenant)  # others are served meanwhile
        path, query = request.url.path, request.scope["query_string"]
        return Parcel(request.method, path, query, tuple(request.headers.raw), body, pieces)

    async def _passed_on(self, parcel: Parcel) -> Response:
        for _ in range(_ATTEMPTS):
            parts = self._engine.options(stream=True).answer.remote(parcel)
            try:
                opening = await anext(parts)
                break
            except RayActorError as error:
                log("a replica was lost", {"path": parcel.path, "sent": False}, logging.ERROR, error=error)
            except BaseException:
                parts.cancel()
                raise
        else:
            raise _lost()
        response = StreamingResponse(_rest(opening, parts, parcel.path), opening.status)
        # The id of the request is added by Ray Serve's own server.
        response.raw_headers = [(name, value) for name, value in opening.headers if name != b"x-request-id"]
        return response


async def _rest(opening: Opening, parts: Any, path: str) -> AsyncGenerator[bytes, None]:
    """The body. What goes wrong now is told by an event, as it is where an engine fails. Of any other body the client can
    tell by its length that it has lost the rest, once the connection is closed."""
    try:
        yield opening.part
        async for part in parts:
            yield part
    except Exception as error:
        log("an answer was lost", {"sent": True}, logging.ERROR, error=error)
        if not _is_stream(opening):
            raise
        yield failure(api_error(_lost() if isinstance(error, RayActorError) else error), path)
        if not is_of_messages(path):
            yield DONE
    finally:
        parts.cancel()


def _is_stream(opening: Opening) -> bool:
    return any(name == b"content-type" and value.startswith(_EVENTS) for name, value in opening.headers)


def _lost() -> ApiError:
    return ApiError(
        503, "the replica that wrote this answer has ended, and another one takes its place", code="replica_lost"
    )


# --- Calls the application in this process without a socket: a request in, a status and parts of a body out.


class Inside:
    """Answers parcels with an application of ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Answers of which a part has not been read yet."""
        return len(self._tasks)

    def cut_off(self) -> None:
        """End all answers that are under way; their readers get a ClosedError."""
        for task in self._tasks:
            task.cancel()

    async def answer(self, parcel: Parcel) -> AsyncGenerator[Opening | bytes, None]:
        """The opening with the first part of the body, then what is ready of the rest, whole events at a time.

        A reader that leaves ends the answer as a client does that leaves a server.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        task = asyncio.create_task(self._run(parcel, messages))
        self._tasks.add(task)
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            start = await _next(messages, task)
            part, more = await _body(messages, task)
            yield Opening(start["status"], tuple(start["headers"]), part)
            while more:
                part, more = await _body(messages, task)
                if part:
                    yield part
        finally:
            self._tasks.discard(task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, parcel: Parcel, messages: asyncio.Queue[Message | None]) -> None:
        body: list[Message] = [{"type": "http.request", "body": parcel.body, "more_body": False}]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()  # a client that leaves cancels the task
            return body.pop()

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        await self._app(_scope(parcel), receive, send)


def _scope(parcel: Parcel) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": parcel.method,
        "scheme": "http",
        "path": parcel.path,
        "raw_path": parcel.path.encode(),
        "query_string": parcel.query,
        "root_path": "",
        "headers": list(parcel.headers),
        "client": None,
        "server": None,
    }


async def _next(messages: asyncio.Queue[Message | None], task: asyncio.Task[None]) -> Message:
    found = await messages.get()
    if found is None:
        if not task.cancelled():
            task.result()  # raises what ended it
        raise ClosedError
    return found


async def _body(messages: asyncio.Queue[Message | None], task: asyncio.Task[None]) -> tuple[bytes, bool]:
    """The parts of a body that are ready, one at least, and whether there are more."""
    parts, more = list[bytes](), True
    while more and (not parts or not messages.empty()):
        message = await _next(messages, task)
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts), more

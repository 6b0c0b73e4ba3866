"""Calls the application in this process without a socket: a request in, a status and parts of a body out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message, Scope

from outrider.errors import ClosedError
from outrider.server.replicas.messages import Opening, Parcel


class Inside:
    """Answers parcels with an application of ASGI.

    Args:
        app: The application.
    """

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

        Raises:
            ClosedError: The answer was cut off.
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

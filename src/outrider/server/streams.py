"""Server-sent events, what happens when their reader leaves, and deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Message

from outrider.async_llm import AsyncStream
from outrider.params import StreamPiece
from outrider.server.answers import Answer
from outrider.server.errors import ApiError, api_error

# --- Server-sent events, and what happens when their reader leaves.


T = TypeVar("T")


async def events(
    answer: Answer,
    streams: Sequence[AsyncStream],
    deadlines: Deadlines,
    end: float | None,
    failed: Callable[[BaseException], None],
) -> AsyncGenerator[bytes, None]:
    """The events of an answer.

    Args:
        end: When the pieces must be there, by the clock of the event loop; None for no limit.
    """
    try:
        for chunk in answer.opening():
            yield answer.event(chunk)
        async with aclosing(with_pauses(within(deadlines, end, pieces(streams)), answer.pause_seconds)) as found:
            async for item in found:
                told = None if item is None else answer.chunk(*item)
                part = answer.pause if item is None else b"" if told is None else answer.event(told)
                if part:
                    yield part
        for chunk in answer.closing():
            yield answer.event(chunk)
    except Exception as error:
        failed(error)
        yield answer.failure(api_error(error))
    if answer.last:
        yield answer.last


async def within(deadlines: Deadlines, end: float | None, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The items of another generator, as long as they come in time.

    The time runs while an item is waited for and while it is used, and only the wait is broken off.
    """
    async with aclosing(items):
        while True:
            async with deadlines.until(end):
                item = await anext(items, None)
            if item is None:
                return
            yield item


async def with_pauses(items: AsyncGenerator[T, None], seconds: float | None) -> AsyncGenerator[T | None, None]:
    """The items of another generator, and None each time that none has come for so many seconds; None for never."""
    waiting: asyncio.Task[T | None] | None = None
    async with aclosing(items):
        if seconds is None:
            async for item in items:
                yield item
            return
        try:
            while True:
                waiting = asyncio.ensure_future(anext(items, None))
                while not (await asyncio.wait({waiting}, timeout=seconds))[0]:
                    yield None
                found = waiting.result()
                if found is None:
                    return
                yield found
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)


async def pieces(streams: Sequence[AsyncStream]) -> AsyncGenerator[tuple[int, StreamPiece], None]:
    """The pieces of several streams as they come, each with the number of its stream."""
    if len(streams) == 1:
        async for piece in streams[0]:
            yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, StreamPiece | None]] = asyncio.Queue()

    async def read(place: int, stream: AsyncStream) -> None:
        try:
            async for piece in stream:
                await queue.put((place, piece))
        finally:
            queue.put_nowait((place, None))

    tasks = [asyncio.create_task(read(place, stream)) for place, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            place, found = await queue.get()
            if found is not None:
                yield place, found
                continue
            left -= 1
            await tasks[place]  # raises what ended it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(receive: Callable[[], Awaitable[Message]], job: Coroutine[Any, Any, T]) -> T:
    """The outcome of a job, which is cancelled when the client leaves."""
    task, gone = asyncio.ensure_future(job), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left", code="client_left")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- Deadlines of requests; all that are under way end together when the server has to end.


#: How long clients may take to read what they are told at the end.
PARTING_SECONDS = 5


class Deadlines:
    """Blocks of coroutines that are broken off when their time is over, or that of the server is."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._is_over = False

    @property
    def num_open(self) -> int:
        """Blocks under way."""
        return len(self._open)

    @asynccontextmanager
    async def until(self, end: float | None = None) -> AsyncIterator[None]:
        """A block that is broken off at this time of the event loop's clock; None for no time of its own."""
        if self._is_over:
            raise _over()
        try:
            async with asyncio.timeout_at(end) as scope:
                self._open.add(scope)
                try:
                    yield
                finally:
                    self._open.discard(scope)
        except TimeoutError:
            if self._is_over:
                raise _over() from None
            if not scope.expired():
                raise
            problem = "the request took longer than this server allows by --request-seconds"
            raise ApiError(503, problem, code="timeout") from None  # its own time is no fault of ours

    def end_all(self) -> None:
        """Break off all blocks, and those that begin later."""
        self._is_over = True
        for scope in self._open:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())


def _over() -> ApiError:
    problem = "the server had to end before this request was answered; send it again, to another server or a little later"
    return ApiError(503, problem, code="drain_timeout", headers={"Connection": "close"})

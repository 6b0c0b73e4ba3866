"""Deadlines of requests; all that are under way end together when the server has to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.server.errors import ApiError

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
        """A block that is broken off at this time of the event loop's clock; None for no time of its own.

        Raises:
            TimeoutError: Its own time is over.
            ApiError: The server has to end.
        """
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
            raise

    def end_all(self) -> None:
        """Break off all blocks, and those that begin later."""
        self._is_over = True
        for scope in self._open:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())


def _over() -> ApiError:
    problem = "the server had to end before this request was answered; send it again, to another server or a little later"
    return ApiError(503, problem, code="drain_timeout", headers={"Connection": "close"})

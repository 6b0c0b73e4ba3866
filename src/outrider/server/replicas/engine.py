"""An engine in a process of its own, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from time import monotonic

from ray import serve

from outrider.errors import EngineDiedError
from outrider.server.app import make_app
from outrider.server.deadlines import PARTING_SECONDS
from outrider.server.logs import write_logs
from outrider.server.replicas.asgi_client import Inside
from outrider.server.replicas.loopback import keep_replica_local
from outrider.server.replicas.messages import Opening, Parcel
from outrider.server.service import Service


class EngineReplica:
    """One replica of the engine, with the routes of a server.

    Args:
        make: Loads the model.
    """

    def __init__(self, make: Callable[[], Service]) -> None:
        write_logs()
        keep_replica_local()
        self._service = make()
        self._inside = Inside(make_app(self._service))

    async def answer(self, parcel: Parcel) -> AsyncGenerator[Opening | bytes, None]:
        """The answer to a request; see Inside.answer."""
        async with aclosing(self._inside.answer(parcel)) as parts:
            async for part in parts:
                yield part

    def check_health(self) -> None:
        """Called by Ray Serve now and then, which replaces a replica that raises.

        Raises:
            EngineDiedError: Nothing is written here any more.
        """
        if self._service.status == "dead":
            raise EngineDiedError

    async def metrics(self) -> tuple[str, str]:
        """The name of this replica, and its metrics for Prometheus."""
        name: str = serve.get_replica_context().replica_id.unique_id
        return name, (await self._service.metrics_text()).decode()

    async def end(self, seconds: float) -> str:
        """Refuse what is new, let the texts under way finish, and let the engine go.

        Args:
            seconds: How long they may take; then they are ended with an error, as a single server ends them.

        Returns:
            Whether anything is still held for texts that have ended, as Service.end says it.
        """
        self._service.draining = True
        await self._rest(seconds)
        self._service.deadlines.end_all()
        await self._rest(PARTING_SECONDS)
        self._inside.cut_off()
        return await self._service.end()

    async def _rest(self, seconds: float) -> None:
        """Wait until nobody is being answered, or for so long."""
        until = monotonic() + seconds
        while (self._service.is_busy or self._inside.num_open) and monotonic() < until:
            await asyncio.sleep(0.05)

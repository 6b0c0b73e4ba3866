"""One engine, several threads: they take turns."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import RLock

from outrider.engine.engine import Engine
from outrider.engine.interrupts import uninterrupted
from outrider.engine.sequence import Request
from outrider.errors import ClosedError, EngineBusyError
from outrider.kernels.library import check_process
from outrider.params import SamplingParams, StreamPiece
from outrider.propose.speculation import SpeculationConfig


class Turns:
    """Gives an engine to one thread at a time.

    A request that nobody waits for any more is dropped, and this may happen anywhere: the garbage collector closes a
    forgotten stream in any thread, in the middle of an engine call too, or while its thread holds a lock that the engine's
    thread waits for. So dropping never waits, and never reaches into an engine at work: the request is noted down, and is
    cancelled by whoever has the engine, as soon as it rests.

    Args:
        engine: The engine. Whoever calls it past this object sees to the threads himself.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._process = os.getpid()
        self._lock = RLock()  # the thread that has it may come again: from a callback, or from the garbage collector
        self._at_work = False
        self._alive: dict[int, Request] = {}
        self._dropped: deque[Request] = deque()

    @property
    def engine(self) -> Engine:
        """The engine; raises ClosedError where it was given up."""
        if self._engine is None:
            raise ClosedError
        return self._engine

    @contextmanager
    def turn(self) -> Iterator[Engine]:
        """Have the engine alone within the block; blocks may be nested.

        Raises:
            ClosedError: It was given up.
            ForkedProcessError: This process was forked after a model was loaded.
            EngineBusyError: This thread is inside a call of the engine.
        """
        check_process()
        try:
            with self._lock:
                if self._at_work:  # this thread is inside a call of the engine, which called whoever asks now
                    raise EngineBusyError
                yield self.engine
        finally:
            self._cancel_dropped()

    def submit(
        self,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        speculation: SpeculationConfig,
        *,
        prompt: str | None,
        streaming: bool,
        namespace: str | None,
        traced: bool,
    ) -> Request:
        """Queue a prompt; arguments and errors are those of Engine.add_request. It is to be dropped in the end."""
        with uninterrupted(), self.turn() as engine, self._work():
            request = engine.add_request(
                prompt_token_ids,
                params,
                speculation,
                prompt=prompt,
                streaming=streaming,
                namespace=namespace,
                traced=traced,
            )
            self._alive[request.request_id] = request
            return request

    def step_until_one_ends(self, requests: Collection[Request]) -> None:
        """Advance all requests, step by step, until one of these has ended."""
        with self.turn() as engine:
            while not any(request.finished for request in requests):
                with self._work():
                    engine.step()
                self._cancel_dropped()

    def next_pieces(self, request: Request) -> list[StreamPiece]:
        """What a streaming request wrote since the last time, after as many steps as it takes; nothing once it has ended.

        Other threads may have their turns between two steps, and their steps advance this request too.
        """
        while True:
            with self.turn() as engine:
                if request.outbox or request.finished:
                    pieces, request.outbox = request.outbox or [], []
                    return pieces
                with self._work():
                    engine.step()

    def drop(self, request: Request) -> None:
        """Forget a request, and cancel what has not ended of it. It never waits, and may be called anywhere and twice."""
        self._dropped.append(request)
        self._cancel_dropped()

    def close(self) -> None:
        """Cancel everything and give the engine up. A forked process gives up what it cannot use, and touches nothing."""
        if os.getpid() != self._process:
            self._engine = None
            return
        with self._lock:
            if self._at_work:
                raise EngineBusyError
            self._dropped.extend(self._alive.values())
            self._cancel_dropped()
            self._engine = None

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Mark the engine as being inside a call; the lock is held."""
        before, self._at_work = self._at_work, True
        try:
            yield
        finally:
            self._at_work = before

    def _cancel_dropped(self) -> None:
        """Cancel what was dropped, unless another thread has the engine, or this one is inside a call: they will."""
        if not self._dropped:
            return  # as after almost every step
        with uninterrupted():  # the lock is given back, whatever happens
            while self._dropped and self._lock.acquire(blocking=False):
                try:
                    if self._at_work or not self._dropped:
                        return
                    with self._work():
                        self._end(self._dropped.popleft())
                finally:
                    self._lock.release()

    def _end(self, request: Request) -> None:
        if self._engine is not None:
            self._engine.cancel(request)
        self._alive.pop(request.request_id, None)
        # Whoever still has the request, or one of its sequences, which point back at it, keeps no model alive.
        request.sequences.clear()
        request.error = None  # nor the frames in which it arose

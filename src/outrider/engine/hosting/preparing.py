"""Prepares requests in a thread pool that is fair between tenants. No torch."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from time import perf_counter
from typing import Any, TypeVar

from outrider.engine.scheduling.turns import Tenant, Turns
from outrider.errors import ClosedError

T = TypeVar("T")

_Call = tuple[Callable[[], Any], "Future[Any]"]


def _usual_threads() -> int:
    """Few: whoever computes in Python holds up the engine's own thread."""
    return max(2, min(4, (os.cpu_count() or 1) // 2))


class PreparingThreads:
    """A few threads for what is done before the engine sees a request: reading, encoding, compiling.

    Tenants take turns. Whoever has had least of the threads' time, divided by its weight, is next, and of several that have
    had the same, whoever was next least lately. No tenant has all threads at a time, so that the others need not wait until
    one of its calls ends.

    Args:
        num_threads: At least 2; None takes a few, by the number of cores.
        clock: Tells the time in seconds.

    Attributes:
        turns: What each tenant has had, in seconds, and what its share is.
    """

    def __init__(self, num_threads: int | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self._num_threads = _usual_threads() if num_threads is None else num_threads
        self._threads = ThreadPoolExecutor(self._num_threads, "outrider-prepare")
        self._clock = clock
        self._lock = Lock()
        self._waiting: dict[Tenant, deque[_Call]] = {}  # whoever was next least lately stands first
        self._running: Counter[Tenant] = Counter()
        self._closed = False
        self.turns = Turns()

    def submit(self, tenant: Tenant, call: Callable[[], T]) -> Future[T]:
        """Have a function called when it is the tenant's turn. Whoever cancels the outcome before that takes it back.

        Raises:
            ClosedError: No more is prepared.
        """
        outcome: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError
            self.turns.welcome(tenant, self._waiting.keys() | self._running.keys())
            self._waiting.setdefault(tenant, deque()).append((call, outcome))
            self._threads.submit(self._work)
        return outcome

    def close(self) -> None:
        """Refuse what waits with a ClosedError; what runs goes on to its end, and nobody waits for it."""
        with self._lock:
            self._closed = True
            left = [outcome for calls in self._waiting.values() for _, outcome in calls]
            self._waiting.clear()
        for outcome in left:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(ClosedError())
        self._threads.shutdown(wait=False)

    def _work(self) -> None:
        """Carry out calls as long as there is one whose tenant may have one thread more."""
        while (found := self._take()) is not None:
            tenant, (call, outcome) = found
            del found
            begun = self._clock()
            _carry_out(call, outcome)
            del call, outcome  # they may be all that keeps a model alive
            self._end(tenant, self._clock() - begun)

    def _take(self) -> tuple[Tenant, _Call] | None:
        """The next call, and whose it is; None where nobody waits who may have a thread more."""
        with self._lock:
            free = [tenant for tenant in self._waiting if self._running[tenant] < self._num_threads - 1]
            if not free:
                return None
            tenant = min(free, key=self.turns.had)
            calls = self._waiting.pop(tenant)
            found = calls.popleft()
            if calls:
                self._waiting[tenant] = calls  # behind all others
            self._running[tenant] += 1
            return tenant, found

    def _end(self, tenant: Tenant, seconds: float) -> None:
        with self._lock:
            self.turns.charge(tenant, seconds)
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]


def _carry_out(call: Callable[[], Any], outcome: Future[Any]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)

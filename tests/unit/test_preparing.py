"""Tenants take turns for the threads that prepare requests: a flood of one of them starves no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from threading import Event

import pytest

from outrider.async_llm import PreparingThreads
from outrider.errors import ClosedError

SECONDS = 30  # after which a test gives up; nothing waits so long


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def threads(clock: Clock) -> Iterator[PreparingThreads]:
    found = PreparingThreads(2, clock)
    yield found
    found.close()


@pytest.fixture
def order() -> list[str]:
    return []


@pytest.fixture
def single_file(threads: PreparingThreads) -> Iterator[Callable[[], None]]:
    """Both threads are held by other tenants; the call of one of them then ends, and the other's goes on."""
    gates = {tenant: Event() for tenant in ("held", "held for longer")}
    for tenant, gate in gates.items():
        started = Event()

        def hold(started: Event = started, gate: Event = gate) -> None:
            started.set()
            gate.wait(SECONDS)

        threads.submit(tenant, hold)
        assert started.wait(SECONDS)
    yield gates["held"].set
    for gate in gates.values():
        gate.set()


def test_a_flood_leaves_a_thread_to_the_others(threads: PreparingThreads) -> None:
    gate = Event()
    flood = [threads.submit("flood", lambda: gate.wait(SECONDS)) for _ in range(50)]
    assert threads.submit("quiet", lambda: "done").result(SECONDS) == "done"
    assert not any(each.done() for each in flood), "although none of the flood has ended"
    gate.set()
    wait(flood, SECONDS)


def test_tenants_take_turns(threads: PreparingThreads, order: list[str], single_file: Callable[[], None]) -> None:
    calls = [threads.submit("flood", lambda: order.append("flood")) for _ in range(6)]
    calls += [threads.submit(name, lambda name=name: order.append(name)) for name in ("quiet", "other", "quiet")]  # type: ignore[misc]
    single_file()
    wait(calls, SECONDS)
    assert order == ["flood", "quiet", "other", "flood", "quiet", "flood", "flood", "flood", "flood"]


def test_turns_are_counted_in_time_and_by_weight(
    threads: PreparingThreads, clock: Clock, order: list[str], single_file: Callable[[], None]
) -> None:
    threads.turns.weights = {"heavy": 2.0}

    def work(name: str, seconds: float) -> None:
        order.append(name)
        clock.now += seconds

    asked = [("slow", 3.0)] * 3 + [("quick", 1.0)] * 6 + [("heavy", 1.0)] * 6
    calls = [threads.submit(name, lambda name=name, seconds=seconds: work(name, seconds)) for name, seconds in asked]  # type: ignore[misc]
    single_file()
    wait(calls, SECONDS)
    assert [order[:11].count(name) for name in ("slow", "quick", "heavy")] == [2, 3, 6], order


def test_who_takes_a_call_back_is_not_served(
    threads: PreparingThreads, order: list[str], single_file: Callable[[], None]
) -> None:
    gone = threads.submit("a", lambda: order.append("gone"))
    there = threads.submit("a", lambda: order.append("there"))
    assert gone.cancel()
    single_file()
    there.result(SECONDS)
    assert order == ["there"]
    with pytest.raises(CancelledError):
        gone.result()


def test_errors_reach_whoever_asked(threads: PreparingThreads) -> None:
    def fail() -> None:
        raise KeyError("planted")

    failed: list[Future[None]] = [threads.submit("a", fail) for _ in range(3)]
    for each in failed:
        with pytest.raises(KeyError, match="planted"):
            each.result(SECONDS)
    assert threads.submit("a", lambda: 1).result(SECONDS) == 1


def test_whoever_waits_is_told_of_the_end(threads: PreparingThreads) -> None:
    gate, started = Event(), Event()

    def hold() -> str:
        started.set()
        gate.wait(SECONDS)
        return "to its end"

    runs, waits = threads.submit("a", hold), threads.submit("a", lambda: "never")
    assert started.wait(SECONDS)
    threads.close()
    with pytest.raises(ClosedError):
        waits.result(SECONDS)
    with pytest.raises(ClosedError):
        threads.submit("b", lambda: "never")
    gate.set()
    assert runs.result(SECONDS) == "to its end"

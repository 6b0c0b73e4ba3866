"""An interrupt is put off inside a block, and goes to the program's own handler behind it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from outrider.engine.interrupts import uninterrupted, watched_interrupts


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[list[int]]:
    """The program's own handler, which notes down what it is called with."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("watched", [False, True])
def test_an_interrupt_is_put_off_until_the_outermost_block_ends(own_handler: list[int], watched: bool) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with watched_interrupts() if watched else uninterrupted():
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            assert not own_handler
        assert bool(own_handler) is watched
    assert own_handler == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_between_two_blocks_is_heard_at_once(own_handler: list[int]) -> None:
    with watched_interrupts():
        with uninterrupted():
            pass
        signal.raise_signal(signal.SIGINT)
        assert own_handler == [signal.SIGINT]


def test_a_handler_that_a_callback_installs_stays() -> None:
    heard: list[int] = []

    def other(number: int, _: object) -> None:
        heard.append(number)

    with watched_interrupts():
        signal.signal(signal.SIGINT, other)
    assert signal.getsignal(signal.SIGINT) is other
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        assert not heard
    assert heard == [signal.SIGINT]


def test_an_exception_ends_the_watch(own_handler: list[int]) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def break_off() -> None:
        with watched_interrupts(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        break_off()
    assert signal.getsignal(signal.SIGINT) is handler
    assert own_handler == [signal.SIGINT]


def test_another_thread_puts_nothing_off(own_handler: list[int]) -> None:
    def work() -> None:
        with watched_interrupts(), uninterrupted():
            entered.set()
            leave.wait(30)

    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    with watched_interrupts():
        thread.start()
        entered.wait(30)
        signal.raise_signal(signal.SIGINT)
        heard = list(own_handler)
        leave.set()
        thread.join()
    assert heard == [signal.SIGINT]


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with watched_interrupts(), uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

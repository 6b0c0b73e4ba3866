"""Ctrl-C between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]


class _Watch:
    """Stands in for a program's own handler of interrupts, and can put them off.

    Args:
        own: The program's own handler, whatever it is.
    """

    def __init__(self, own: _Handler) -> None:
        self.own = own
        self._blocks = 0
        self._arrived: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._blocks:
            self._arrived = number, frame
        else:
            self.own(number, frame)

    def __enter__(self) -> None:
        self._blocks += 1

    def __exit__(self, *_: object) -> None:
        self._blocks -= 1
        if self._arrived is not None and not self._blocks:
            arrived, self._arrived = self._arrived, None
            self.own(*arrived)


_watch: _Watch | None = None  # while it stands in; only the main thread ever gets a signal


@contextmanager
def watched_interrupts() -> Iterator[None]:
    """Have `uninterrupted` work without a change of handlers in every step, which costs a small model's step some percent.

    An interrupt that arrives within the block, and not within an `uninterrupted` one, goes to the program's own handler at
    once.
    """
    global _watch
    own = signal.getsignal(signal.SIGINT)
    if not _in_main_thread() or own is _watch or not callable(own):
        yield
        return
    watch = _Watch(own)
    try:
        with watch:
            signal.signal(signal.SIGINT, watch)
            _watch = watch
        yield
    finally:
        with watch:
            _watch = None
            if signal.getsignal(signal.SIGINT) is watch:  # a callback may have put another handler there, which stays
                signal.signal(signal.SIGINT, own)


def uninterrupted() -> AbstractContextManager[None]:
    """Put off an interrupt (SIGINT) that arrives within the block until its end.

    Python raises KeyboardInterrupt between any two instructions. Books that are half written by then stay half written,
    so the engine takes an interrupt only where its books agree. Then the program's own handler is called, whatever it is.
    Other threads never get the signal, and for them the block does nothing.
    """
    if not _in_main_thread():
        return nullcontext()
    return _watch or _watched_and_put_off()


@contextmanager
def _watched_and_put_off() -> Iterator[None]:
    with watched_interrupts(), _watch or nullcontext():
        yield


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

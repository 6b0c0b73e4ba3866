"""Ctrl-C between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off an interrupt (SIGINT) that arrives within the block until its end.

    Python raises KeyboardInterrupt between any two instructions. Books that are half written by then stay half written,
    so the engine takes an interrupt only where its books agree. Then the program's own handler is called, whatever it is.
    Other threads never get the signal, and for them the block does nothing.
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived:
            before(*arrived[0])

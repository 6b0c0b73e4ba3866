"""How much of a model's files has been read, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called with the bytes read so far, and with all bytes. It may be called in any thread.
ShowReading = Callable[[int, int], None]

_watchers: list[ShowReading] = []


@contextmanager
def watched_reading(show: ShowReading) -> Iterator[None]:
    """Within the block, whatever is read of a GGUF file in this process is told to `show`."""
    _watchers.append(show)
    try:
        yield
    finally:
        _watchers.remove(show)


class Reading:
    """What has been read of a file of `total` bytes."""

    def __init__(self, total: int) -> None:
        self._done, self._total = 0, total

    def advance(self, count: int) -> None:
        """`count` more bytes have been read."""
        self._done += count
        for show in _watchers:
            show(self._done, self._total)

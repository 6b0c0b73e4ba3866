"""Tells a reader of a pipe how far a long command is, where no bar can be shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.lab.measure.figures import Progress

#: The seconds between two lines.
EVERY = 30.0


class Heartbeat:
    """Says every half minute what a command is doing, from a thread of its own, since a single check may take longer.

    Args:
        say: Shows a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._ended = say, Event()
        self._what, self._done, self._total = "loading", 0, 0
        self._began = self._expected = perf_counter()
        self._first = 0
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def expect(self, what: str, total: int) -> None:
        """So many turns of this come next."""
        self._what, self._done, self._total = what, 0, total
        self._expected, self._first = perf_counter(), 0

    def advance(self) -> None:
        """A turn is done."""
        self._done += 1

    def tell(self, what: str, done: int, total: int) -> None:
        """So much of it is done; the first call says where it began."""
        if not self._total:
            self._expected, self._first = perf_counter(), done
        self._what, self._done, self._total = what, done, total

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            count = f": {self._done} of {self._total}" if self._total else ""
            self._say(f"{_clock(perf_counter() - self._began)} {self._what}{count}{self._left()}")

    def _left(self) -> str:
        """The time that is left, if turns go on to take as long as they did."""
        done = self._done - self._first
        if done <= 0 or self._done >= self._total:
            return ""
        return f", about {_clock((perf_counter() - self._expected) / done * (self._total - self._done))} left"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def shown_progress(console: Console) -> Iterator[Progress]:
    """A bar for what is being measured, on a terminal; elsewhere a line every half minute."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from outrider.lab.measure.figures import Progress

    if not console.is_terminal:
        with Heartbeat(lambda line: console.print(line, markup=False, soft_wrap=True)) as heartbeat:
            yield Progress(heartbeat.expect, heartbeat.advance)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=1)
        yield Progress(lambda what, turns: bars.reset(task, description=what, total=turns), lambda: bars.advance(task))

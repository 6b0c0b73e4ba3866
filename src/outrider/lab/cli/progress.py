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


class Pace:
    """Counts turns, and says how long those take that are left, if they go on to take as long as they did on average.

    Between two turns the time that is left runs down, and where a turn takes longer than those before it grows again.
    """

    def __init__(self) -> None:
        self.what, self.done, self.total = "loading", 0, 0
        self._begun = self._last = perf_counter()
        self._first = 0

    def expect(self, what: str, total: int, done: int = 0) -> None:
        """So many turns of this come next, of which some may be done."""
        self.what, self.done, self.total = what, done, total
        self._begun = self._last = perf_counter()
        self._first = done

    def reach(self, done: int) -> None:
        """So many turns are done."""
        self.done, self._last = done, perf_counter()

    def left(self) -> float | None:
        """Seconds; None where nothing is known of them."""
        turns, rest = self.done - self._first, self.total - self.done
        if turns <= 0 or rest <= 0:
            return None
        now, mean = perf_counter(), (self._last - self._begun) / turns
        waited = now - self._last
        return mean * rest - waited if waited <= mean else (now - self._begun) / (turns + 1) * (rest - 1)


class Heartbeat:
    """Says every half minute what a command is doing, from a thread of its own, since a single check may take longer."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._ended = say, Event()
        self._pace, self._began = Pace(), perf_counter()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def expect(self, what: str, total: int) -> None:
        """So many turns of this come next."""
        self._pace.expect(what, total)

    def advance(self) -> None:
        """A turn is done."""
        self._pace.reach(self._pace.done + 1)

    def change(self, turns: int) -> None:
        """There are so many turns more than was expected, or fewer."""
        self._pace.total += turns

    def tell(self, what: str, done: int, total: int) -> None:
        """So much of it is done; the first call says where it began."""
        if not self._pace.total:
            self._pace.expect(what, total, done)
        self._pace.what, self._pace.total = what, total
        self._pace.reach(done)

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            pace, left = self._pace, self._pace.left()
            count = f": {pace.done} of {pace.total}" if pace.total else ""
            rest = "" if left is None else f", about {clock(left)} left"
            self._say(f"{clock(perf_counter() - self._began)} {pace.what}{count}{rest}")


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def shown_progress(console: Console) -> Iterator[Progress]:
    """A bar for what is being measured, on a terminal; elsewhere a line every half minute."""
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    from outrider.lab.measure.figures import Progress

    if not console.is_terminal:
        with Heartbeat(lambda line: console.print(line, markup=False, soft_wrap=True)) as heartbeat:
            yield Progress(heartbeat.expect, heartbeat.advance, heartbeat.change)
        return

    pace = Pace()

    class Left(ProgressColumn):
        """Rich's own looks at the last half minute alone, and stands still while a turn takes longer."""

        def render(self, task: Task) -> Text:
            left = pace.left()
            return Text("" if left is None else f"about {clock(left)} left", style="progress.remaining")

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), Left())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(pace.what, total=None)

        def expect(what: str, turns: int) -> None:
            pace.expect(what, turns)
            bars.reset(task, description=what, total=turns)

        def advance() -> None:
            pace.reach(pace.done + 1)
            bars.update(task, completed=pace.done)

        def change(turns: int) -> None:
            pace.total += turns
            bars.update(task, total=pace.total)

        yield Progress(expect, advance, change)

"""Shows how far a long command is: a bar on a terminal, and a line now and then to the reader of a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self

from outrider.lab.measure.progress import Progress, clock

if TYPE_CHECKING:
    from rich.console import Console

#: The seconds between two lines.
EVERY = 30.0


class Heartbeat(Progress):
    """Says every half minute what a command is doing, from a thread of its own, since a single check may take longer."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say, self._ended, self._began = say, Event(), perf_counter()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            left = self.left()
            count = f": {self.done} of {self.total}" if self.total else ""
            rest = "" if left is None else f", about {clock(left)} left"
            self._say(f"{clock(perf_counter() - self._began)} {self.what}{count}{rest}")


@contextmanager
def shown_progress(console: Console) -> Iterator[Progress]:
    """A bar for what is being done, on a terminal; elsewhere a line every half minute."""
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    if not console.is_terminal:
        with Heartbeat(lambda line: console.print(line, markup=False, soft_wrap=True)) as heartbeat:
            yield heartbeat
        return

    class Bar(Progress):
        def shown(self, *, begun: bool = False) -> None:
            if begun:
                bars.reset(task)
            bars.update(task, description=self.what, completed=self.done, total=self.total)

    class Left(ProgressColumn):
        """Rich's own looks at the last half minute alone, and stands still while a turn takes longer."""

        def render(self, task: Task) -> Text:
            left = bar.left()
            return Text("" if left is None else f"about {clock(left)} left", style="progress.remaining")

    bar = Bar()
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), Left())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(bar.what, total=None)
        yield bar

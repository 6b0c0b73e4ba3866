"""What a terminal shows while a model is loaded: a spinner, and a bar of the bytes of a file that is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status

    from outrider.model.loading.reading import ShowReading


@contextmanager
def shown_loading(console: Console, text: str) -> Iterator[ShowReading]:
    """Show `text` beside a spinner within the block, and a bar in its place while a file is read.

    Nothing is shown where the console is no terminal.

    Yields:
        What is to be told of bytes that have been read.
    """
    if not console.is_terminal:
        yield lambda done, total: None
        return
    with console.status(text) as status:
        bar = _Bar(console, status, text)
        try:
            yield bar.show
        finally:
            bar.end()


class _Bar:
    """Takes turns with a spinner, since a console shows one moving thing at a time."""

    def __init__(self, console: Console, status: Status, text: str) -> None:
        self._console, self._status, self._text = console, status, text
        self._bars: Progress | None = None

    def show(self, done: int, total: int) -> None:
        if self._bars is None:
            self._begin(total)
        assert self._bars is not None, "it has begun"
        self._bars.update(self._bars.task_ids[0], completed=done)
        if done >= total:
            self.end()
            self._status.start()

    def end(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _begin(self, total: int) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self._status.stop()
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._bars.add_task(self._text, total=total)
        self._bars.start()

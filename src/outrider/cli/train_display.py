"""What training commands show: bars, measurements and the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.train.card import Outcome
    from outrider.train.trainer import Watcher


def check_installed() -> None:
    """Raise MissingExtraError where the packages for training are missing."""
    from importlib.util import find_spec

    for name in ("accelerate", "matplotlib"):
        if find_spec(name) is None:
            raise MissingExtraError("outrider train", f"the package {name} is not installed", "Install outrider[train].")


def show(outcome: Outcome, out: Path, *, as_json: bool) -> None:
    from accelerate import PartialState
    from rich.console import Console

    if not PartialState().is_main_process:  # the others have written nothing
        return
    if as_json:
        sys.stdout.write(json.dumps(outcome.figures()) + "\n")
        return
    before, best = outcome.before, outcome.best
    console = Console(highlight=False)
    pairs = zip(before.acceptance, best.acceptance, strict=True)
    console.print("acceptance on held-out texts: " + ", ".join(f"{a:.3f} -> {b:.3f}" for a, b in pairs))
    if outcome.stats is not None:
        began = "" if before.engine_tau is None else f" (before: {before.engine_tau:.2f})"
        console.print(f"tokens of a target pass in the engine: {outcome.stats.mean_acceptance_length:.2f}{began}")
    console.print(f"written to {out}; its README.md says what was measured", soft_wrap=True)


@contextmanager
def bar_of(console: Console) -> Iterator[Any]:
    """A bar with the time that is left, on a terminal, and a line every half minute elsewhere.

    What it yields is called with (what, done, total)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from outrider.cli.heartbeat import Heartbeat

    if not console.is_terminal:
        with Heartbeat(lambda line: console.print(line, markup=False, soft_wrap=True)) as heartbeat:
            yield heartbeat.tell
        return

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("loading", total=None)
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total)


@contextmanager
def watching(steps: int) -> Iterator[Watcher]:
    """A watcher that shows a bar, and a line for each measurement, on the error stream."""
    from rich.console import Console

    from outrider.train.trainer import Watcher

    console = Console(stderr=True, highlight=False)
    with bar_of(console) as bar:

        class Shown(Watcher):
            done = 0

            def on_step(self, step: int, loss: float) -> None:
                self.done += 1
                bar(f"step {step}, loss {loss:.3f}", max(self.done, step), steps)

            def on_measurement(self, measurement: Any) -> None:
                shares = " ".join(f"{share:.3f}" for share in measurement.acceptance)
                engine = "" if measurement.engine_tau is None else f", in the engine {measurement.engine_tau:.2f}"
                loss = f"loss {measurement.loss:.3f}, " if measurement.step else ""  # nothing was learnt before a step
                said = f"{loss}acceptance {shares}, tau {measurement.tau:.2f}{engine}"
                console.print(f"step {measurement.step}: {said}", soft_wrap=True)

        yield Shown()

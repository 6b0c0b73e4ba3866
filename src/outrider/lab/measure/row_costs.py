"""Measures the time T(n) of a pass with n rows, behind contexts as in decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.lab.measure.machine import LoadWatch
from outrider.lab.measure.writing import AGAIN, doubt_about_rows
from outrider.model.memory import PassTimer

#: The numbers of rows whose passes a usual run times, and those of a full run.
USUAL = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
ALL = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
#: The context of a run that asks for none.
CONTEXT = 128


@dataclass(frozen=True)
class RowCosts:
    """The times of passes."""

    seconds: dict[int, dict[int, float]]  # the median seconds of a pass, by the tokens before its rows and by their number
    doubt: str | None  # why they cannot be believed, although they were measured several times. None where they can.


def row_costs(
    timer: PassTimer,
    contexts: Sequence[int],
    rows: Sequence[int],
    limit: int,
    repeats: int,
    on_round: Callable[[], None] = lambda: None,
) -> RowCosts:
    """Time passes by their context and their number of rows. A round times every number behind every context once, so that
    slow moments hit all of them. Times that cannot be true are measured again, and the smaller median counts: other work
    makes passes slower and never faster."""
    places = [(context, n) for context in contexts for n in rows if context + n <= limit]
    found: dict[int, dict[int, float]] = {}
    doubt = None
    for _ in range(1 + AGAIN):
        watch = LoadWatch()
        for (context, n), seconds in median_seconds(timer, places, repeats, on_round).items():
            times = found.setdefault(context, {})
            times[n] = min(seconds, times.get(n, seconds))
        load, on_processor = watch.load(), timer.device.type == "cpu"
        doubts = (doubt_about_rows(times, load, on_processor=on_processor) for times in found.values())
        doubt = next((each for each in doubts if each is not None), None)
        if doubt is None:
            break
    return RowCosts(found, doubt)


def median_seconds(
    timer: PassTimer,
    places: Sequence[tuple[int, int]],
    repeats: int,
    on_round: Callable[[], None] = lambda: None,
    *,
    logits: bool = True,
) -> dict[tuple[int, int], float]:
    """The median seconds of a pass at each place, (tokens before its rows, rows). A round times every place once, and the
    first one does not count."""
    times: dict[tuple[int, int], list[float]] = {place: [] for place in places}
    for turn in range(repeats + 1):
        for start, rows in places:
            timer.compute(start)
            seconds = timer.seconds(start, rows, logits=logits)
            if turn:
                times[start, rows].append(seconds)
        on_round()
    return {place: median(found) for place, found in times.items()}

"""Measures the time T(n) of a pass with n rows, behind contexts as in decoding."""

from __future__ import annotations

from collections import defaultdict
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
    """Time passes by their context and their number of rows.

    A round times every number behind every context once, so that slow moments hit all of them. Times that cannot be true
    are measured again, and the smaller median counts: other work makes passes slower and never faster.
    """
    places = [(context, n) for context in contexts for n in rows if context + n <= limit]
    found: dict[int, dict[int, float]] = {}
    doubt = None
    for _ in range(1 + AGAIN):
        watch = LoadWatch()
        for context, times in _medians(timer, places, repeats, on_round).items():
            before = found.setdefault(context, times)
            found[context] = {n: min(seconds, before[n]) for n, seconds in times.items()}
        load, on_processor = watch.load(), timer.device.type == "cpu"
        doubts = (doubt_about_rows(times, load, on_processor=on_processor) for times in found.values())
        doubt = next((each for each in doubts if each is not None), None)
        if doubt is None:
            break
    return RowCosts(found, doubt)


def _medians(
    timer: PassTimer, places: Sequence[tuple[int, int]], repeats: int, on_round: Callable[[], None]
) -> dict[int, dict[int, float]]:
    """The median seconds at each place, (context, rows), by context and rows."""
    times: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(repeats + 1):
        for context, n in places:
            timer.compute(context)
            seconds = timer.seconds(context, n, logits=True)
            if turn:
                times[context][n].append(seconds)
        on_round()
    return {context: {n: median(values) for n, values in found.items()} for context, found in times.items()}

"""Measures the time T(n) of a pass with n rows, behind contexts as in decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

from outrider.bench.passes import PassTimer

#: The numbers of rows whose passes a usual run times, and those of a full run.
USUAL = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
ALL = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
#: The context of a run that asks for none.
CONTEXT = 128


def row_costs(
    timer: PassTimer,
    contexts: Sequence[int],
    rows: Sequence[int],
    limit: int,
    repeats: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[int, dict[int, float]]:
    """The median seconds of a pass by its context and its number of rows.

    A round times every number behind every context once, so that slow moments hit all of them.

    Args:
        timer: The text whose passes are timed.
        contexts: The numbers of tokens before the rows.
        rows: The numbers of rows. Those that do not fit behind a context are left out there.
        limit: The length of the text.
        repeats: The number of rounds, after one that does not count.
        on_round: Called after each round.
    """
    places = [(context, n) for context in contexts for n in rows if context + n <= limit]
    times: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(repeats + 1):
        for context, n in places:
            timer.compute(context)
            seconds = timer.seconds(context, n, logits=True)
            if turn:
                times[context][n].append(seconds)
        on_round()
    return {context: {n: median(values) for n, values in found.items()} for context, found in times.items()}

"""Measures the time T(n) of a pass with n rows, behind a context as in decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter

from outrider.bench.machine import synchronise
from outrider.model.batch import Segment
from outrider.model.runner import ModelRunner

#: The numbers of rows whose passes a usual run times, and those of a full run.
USUAL = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
ALL = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
_CONTEXT = 128


def row_costs(
    runner: ModelRunner, rows: tuple[int, ...], repeats: int, on_round: Callable[[], None] = lambda: None
) -> dict[int, float]:
    """The median seconds of a pass by its number of rows. A round times every number once, so that slow moments hit all.

    Args:
        runner: The runner of the target. Some of its blocks are used and given back.
        rows: The numbers of rows. Numbers above half the model's context or half its KV memory are left out.
        repeats: The number of rounds, after one that does not count.
        on_round: Called after each round.
    """
    room = min(runner.loaded.max_model_len, runner.blocks.num_free * runner.blocks.block_size)
    rows = tuple(n for n in rows if n <= room // 2)
    context = min(_CONTEXT, room - max(rows, default=0))
    table = runner.blocks.allocate(runner.blocks.blocks_for(context + max(rows, default=0)))
    times: defaultdict[int, list[float]] = defaultdict(list)
    try:
        runner.forward([Segment([1] * context, 0, table)])
        for turn in range(repeats + 1):
            for n in rows:
                seconds = _timed(runner, Segment([1] * n, context, table))
                if turn:
                    times[n].append(seconds)
            on_round()
    finally:
        runner.blocks.free(table)
    return {n: median(values) for n, values in times.items()}


def _timed(runner: ModelRunner, segment: Segment) -> float:
    synchronise(runner.loaded.device)
    start = perf_counter()
    runner.forward([segment])
    synchronise(runner.loaded.device)
    return perf_counter() - start

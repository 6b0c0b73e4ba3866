"""How long a pass of n rows takes on this machine."""

from __future__ import annotations

from time import perf_counter

from outrider.model.batch import Segment
from outrider.model.runner import ModelRunner

#: Numbers of rows that are timed.
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
#: Passes of each size; the fastest counts, since whatever disturbs one makes it longer.
_REPEATS = 3


def measure_passes(runner: ModelRunner) -> dict[int, float]:
    """Seconds of a pass of one short text by its number of rows, in a memory apart from that of the texts."""
    loaded = runner.loaded
    longest = min(loaded.max_model_len, loaded.long_rope_after or loaded.max_model_len)
    sizes = [size for size in SIZES if size <= longest] or [1]
    apart = runner.apart(sizes[-1])
    table = apart.blocks.allocate(apart.blocks.blocks_for(sizes[-1]))
    _time(apart, table, sizes[-1])  # the first pass also makes what later ones find made
    return {size: min(_time(apart, table, size) for _ in range(_REPEATS)) for size in sizes}


def _time(runner: ModelRunner, table: list[int], size: int) -> float:
    start = perf_counter()
    out = runner.forward([Segment([0] * size, 0, table, long_rope=runner.loaded.uses_long_rope(size))])
    float(out.logits[0, 0])  # a device that works on is waited for
    return perf_counter() - start

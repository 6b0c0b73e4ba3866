"""How long a pass of n rows takes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from outrider.cache.lease import KVLease
from outrider.model.batch import Segment
from outrider.model.runner import ModelRunner

#: Numbers of rows that are timed.
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
#: Passes of each size; the fastest counts, since whatever disturbs one makes it longer.
_REPEATS = 3


def measure_passes(runner: ModelRunner) -> dict[int, float]:
    """Seconds of a pass behind a short text by its number of rows, as far as the model and its KV memory have room.

    Returns:
        By number of rows; {1: 1.0, ...} without any slope where there is no room at all.
    """
    sizes = [size for size in SIZES if size <= runner.loaded.max_model_len]
    with _room(runner, sizes) as table:
        sizes = [size for size in sizes if size <= len(table) * runner.blocks.block_size]
        if not sizes:
            return {1: 1.0}
        _time(runner, table, sizes[-1])  # the first pass also makes what later ones find made
        return {size: min(_time(runner, table, size) for _ in range(_REPEATS)) for size in sizes}


def _time(runner: ModelRunner, table: list[int], size: int) -> float:
    start = perf_counter()
    out = runner.forward([Segment([0] * size, 0, table)])
    float(out.logits[0, 0])  # a device that works on is waited for
    return perf_counter() - start


@contextmanager
def _room(runner: ModelRunner, sizes: list[int]) -> Iterator[list[int]]:
    """Blocks for the largest of the sizes that there is room for, given back in the end."""
    lease = KVLease(runner.blocks)
    try:
        next((size for size in reversed(sizes) if lease.grow(size)), 0)
        yield lease.block_table
    finally:
        lease.free()

"""What rows cost in products with weights of every format: T(n) over the time of the bytes, and C(n) = T(n) / T(1).

    python -m benchmarks.row_products --sets avx512bf16,avx2 --formats bfloat16,int8,int4-g32+a8 --rows 1,2,4,8,16

Q4_0, Q4_K and so on are the blocks of GGUF files. Rows are rounded to 8 bits where a format ends with "+a8".
Beside C(n) stands F(n): the time of n rows at the pace that 48
rows have with weights from the cache, over T(1). So C(n) cannot be much smaller than F(n), nor than 1.
Weights come from memory: products go through several matrices in turn, which together are larger than the caches.
With `--cached` they come from the cache, on one thread, and the table shows microseconds, the least of all rounds: that is
arithmetic alone, and other work on the machine hardly disturbs it.
Formats and numbers of rows take turns within a round, and each figure is the median of the rounds. The model is bf16, so
that rows enter products in pairs where the processor multiplies these.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from outrider.kernels.formats import FORMATS, StoredWeight, plain
from outrider.kernels.gguf_blocks import GGUF_TYPES
from outrider.kernels.library import KernelLibrary, available_sets, kernels_for
from outrider.kernels.packed import PackedWeights
from outrider.lab.measure.machine import read_bandwidth

USUAL = ("bfloat16", "int8", "int8+a8", "int4-g128", "int4-g128+a8", "int4-g32", "int4-g32+a8", "int4-g32-asym+a8")
#: Together, the matrices of a format take at least so many bytes.
_BEYOND_CACHES = 128 * 2**20
#: The outputs and inputs of a matrix whose bf16 stay in the cache of a core.
_CACHED = (512, 512)
#: Inputs and outputs of a matrix that stays in the cache, and the rows that meet it.
_SMALL, _MANY = 512, 48


def main() -> None:
    """Measure, and print a table for each instruction set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(available_sets()[-1:]))
    parser.add_argument("--formats", default=",".join(USUAL))
    parser.add_argument("--rows", default="1,2,4,5,8,12,16,32")
    parser.add_argument("--shape", default="8192x2048", help="outputs x inputs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cached", action="store_true", help="weights from the cache, on one thread")
    asked = parser.parse_args()
    outputs, inputs = asked.shape.split("x")
    shape = (int(outputs), int(inputs))
    counts = [int(count) for count in asked.rows.split(",")]
    if asked.cached:
        torch.set_num_threads(1)
        print(f"1 thread, load {os.getloadavg()[0]:.1f}, {_CACHED[0]}x{_CACHED[1]}")
        for name in asked.sets.split(","):
            print(cached_table(name, asked.formats.split(","), counts, asked.rounds))
        return
    bandwidth = read_bandwidth(torch.device("cpu"))
    print(
        f"{torch.get_num_threads()} threads, {bandwidth / 1e9:.1f} GB/s read, load {os.getloadavg()[0]:.1f}, {asked.shape}"
    )
    for name in asked.sets.split(","):
        times = measured(name, asked.formats.split(","), shape, counts, asked.rounds)
        print(table(name, times, counts, bandwidth))


@dataclass
class Times:
    """What products with weights of one format take.

    Attributes:
        nbytes: The bytes of a matrix.
        seconds: Of a product with weights from memory, by its rows.
        pace: Seconds of a row of such a product, where many rows meet weights from the cache.
    """

    nbytes: int
    seconds: dict[int, float]
    pace: float


def measured(
    instruction_set: str, formats: Sequence[str], shape: tuple[int, int], counts: Sequence[int], rounds: int
) -> dict[str, Times]:
    """By format, what products take."""
    library = kernels_for(instruction_set)
    weight = torch.randn(shape).bfloat16()
    found: dict[str, list[PackedWeights]] = {}
    small: dict[str, PackedWeights] = {}
    for name in formats:
        stored = _stored(name, weight)
        first = PackedWeights(library, stored)
        found[name] = [first, *(PackedWeights(library, stored) for _ in range(_BEYOND_CACHES // first.nbytes))]
        small[name] = PackedWeights(library, _stored(name, weight[:_SMALL, :_SMALL]))
    seconds: dict[tuple[str, int], list[float]] = {}
    paces: dict[str, list[float]] = {}
    for _ in range(rounds):
        for count in counts:
            for name, matrices in found.items():
                seconds.setdefault((name, count), []).append(_time(library, matrices, torch.randn(count, shape[1])))
        for name, matrix in small.items():
            taken = _time(library, [matrix] * 20, torch.randn(_MANY, _SMALL))
            paces.setdefault(name, []).append(taken / _MANY * shape[0] * shape[1] / _SMALL**2)
    return {
        name: Times(matrices[0].nbytes, {n: median(seconds[name, n]) for n in counts}, min(paces[name]))
        for name, matrices in found.items()
    }


def _stored(name: str, weight: torch.Tensor) -> StoredWeight:
    if name == "bfloat16":
        return plain(weight)
    known, rounds_rows = name.removesuffix("+a8"), name.endswith("+a8")
    if known in GGUF_TYPES:
        drawn = _drawn_blocks(known, weight.shape)
        return replace(drawn, format=replace(drawn.format, rounds_rows=rounds_rows))
    return replace(FORMATS[known], rounds_rows=rounds_rows).store(weight)


def _drawn_blocks(name: str, shape: torch.Size) -> StoredWeight:
    """Blocks of a type of GGUF files whose bits are random, with scales of one."""
    empty = GGUF_TYPES[name].format.empty(torch.bfloat16, *shape)
    scale = None if empty.scale is None else torch.ones_like(empty.scale)
    return replace(empty, data=torch.randint_like(empty.data, 256), scale=scale)


def _time(library: KernelLibrary, matrices: Sequence[PackedWeights], rows: torch.Tensor) -> float:
    """Seconds of a product. Room for it is made before the clock starts."""
    count, threads = ctypes.c_int64(len(rows)), ctypes.c_int64(library.num_threads)
    struct = ctypes.byref(matrices[0].struct)
    size = library.function("linear_scratch_size", rows.dtype, ctypes.c_int64)(struct, count, threads)
    room = rows.new_empty(len(rows), matrices[0].width), rows.new_empty(size)
    x, y, scratch = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, *room))
    forward, calls = library.function("linear_forward", rows.dtype), [ctypes.byref(each.struct) for each in matrices]
    start = time.perf_counter()
    for weights in calls:
        forward(weights, x, y, count, scratch, threads)
    return (time.perf_counter() - start) / len(matrices)


def cached_table(instruction_set: str, formats: Sequence[str], counts: Sequence[int], rounds: int) -> str:
    """A table in Markdown of microseconds, with weights from the cache."""
    library = kernels_for(instruction_set)
    weight = torch.randn(_CACHED).bfloat16()
    packed = {name: PackedWeights(library, _stored(name, weight)) for name in formats}
    least: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for name, matrix in packed.items():
            for n in counts:
                taken = _time(library, [matrix] * 10, torch.randn(n, _CACHED[1]))
                least[name, n] = min(taken, least.get((name, n), taken))
    lines = [f"| {instruction_set} | KB |" + "".join(f" n={n} |" for n in counts), "|---|---|" + "---|" * len(counts)]
    for name, matrix in packed.items():
        lines.append(f"| {name} | {matrix.nbytes // 1024} |" + "".join(f" {least[name, n] * 1e6:.1f} |" for n in counts))
    return "\n".join(lines)


def table(instruction_set: str, times: dict[str, Times], counts: Sequence[int], bandwidth: float) -> str:
    """A table in Markdown."""
    few = counts[0]
    heads = "".join(f" C({count}), F |" for count in counts[1:])
    lines = [f"| {instruction_set} | bytes, MB | T({few}), ms | share of bandwidth |{heads}"]
    lines.append("|---|---|---|---|" + "---|" * (len(counts) - 1))
    for name, taken in times.items():
        first = taken.seconds[few]
        costs = "".join(f" {taken.seconds[n] / first:.2f}, {n * taken.pace / first:.2f} |" for n in counts[1:])
        share = taken.nbytes / bandwidth / first
        lines.append(f"| {name} | {taken.nbytes / 1e6:.1f} | {first * 1e3:.3f} | {share:.0%} |{costs}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

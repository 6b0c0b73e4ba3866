"""What rows cost in products with weights of every format: T(n) over the time of the bytes, and C(n) = T(n) / T(1).

    python -m benchmarks.row_products --sets avx512bf16,avx2 --formats bfloat16,int8,int4-g32 --rows 1,2,4,8,16

Weights come from memory: products go through several matrices in turn, which together are larger than the caches.
Formats and numbers of rows take turns within a round, and each figure is the median of the rounds. The model is bf16, so
that rows enter products in pairs where the processor multiplies these.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from statistics import median

import torch

from outrider.kernels.formats.registry import FORMATS, plain
from outrider.kernels.library import available_sets, kernels_for
from outrider.kernels.packed import PackedWeights, product
from outrider.measure.machine import read_bandwidth

USUAL = ("bfloat16", "int8", "int8-g128", "int4-g128", "int4-g32", "int4-g32-asym")
#: Together, the matrices of a format take at least so many bytes.
_BEYOND_CACHES = 128 * 2**20


def main() -> None:
    """Measure, and print a table for each instruction set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(available_sets()[-1:]))
    parser.add_argument("--formats", default=",".join(USUAL))
    parser.add_argument("--rows", default="1,2,4,5,8,12,16,32")
    parser.add_argument("--shape", default="8192x2048", help="outputs x inputs")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    shape = tuple(int(size) for size in asked.shape.split("x"))
    counts = [int(count) for count in asked.rows.split(",")]
    bandwidth = read_bandwidth(torch.device("cpu"))
    print(
        f"{torch.get_num_threads()} threads, {bandwidth / 1e9:.1f} GB/s read, load {os.getloadavg()[0]:.1f}, {asked.shape}"
    )
    for name in asked.sets.split(","):
        times = measured(name, asked.formats.split(","), shape, counts, asked.rounds)
        print(table(name, times, counts, bandwidth))


def measured(
    instruction_set: str, formats: Sequence[str], shape: tuple[int, ...], counts: Sequence[int], rounds: int
) -> dict[str, tuple[int, dict[int, float]]]:
    """By format: the bytes of a matrix, and the seconds of a product by its rows."""
    library = kernels_for(instruction_set)
    weight = torch.randn(shape).bfloat16()
    found: dict[str, list[PackedWeights]] = {}
    for name in formats:
        stored = plain(weight) if name == "bfloat16" else FORMATS[name].store(weight)
        first = PackedWeights(library, stored)
        found[name] = [first, *(PackedWeights(library, stored) for _ in range(_BEYOND_CACHES // first.nbytes))]
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for count in counts:
            for name, matrices in found.items():
                rows = torch.randn(count, shape[1])
                start = time.perf_counter()
                for matrix in matrices:
                    product(library, matrix.struct, rows)
                seconds.setdefault((name, count), []).append((time.perf_counter() - start) / len(matrices))
    return {
        name: (matrices[0].nbytes, {count: median(seconds[name, count]) for count in counts})
        for name, matrices in found.items()
    }


def table(
    instruction_set: str, times: dict[str, tuple[int, dict[int, float]]], counts: Sequence[int], bandwidth: float
) -> str:
    """A table in Markdown."""
    few = counts[0]
    heads = [f"| {instruction_set} | bytes, MB | T({few}), ms | share of bandwidth |"]
    lines = [*heads, "|---|---|---|---|" + "---|" * (len(counts) - 1)]
    lines[0] += "".join(f" C({count}) |" for count in counts[1:])
    for name, (size, by_count) in times.items():
        first = by_count[few]
        costs = "".join(f" {by_count[count] / first:.2f} |" for count in counts[1:])
        lines.append(f"| {name} | {size / 1e6:.1f} | {first * 1e3:.3f} | {size / bandwidth / first:.0%} |{costs}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Prints digests of products of rows in 8 bits, by the format of the weights: the same on every kind of processor."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace

import numpy as np
import torch

from outrider.kernels.formats import FORMATS
from outrider.kernels.library import available_sets, kernels_for
from outrider.kernels.packed import PackedWeights, product

NAMES = ("int8", "int8-g32", "int8-g128", "int4-g32", "int4-g128", "int4-g128-asym")


def numbers(chance: np.random.Generator, rows: int, cols: int) -> torch.Tensor:
    """Rows of very different sizes, drawn without functions that systems compute differently."""
    fractions = chance.random((rows, cols), np.float32) - np.float32(0.5)
    return torch.from_numpy(np.ldexp(fractions, chance.integers(-9, 9, (rows, 1), np.int32)))


def digests(name: str, cols: int) -> set[str]:
    """A digest of products with 1, 2, 3, 7, 13 and 40 rows for each instruction set of this processor."""
    chance, found = np.random.default_rng(cols), set()
    weight, rows = numbers(chance, 70, cols), numbers(chance, 40, cols)
    stored = replace(FORMATS[name], rounds_rows=True).store(weight)
    for instruction_set in available_sets():
        library, digest = kernels_for(instruction_set), hashlib.sha256()
        packed = PackedWeights(library, stored, torch.linspace(-1, 1, 70))
        for count in (1, 2, 3, 7, 13, 40):
            digest.update(product(library, packed.struct, rows[:count])[:, :70].contiguous().numpy().tobytes())
        found.add(digest.hexdigest())
    return found


def main() -> None:
    for name in NAMES:
        for cols in (128, 640, 2176):
            sys.stdout.write(f"{name} {cols} {' '.join(digests(name, cols))}\n")


if __name__ == "__main__":
    main()

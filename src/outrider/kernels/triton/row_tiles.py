"""The rows of a pass as the kernel of attention reads them: in tiles of rows of one sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.decoder import PassRows

#: Each part begins at a multiple of 16 bytes. Triton compiles a kernel anew for pointers that do and for those that do not.
ALIGNED = 4


@dataclass(frozen=True)
class RowTiles:
    """Rows of a pass on a device. All numbers are int32, and all tensors are parts of one, which is copied once.

    Attributes:
        tiles: [num_tiles, 4] a tile's first row, how many rows it has, the tokens before the rows of its sequence, and
            where the block table of the sequence begins.
        positions: [num_rows]
        path_at: [num_rows] where the path of a tree's row begins in `paths`; -1 for rows of a chain.
        paths: For each row of a tree the rows of its sequence from its root to itself, by number within the sequence.
        tables: The block tables, one after another.
        spans: (first, end) rows of each tile.
        longest: The number of positions of the longest text.
        has_trees: Whether some rows are of a tree.
        block_size: Tokens a block.
    """

    tiles: Tensor
    positions: Tensor
    path_at: Tensor
    paths: Tensor
    tables: Tensor
    spans: list[tuple[int, int]]
    longest: int
    has_trees: bool
    block_size: int

    @classmethod
    def of(cls, rows: PassRows, rows_at_once: int, device: torch.device) -> RowTiles:
        """Tiles of at most `rows_at_once` rows each."""
        path_at, paths = _paths(rows)
        numbers = [
            (first, min(rows_at_once, rows.first[segment + 1] - first), rows.start[segment], rows.table_at[segment])
            for segment in range(len(rows.start))
            for first in range(rows.first[segment], rows.first[segment + 1], rows_at_once)
        ]
        parts = [np.asarray(part, np.int32).reshape(-1) for part in (numbers, rows.positions, path_at, paths, rows.tables)]
        begins = [0, *accumulate(-(-len(part) // ALIGNED) * ALIGNED for part in parts)]
        together = np.zeros(begins[-1], np.int32)
        for begin, part in zip(begins, parts, strict=False):
            together[begin : begin + len(part)] = part
        there = torch.from_numpy(together).to(device)
        tiles, positions, on_paths, all_paths, tables = [
            there[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=False)
        ]
        longest = max(rows.positions, default=-1) + 1
        spans = [(first, first + count) for first, count, _, _ in numbers]
        return cls(
            tiles=tiles.view(-1, 4),
            positions=positions,
            path_at=on_paths,
            paths=all_paths,
            tables=tables,
            spans=spans,
            longest=longest,
            has_trees=bool(paths),
            block_size=rows.block_size,
        )

    def turns(self, most_rows: int) -> Iterator[tuple[int, int]]:
        """(first, end) tiles that hold at most so many rows together, or one tile."""
        begin = 0
        for tile, (_, end_row) in enumerate(self.spans):
            if end_row - self.spans[begin][0] > most_rows and tile > begin:
                yield begin, tile
                begin = tile
        if self.spans:
            yield begin, len(self.spans)


def _paths(rows: PassRows) -> tuple[list[int], list[int]]:
    path_at, paths = [-1] * len(rows.positions), list[int]()
    for segment, at in enumerate(rows.ancestry_at):
        if at < 0:
            continue
        first, end = rows.first[segment], rows.first[segment + 1]
        sees = rows.ancestry[at : at + (end - first) ** 2].reshape(end - first, end - first)
        for row in range(end - first):  # ancestors come before their descendants, so they are in the order of positions
            path_at[first + row] = len(paths)
            paths += np.flatnonzero(sees[row]).tolist()
    return path_at, paths

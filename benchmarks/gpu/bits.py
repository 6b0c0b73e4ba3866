"""Whether the bits of a row depend on what else attends, on a GPU: other rows, other texts, chunks, turns, a tree."""

from __future__ import annotations

from typing import Any

import torch
from tests.unit.interpreted import even_products
from torch import Tensor

from benchmarks.gpu.kernels import BLOCKS, SEGMENTS, WAYS, attended, inputs, kinds
from benchmarks.gpu.record import Record
from outrider.kernels.triton import attention
from outrider.kernels.triton.attention import SPLIT
from outrider.model.batch import Segment

#: Rows of a text that crosses the border of a split, and where they begin.
ROWS, START = 40, SPLIT - 20


def bits(record: Record, device: torch.device) -> None:
    with even_products():
        for dtype in kinds(device):
            for name in ("llama", "small heads", "wide heads"):
                for what in (chain, tree):
                    step = f"{what.__name__}, {name}, {dtype}"
                    record.step(step, lambda what=what, name=name, dtype=dtype: what(name, dtype, device))


def chain(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """How many rows have the bits that they have in one pass over all of them."""
    kv_heads, group, dim, reach, softcap, _ = WAYS[name]
    others = sum(segment.num_rows for segment in SEGMENTS)
    query, keys, values, _ = inputs(kv_heads, group, dim, dtype, ROWS + others, device)
    how: dict[str, Any] = {"window": reach.window or 0, "chunk": reach.chunk or 0, "softcap": softcap, "scale": 0.3}
    table = BLOCKS[200:260]

    def rows(first: int, end: int) -> Tensor:
        segment = Segment([0] * (end - first), START + first, table)
        return attended((segment,), query[first:end], keys, values, **how)

    whole = rows(0, ROWS)
    beside = attended(
        (*SEGMENTS, Segment([0] * ROWS, START, table)),
        query[[*range(ROWS, ROWS + others), *range(ROWS)]],
        keys,
        values,
        **how,
    )
    before, attention.FOUND_BYTES = attention.FOUND_BYTES, 1
    try:
        in_turns = rows(0, ROWS)
    finally:
        attention.FOUND_BYTES = before
    found = {
        "again": same(rows(0, ROWS), whole),
        "one by one": same(torch.cat([rows(i, i + 1) for i in range(ROWS)]), whole),
        "in chunks of 7": same(torch.cat([rows(i, min(i + 7, ROWS)) for i in range(0, ROWS, 7)]), whole),
        "behind other texts": same(beside[others:], whole),
        "tile by tile": same(in_turns, whole),
    }
    return {"right": set(found.values()) == {ROWS}, "of": ROWS, **found}


def tree(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """How many rows of two paths, which take turns in a tree, have the bits of the same rows in a chain."""
    kv_heads, group, dim, reach, softcap, _ = WAYS[name]
    start, depth = SPLIT - 3, 6
    parents: list[int] = []
    own: tuple[list[int], list[int]] = ([], [])
    for level in range(depth):
        for path in own:
            parent = path[-1] if level else -1
            path.append(len(parents))
            parents += [parent, parent]  # with a leaf beside it that nobody sees
    query, keys, values, _ = inputs(kv_heads, group, dim, dtype, len(parents), device)
    how: dict[str, Any] = {"window": reach.window or 0, "chunk": reach.chunk or 0, "softcap": softcap, "scale": 0.3}
    segment = Segment([0] * len(parents), start, BLOCKS[:40], tuple(parents))
    slots = torch.from_numpy(segment.row_slots(16)).to(device)
    got = attended((segment,), query, keys, values, **how)
    found = {}
    for number, path in enumerate(own):
        memory = [each.clone() for each in (keys, values)]
        for copy, each in zip(memory, (keys, values), strict=True):
            copy[slots[:depth]] = each[slots[path]]
        alone = attended((Segment([0] * depth, start, BLOCKS[:40]),), query[path], *memory, **how)
        found[f"path {number}"] = same(got[path], alone)
    return {"right": set(found.values()) == {depth}, "of": depth, **found}


def same(got: Tensor, want: Tensor) -> int:
    """How many rows are equal in every bit."""
    return int((got == want).flatten(1).all(1).sum())

"""Attention for GPUs, run by Triton's interpreter, beside its definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from outrider.cache.pool import LayerReach
from outrider.kernels.triton import attention
from outrider.kernels.triton.attention import SPLIT, TILE, RowTiles, TritonAttention, write_rows
from outrider.model.attention import pass_rows
from outrider.model.batch import RaggedBatch, Segment
from tests.unit.interpreted import DEVICE, even_products
from tests.unit.test_attention_kernel import BLOCK, defined

CPU = torch.device("cpu")
TREE = (-1, 0, 0, 1, 2, 2, 4, 3, -1, 8)
BLOCKS = [(7 * i + 3) % 256 for i in range(256)]  # no two neighbours lie side by side
#: A chunk over the border of a split, a row at the first position of one, a tree over a border, a prompt's beginning.
SEGMENTS = (
    Segment([0] * 9, SPLIT - 4, BLOCKS[:66]),
    Segment([0], SPLIT, BLOCKS[66:131]),
    Segment([0] * len(TREE), TILE - 3, BLOCKS[131:149], TREE),
    Segment([0] * 5, 0, BLOCKS[149:151]),
)
#: Key-value heads, query heads of each, width, dtype, reach, bound of scores, whether there are sinks.
WAYS: tuple[tuple[int, int, int, torch.dtype, LayerReach, float | None, bool], ...] = (
    (1, 4, 72, torch.float32, LayerReach(), 1.5, True),
    (2, 3, 64, torch.float16, LayerReach(window=TILE), None, False),
    (1, 1, 200, torch.float32, LayerReach(chunk=24), None, True),
    (1, 5, 16, torch.float32, LayerReach(window=3), 0.7, False),
)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3}


def inputs(kv_heads: int, group: int, dim: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(dim)
    query = torch.randn(rows, kv_heads * group, dim)
    keys, values = torch.randn(2, 256 * BLOCK, kv_heads, dim)
    sinks = torch.randn(kv_heads * group)
    return query.to(dtype), keys.to(dtype), values.to(dtype), sinks.to(dtype)


def attended(segments: tuple[Segment, ...], query: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Tensor:
    taken = TritonAttention(pass_rows(RaggedBatch(segments, BLOCK, CPU)), DEVICE)
    assert taken.takes(query, keys, values)
    there = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in how.items()}
    with even_products():
        moved = (rows.to(DEVICE) for rows in (query, keys, values))
        return taken.attend(*moved, **{"window": 0, "chunk": 0, "scale": 0.3, **there}).cpu()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[2]} numbers, {way[3]}")
def test_every_row_attends_to_what_it_sees(
    way: tuple[int, int, int, torch.dtype, LayerReach, float | None, bool],
) -> None:
    kv_heads, group, dim, dtype, reach, softcap, with_sinks = way
    query, keys, values, logits = inputs(kv_heads, group, dim, dtype, sum(s.num_rows for s in SEGMENTS))
    how = {"window": reach.window or 0, "chunk": reach.chunk or 0, "softcap": softcap}
    got = attended(SEGMENTS, query, keys, values, **how, sinks=logits if with_sinks else None)
    assert got.dtype == dtype
    end, wide = 0, (keys.double(), values.double(), softcap, logits.double() if with_sinks else None)
    for segment in SEGMENTS:
        first, end = end, end + segment.num_rows
        want = defined(segment, reach, query[first:end].double(), *wide, 0.3)
        assert torch.allclose(got[first:end].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_bits_of_a_row_do_not_depend_on_what_else_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values, sinks = inputs(1, 3, 32, torch.float32, sum(s.num_rows for s in SEGMENTS))
    how: dict[str, Any] = {"window": 100, "sinks": sinks}
    whole = attended(SEGMENTS, query, keys, values, **how)
    end = 0
    for segment in SEGMENTS:
        first, end = end, end + segment.num_rows
        if segment.parents is None:  # its last row alone, as a step without a draft computes it
            segment, first = Segment([0], segment.start + segment.num_rows - 1, segment.block_table), end - 1
        assert torch.equal(attended((segment,), query[first:end], keys, values, **how), whole[first:end])
    monkeypatch.setattr(attention, "FOUND_BYTES", 1)  # rows attend tile by tile
    assert torch.equal(attended(SEGMENTS, query, keys, values, **how), whole)


def test_a_tree_has_the_bits_of_its_paths() -> None:
    """Two paths in turn, with leaves beside them that are no numbers: nobody but themselves may notice."""
    start, depth, parents, own = SPLIT - 3, 6, [], ([], [])
    for level in range(depth):
        for path in range(2):
            parent = own[path][-1] if level else -1
            own[path].append(len(parents))
            parents += [parent, parent]
    query, keys, values, _ = inputs(1, 2, 32, torch.float32, len(parents))
    segment = Segment([0] * len(parents), start, BLOCKS, tuple(parents))
    slots = torch.from_numpy(segment.row_slots(BLOCK))
    keys[slots[1::2]] = values[slots[1::2]] = float("nan")
    got = attended((segment,), query, keys, values)
    assert got[1::2].isnan().all()
    for path in own:
        chain = [other.clone() for other in (keys, values)]
        for memory, of in zip(chain, (keys, values), strict=True):
            memory[slots[:depth]] = of[slots[path]]
        assert torch.equal(attended((Segment([0] * depth, start, BLOCKS),), query[path], *chain), got[path])


def test_what_a_row_does_not_see_may_be_infinite() -> None:
    query, keys, values, _ = inputs(1, 2, 32, torch.float32, 40)
    segment = Segment([0] * 40, 0, BLOCKS)
    slots = torch.from_numpy(segment.row_slots(BLOCK))
    want = attended((segment,), query, keys, values, window=10)
    values[slots[17]] = float("inf")
    values[slots[17], :, 0] = float("nan")
    got = attended((segment,), query, keys, values, window=10)
    assert got[17:27].isnan().all()
    assert torch.equal(torch.cat([got[:17], got[27:]]), torch.cat([want[:17], want[27:]]))


@pytest.mark.parametrize("count", range(1, 6))
def test_rows_begin_where_no_kernel_is_compiled_anew(count: int) -> None:
    """Triton compiles a kernel for pointers that are multiples of 16 bytes, and once more for others."""
    segments = (
        Segment([0] * count, count, BLOCKS[:count]),
        Segment([0] * count, 1, BLOCKS[20:23], (-1, *range(count - 1))),
    )
    tiles = RowTiles.of(pass_rows(RaggedBatch(segments, BLOCK, CPU)), 2, CPU)
    parts = (tiles.tiles, tiles.positions, tiles.path_at, tiles.paths, tiles.tables)
    assert [part.storage_offset() * part.element_size() % 16 for part in parts] == [0] * 5
    assert tiles.positions.tolist() == [*range(count, 2 * count), *range(1, 1 + count)]
    assert tiles.tables.tolist() == [*BLOCKS[:count], *BLOCKS[20:23]]


def test_keys_and_values_go_to_their_slots() -> None:
    keys, values = torch.randn(3, 5, 6).transpose(0, 1), torch.randn(5, 3, 4)  # as a model and latent attention have them
    key_memory, value_memory = torch.zeros(20, 3, 6, device=DEVICE), torch.zeros(20, 3, 4, device=DEVICE)
    slots = torch.tensor([7, 0, 19, 3, 8])
    write_rows(keys.to(DEVICE), values.to(DEVICE), key_memory, value_memory, slots.to(DEVICE))
    assert torch.equal(key_memory.cpu(), torch.zeros(20, 3, 6).index_copy_(0, slots, keys))
    assert torch.equal(value_memory.cpu(), torch.zeros(20, 3, 4).index_copy_(0, slots, values))


def test_what_the_kernel_does_not_take_is_told() -> None:
    taken = TritonAttention(pass_rows(RaggedBatch(SEGMENTS, BLOCK, CPU)), CPU)
    rows = torch.zeros(2, 4, 32)
    assert taken.takes(rows, rows[:, :2], rows[:, :2])
    assert not taken.takes(rows, rows[:, :2], rows[:, :2, :8]), "values of another width"
    assert not taken.takes(rows.double(), rows.double(), rows.double())
    assert not taken.takes(*[torch.zeros(2, 4, 320)] * 3), "heads that are too wide"
    assert not taken.takes(torch.zeros(2, 33, 8), rows[:, :1, :8], rows[:, :1, :8]), "too many queries for a key-value head"

"""Attention in our kernels beside its definition: scattered blocks, trees, windows, shared heads, soft caps and sinks."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.cache.pool import LayerReach
from outrider.kernels.attention import PassAttention
from outrider.kernels.library import available_sets, kernels_for
from outrider.model.attention import pass_rows
from outrider.model.batch import RaggedBatch, Segment
from outrider.model.context import visible
from tests.kernel_sets import instruction_sets

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")

BLOCK = 4
TREE = (-1, 0, 0, 1, 2, 2, 4, 3, -1, 8)
#: A chunk of a prompt, a row behind a long context, a tree, a prompt's beginning; no block table is in order.
SEGMENTS = (
    Segment([0] * 11, 30, [7, 3, 22, 1, 9, 30, 12, 5, 17, 2, 28]),
    Segment([0], 70, [41, 40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 60, 61, 62, 63, 64, 66, 65]),
    Segment([0] * len(TREE), 21, [50, 48, 52, 46, 54, 44, 56, 57], TREE),
    Segment([0] * 9, 0, [10, 14, 11]),
)
REACHES = (LayerReach(), LayerReach(window=6), LayerReach(window=1), LayerReach(chunk=8))
WAYS: tuple[dict[str, Any], ...] = ({}, {"softcap": 1.5}, {"sinks": True}, {"softcap": 0.7, "sinks": True})


def defined(
    segment: Segment,
    reach: LayerReach,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """[num_rows, num_heads, dim], row by row and head by head."""
    batch = RaggedBatch([segment], BLOCK, torch.device("cpu"))
    slots = batch.context_slots[0]
    assert not isinstance(slots, slice), "no run of slots, or the table would not matter"
    out = torch.empty_like(query)
    for row, seen in enumerate(visible(segment, reach)):
        for head in range(query.shape[1]):
            shared = head // (query.shape[1] // keys.shape[1])
            scores = keys[slots[seen], shared] @ query[row, head] * scale
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            scores = scores if sinks is None else torch.cat([scores, sinks[head : head + 1]])
            out[row, head] = scores.softmax(0)[: int(seen.sum())] @ values[slots[seen], shared]
    return out


def inputs(kv_heads: int, group: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(kv_heads + 10 * group + dim)
    rows = sum(segment.num_rows for segment in SEGMENTS)
    query = 2 * torch.randn(rows, kv_heads * group, dim, dtype=torch.float64)
    keys, values = torch.randn(2, 70 * BLOCK, kv_heads, dim, dtype=torch.float64)
    return query.to(dtype), keys.to(dtype), values.to(dtype), torch.randn(kv_heads * group, dtype=torch.float64).to(dtype)


def attended(instruction_set: str, segments: tuple[Segment, ...], query: Tensor, *memory: Tensor, **how: Any) -> Tensor:
    batch = RaggedBatch(segments, BLOCK, torch.device("cpu"))
    return PassAttention(kernels_for(instruction_set), pass_rows(batch)).attend(query, *memory, **how)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "+".join(way) or "plain")
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 3, 5), (3, 1, 16), (1, 4, 72), (5, 3, 16)])
def test_every_row_attends_to_what_it_sees(
    instruction_set: str, way: dict[str, Any], kv_heads: int, group: int, dim: int
) -> None:
    query, keys, values, logits = inputs(kv_heads, group, dim, torch.float64)
    softcap, sinks = way.get("softcap"), logits if "sinks" in way else None
    for reach in REACHES:
        how = {"window": reach.window or 0, "chunk": reach.chunk or 0, "scale": 0.3, "softcap": softcap, "sinks": sinks}
        got = attended(instruction_set, SEGMENTS, query, keys, values, **how)
        end = 0
        for segment in SEGMENTS:
            first, end = end, end + segment.num_rows
            want = defined(segment, reach, query[first:end], keys, values, softcap, sinks, 0.3)
            assert torch.allclose(got[first:end], want, rtol=1e-12, atol=1e-13), (segment.start, reach)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_narrow_types_differ_by_rounding(dtype: torch.dtype, tolerance: float) -> None:
    query, keys, values, sinks = inputs(2, 2, 24, dtype)
    how = {"window": 0, "chunk": 0, "scale": 0.2, "softcap": 3.0}
    got = attended(available_sets()[-1], SEGMENTS, query, keys, values, **how, sinks=sinks)
    assert got.dtype == dtype
    wide = attended(
        available_sets()[-1], SEGMENTS, query.double(), keys.double(), values.double(), **how, sinks=sinks.double()
    )
    torch.testing.assert_close(got.double(), wide, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_what_else_attends(dtype: torch.dtype) -> None:
    query, keys, values, sinks = inputs(2, 2, 24, dtype)
    how = {"window": 7, "chunk": 0, "scale": 0.2, "softcap": 3.0, "sinks": sinks}
    whole = attended(available_sets()[-1], SEGMENTS, query, keys, values, **how)
    end = 0
    for segment in SEGMENTS:
        first, end = end, end + segment.num_rows
        alone = attended(available_sets()[-1], (segment,), query[first:end], keys, values, **how)
        assert torch.equal(alone, whole[first:end])
        if segment.parents is None:
            last = Segment([0], segment.start + segment.num_rows - 1, segment.block_table)
            assert torch.equal(
                attended(available_sets()[-1], (last,), query[end - 1 : end], keys, values, **how), whole[end - 1 : end]
            )


@pytest.mark.skipif("avx512bf16" not in available_sets(), reason="no instruction for pairs that could be taken apart")
@pytest.mark.parametrize(("group", "dim"), [(1, 5), (3, 24), (4, 72), (13, 64)])
def test_pairs_that_are_taken_apart_have_the_bits_of_the_instruction(group: int, dim: int) -> None:
    query, keys, values, _ = inputs(2, group, dim, torch.bfloat16)
    query[..., 0] *= 1e-38  # numbers that the instruction takes for 0
    values[..., 0] *= 1e-38  # in all places, since they vanish beside others
    apart = ctypes.c_int.in_dll(kernels_for("avx512bf16")._library, "outrider_pairs_apart")
    before, got = apart.value, []
    for apart.value in (0, 1):
        got.append(
            attended("avx512bf16", SEGMENTS, query, keys, values, window=0, chunk=0, scale=0.3, softcap=None, sinks=None)
        )
    apart.value = before
    assert torch.equal(*got)


def test_what_the_kernels_do_not_take_is_told() -> None:
    can_attend = PassAttention(
        kernels_for(available_sets()[0]), pass_rows(RaggedBatch(SEGMENTS, BLOCK, torch.device("cpu")))
    ).takes
    rows = torch.zeros(2, 3, 8)
    assert can_attend(rows, rows, rows)
    assert can_attend(rows.bfloat16(), rows.bfloat16(), rows.bfloat16())
    assert not can_attend(rows, rows, rows[..., :4]), "values of another width"
    assert not can_attend(rows, rows.double(), rows.double())
    assert not can_attend(rows.half(), rows.half(), rows.half())
    assert not can_attend(rows.to("meta"), rows.to("meta"), rows.to("meta"))

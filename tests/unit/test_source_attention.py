"""Attention with biases by distance, and attention to sources, in our kernels beside the same sums in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.cache.state import SourceState
from outrider.kernels.attention import PassAttention
from outrider.kernels.library import available_sets, kernels_for
from outrider.model.attention import pass_rows, source_rows
from outrider.model.batch import RaggedBatch, Segment

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
HEADS, KV_HEADS, DIM, SLOTS, BLOCK = 4, 2, 24, 2048, 8
#: Two rows of different depths behind a context of two runs, with siblings; and rows of texts that have just begun.
SEGMENTS = (
    Segment([0] * 5, 290, range(40), (-1, 0, 0, 2, 1)),
    Segment([0] * 3, 0, range(50, 51)),
    Segment([0] * 7, 509, range(60, 125)),
)
SOURCE_LENGTHS = (1, 256, 530)
#: Fewer distances than the context has, so that the last one holds for most.
BIASES = torch.randn(HEADS, 21, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
KINDS = [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 4e-2)]


def drawn(dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of rows, and keys and values of all slots."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(num_rows, HEADS, DIM, generator=generator)
    keys, values = torch.randn(2, SLOTS, KV_HEADS, DIM, generator=generator)
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def sums(query: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], added: Tensor | None) -> Tensor:
    """[HEADS, DIM] what one row finds in some slots, in float64, with biases [HEADS, num_slots]."""
    group = HEADS // KV_HEADS
    k, v = (each[list(slots)].double().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query.double(), k) * 0.3
    weights = (scores if added is None else scores + added).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v)


def seen_slots(segment: Segment, row: int) -> list[int]:
    """The slots that a row sees, in the order of their positions."""
    own = [int(slot) for slot in segment.row_slots(BLOCK)[segment.ancestry[row]]]
    return [segment.block_table[i // BLOCK] * BLOCK + i % BLOCK for i in range(segment.start)] + own


def sources() -> list[SourceState]:
    """In blocks that lie behind those of the texts."""
    blocks = BlockManager(256, BLOCK)
    blocks.allocate(128)
    found = [SourceState(blocks, range(length)) for length in SOURCE_LENGTHS]
    for each in found:
        each.reserve()
    return found


@pytest.mark.parametrize("kernels", available_sets())
@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
def test_rows_get_the_biases_of_their_distances(kernels: str, dtype: torch.dtype, tolerance: float) -> None:
    batch = RaggedBatch(SEGMENTS, BLOCK, torch.device("cpu"))
    query, keys, values = drawn(dtype, batch.num_rows)
    attention = PassAttention(kernels_for(kernels), pass_rows(batch))
    got = attention.attend(query, keys, values, window=0, chunk=0, scale=0.3, biases=BIASES).double()
    for segment, (first, end) in zip(SEGMENTS, batch.row_spans, strict=True):
        for row in range(end - first):
            slots = seen_slots(segment, row)
            distances = torch.arange(len(slots) - 1, -1, -1).clamp_max(BIASES.shape[1] - 1)
            want = sums(query[first + row], keys, values, slots, BIASES[:, distances])
            assert (got[first + row] - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("kernels", available_sets())
@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
def test_rows_see_all_of_their_own_source(kernels: str, dtype: torch.dtype, tolerance: float) -> None:
    batch, of = RaggedBatch(SEGMENTS, BLOCK, torch.device("cpu")), sources()
    query, keys, values = drawn(dtype, batch.num_rows)
    attention = PassAttention(kernels_for(kernels), source_rows(pass_rows(batch), of), of_sources=True)
    got = attention.attend(query, keys, values, window=0, chunk=0, scale=0.3).double()
    for source, (first, end) in zip(of, batch.row_spans, strict=True):
        slots = [source.block_table[i // BLOCK] * BLOCK + i % BLOCK for i in range(len(source.token_ids))]
        for row in range(first, end):
            want = sums(query[row], keys, values, slots, None)
            assert (got[row] - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("kernels", available_sets())
@pytest.mark.parametrize("to_source", [False, True])
def test_the_bits_of_a_row_are_its_own(kernels: str, to_source: bool) -> None:
    """Alone, and beside other rows of its text, of which there are so many that they no longer attend at once."""
    library, length = kernels_for(kernels), 60
    (source,) = [each for each in sources() if len(each.token_ids) == 530]
    query, keys, values = drawn(torch.bfloat16, length)

    def attended(first: int, end: int) -> Tensor:
        segment = Segment([0] * (end - first), 280 + first, range(60))
        rows = pass_rows(RaggedBatch([segment], BLOCK, torch.device("cpu")))
        rows = source_rows(rows, [source]) if to_source else replace(rows, sources=None)
        attention = PassAttention(library, rows, of_sources=to_source)
        biases = None if to_source else BIASES
        return attention.attend(query[first:end], keys, values, window=0, chunk=0, scale=0.3, biases=biases)

    together = attended(0, length)
    for row in (0, 17, 59):
        assert torch.equal(attended(row, row + 1)[0], together[row])
    assert torch.equal(attended(3, 8), together[3:8])

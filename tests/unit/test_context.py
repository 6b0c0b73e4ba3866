"""Who may see whom: windows, chunks and trees against a definition written token by token."""

from __future__ import annotations

import contextvars

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.pool import KVPool, LayerReach
from outrider.model.batch import RaggedBatch, Segment
from outrider.model.context import ForwardContext, additive, current_context, first_seen, forward_context, visible

CPU = torch.device("cpu")


def sees(segment: Segment, reach: LayerReach, row: int, column: int) -> bool:
    """Straight from the definition: the column lies on the row's own path, in its window and in its chunk."""

    def depth(r: int) -> int:
        parent = r - 1 if segment.parents is None else segment.parents[r]
        return 0 if parent < 0 else 1 + depth(parent)

    def on_path(r: int, ancestor: int) -> bool:
        while r > ancestor:
            r = r - 1 if segment.parents is None else segment.parents[r]
        return r == ancestor

    here = segment.start + depth(row)
    if column < segment.start:
        there, reachable = column, True
    else:
        there, reachable = segment.start + depth(column - segment.start), on_path(row, column - segment.start)
    if reach.window is not None:
        reachable = reachable and here - there < reach.window
    if reach.chunk is not None:
        reachable = reachable and here // reach.chunk == there // reach.chunk
    return reachable


@st.composite
def cases(draw: st.DrawFn) -> tuple[Segment, LayerReach]:
    num_rows, start = draw(st.integers(1, 6)), draw(st.integers(0, 10))
    parents = tuple(draw(st.integers(-1, row - 1)) for row in range(num_rows)) if draw(st.booleans()) else None
    reach = LayerReach(draw(st.none() | st.integers(1, 12)), draw(st.none() | st.integers(1, 6)))
    return Segment([0] * num_rows, start, range(20), parents), reach


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_visible_equals_the_definition(case: tuple[Segment, LayerReach]) -> None:
    segment, reach = case
    seen = visible(segment, reach)
    assert seen.shape == (segment.num_rows, segment.context_len)
    for row in range(segment.num_rows):
        for column in range(segment.context_len):
            assert seen[row, column] == sees(segment, reach, row, column), (row, column)
    assert seen[:, segment.start :].diagonal().all(), "a row sees itself"
    first = first_seen(segment, reach)
    assert not seen[:, :first].any()
    assert seen[0, first], "what comes before is all that nobody sees"
    assert torch.equal(visible(segment, reach, first), seen[:, first:])


def test_a_window_counts_the_row_itself() -> None:
    seen = visible(Segment([0], 5, range(9)), LayerReach(window=3))
    assert seen.int().tolist() == [[0, 0, 0, 1, 1, 1]]


def test_a_chunk_starts_anew() -> None:
    seen = visible(Segment([0, 0], 3, range(9)), LayerReach(chunk=4))
    assert seen.int().tolist() == [[1, 1, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_the_window_of_a_tree_row_follows_its_depth_and_not_its_slot() -> None:
    tree = Segment([0] * 4, 3, range(9), (-1, 0, 0, 0))  # three children at position 4
    seen = visible(tree, LayerReach(window=2))
    assert seen[3].int().tolist() == [0, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_additive_masks_add_nothing_or_minus_infinity(dtype: torch.dtype) -> None:
    mask = additive(torch.tensor([[True, False], [False, True]]), dtype)
    assert mask.dtype == dtype
    assert mask.tolist() == [[0.0, float("-inf")], [float("-inf"), 0.0]]


def _context(*reaches: LayerReach) -> ForwardContext:
    parts = [Segment([1], 4, range(9)), Segment([1, 2, 3], 2, range(9)), Segment([1, 2, 3], 0, range(9))]
    return ForwardContext(RaggedBatch(parts, 4, CPU), KVPool(4), list(reaches))


def test_a_single_row_needs_no_mask_and_reads_no_more_than_its_window() -> None:
    context = _context(LayerReach(), LayerReach(window=4), LayerReach(chunk=3))
    parts = [context.part(0, layer, torch.float32) for layer in range(3)]
    assert [part.mask for part in parts] == [None] * 3
    assert [part.slots for part in parts] == [slice(0, 5), slice(1, 5), slice(3, 5)]


def test_masks_differ_by_segment_reach_and_dtype_and_are_built_once() -> None:
    context = _context(LayerReach(), LayerReach(window=2), LayerReach())
    first = context.part(1, 0, torch.float32)
    assert context.part(1, 2, torch.float32) is first, "layers of one reach share it"
    assert context.part(1, 1, torch.float32) is not first
    wide = context.part(1, 0, torch.float64).mask
    assert wide is not None
    assert wide.dtype == torch.float64
    for index, layer in ((1, 0), (2, 0), (1, 1), (2, 1)):
        segment, reach = context.batch.segments[index], context.reaches[layer]
        mask = context.part(index, layer, torch.float32).mask
        assert mask is not None
        assert torch.equal(mask == 0, visible(segment, reach)[:, first_seen(segment, reach) :])


def test_causal_means_that_the_stock_flag_says_the_same_as_the_mask() -> None:
    context = _context(LayerReach(), LayerReach(window=2), LayerReach(window=3), LayerReach(chunk=2))
    causal = [[context.part(index, layer, torch.float32).causal for layer in range(4)] for index in range(3)]
    assert causal == [[False] * 4, [False] * 4, [True, False, True, False]]


def test_a_pass_is_current_only_inside_and_does_not_nest() -> None:
    context = _context(LayerReach())
    with pytest.raises(AssertionError, match="outside a forward pass"):
        current_context()
    with forward_context(context):
        assert current_context() is context
        with pytest.raises(AssertionError, match="nest"), forward_context(context):
            pass
        assert current_context() is context
    with pytest.raises(AssertionError, match="outside a forward pass"):
        current_context()


def test_a_pass_that_raises_leaves_no_context_behind() -> None:
    def failing() -> None:
        with pytest.raises(RuntimeError), forward_context(_context(LayerReach())):
            raise RuntimeError
        with pytest.raises(AssertionError):
            current_context()

    contextvars.copy_context().run(failing)

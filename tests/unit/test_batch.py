"""Ragged batches: positions, ancestry, slots and wanted logits against plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.model.batch import RaggedBatch, Segment, slots_of

CPU = torch.device("cpu")


@st.composite
def segments(draw: st.DrawFn, block_size: int = 4) -> Segment:
    num_rows = draw(st.integers(1, 7))
    start = draw(st.integers(0, 9))
    parents = None
    if draw(st.booleans()):
        parents = tuple(draw(st.integers(-1, row - 1)) for row in range(num_rows))
    needed = -(-(start + num_rows) // block_size)
    table = draw(st.lists(st.integers(0, 30), min_size=needed, max_size=needed + 2, unique=True))
    tokens = draw(st.lists(st.integers(0, 99), min_size=num_rows, max_size=num_rows))
    return Segment(tokens, start, table, parents, draw(st.integers(0, num_rows)))


def ancestors(segment: Segment, row: int) -> list[int]:
    """The row and those it descends from, nearest first."""
    line = [row]
    while (parent := row - 1 if segment.parents is None else segment.parents[row]) >= 0:
        line.append(parent)
        row = parent
    return line


@settings(max_examples=150, deadline=None, derandomize=True)
@given(segments())
def test_a_rows_position_is_its_depth_past_the_context(segment: Segment) -> None:
    expected = [segment.start + len(ancestors(segment, row)) - 1 for row in range(segment.num_rows)]
    assert segment.positions.tolist() == expected


@settings(max_examples=150, deadline=None, derandomize=True)
@given(segments())
def test_a_row_sees_itself_and_its_ancestors(segment: Segment) -> None:
    for row in range(segment.num_rows):
        assert sorted(ancestors(segment, row)) == np.flatnonzero(segment.ancestry[row]).tolist()


def test_a_tree_worked_by_hand() -> None:
    # last token 0; children 1 and 2; 3 under 1; 4 under 2; 5 under 4
    tree = Segment([9, 1, 2, 3, 4, 5], 10, [0, 1, 2, 3], (-1, 0, 0, 1, 2, 4))
    assert tree.positions.tolist() == [10, 11, 11, 12, 12, 13]
    assert tree.ancestry.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1, 1],
    ]


def test_a_chain_spelled_out_as_a_tree_is_the_same_chain() -> None:
    plain, spelled = Segment([1, 2, 3], 5, [0, 1]), Segment([1, 2, 3], 5, [0, 1], (-1, 0, 1))
    assert plain.positions.tolist() == spelled.positions.tolist()
    assert (plain.ancestry == spelled.ancestry).all()


@pytest.mark.parametrize("block_size", [1, 3, 4])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_slots_follow_the_block_table(block_size: int, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(0, 12))
    table = data.draw(st.permutations(range(20)))
    expected = [table[i // block_size] * block_size + i % block_size for i in range(num_tokens)]
    assert slots_of(table, num_tokens, block_size).tolist() == expected


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(segments(), min_size=1, max_size=5))
def test_segments_lie_end_to_end_with_nothing_between(parts: list[Segment]) -> None:
    batch = RaggedBatch(parts, 4, CPU)
    assert batch.num_rows == sum(s.num_rows for s in parts) == batch.input_ids.shape[1]
    assert batch.input_ids.shape == batch.position_ids.shape == (1, *batch.slot_mapping.shape)
    assert batch.input_ids[0].tolist() == [token for s in parts for token in s.token_ids]
    assert batch.position_ids[0].tolist() == [p for s in parts for p in s.positions]
    end = 0
    for segment, (first, last) in zip(parts, batch.row_spans, strict=True):
        assert first == end
        assert last - first == segment.num_rows
        end = last
    wanted = []
    for segment, (first, last), (a, b) in zip(parts, batch.row_spans, batch.logits_spans, strict=True):
        assert a == len(wanted)
        wanted += range(first + segment.logits_from, last)
        assert b == len(wanted)
    assert batch.logits_rows.tolist() == wanted
    for tensor in (batch.input_ids, batch.position_ids, batch.slot_mapping, batch.logits_rows):
        assert tensor.dtype == torch.int64


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(segments(), min_size=1, max_size=4))
def test_rows_are_written_where_the_context_is_read(parts: list[Segment]) -> None:
    batch = RaggedBatch(parts, 4, CPU)
    everything = torch.arange(200)
    for segment, slots, (first, last) in zip(parts, batch.context_slots, batch.row_spans, strict=True):
        read = everything[slots].tolist()
        assert read == slots_of(segment.block_table, segment.context_len, 4).tolist()
        assert read[segment.start :] == batch.slot_mapping[first:last].tolist(), "its own rows are the context's tail"


@pytest.mark.parametrize(
    ("table", "num_tokens", "expected"),
    [
        ([3, 4, 5], 10, slice(12, 22)),  # consecutive blocks: no copy is needed
        ([7], 2, slice(28, 30)),
        ([3, 5, 4], 10, None),
        ([3, 5], 8, None),
        ([5, 4], 8, None),
        ([3, 5], 4, slice(12, 16)),  # the second block is not reached
        ([1, 3, 2, 4], 16, None),  # first and last fit, the middle does not
    ],
)
def test_only_consecutive_slots_become_a_slice(table: list[int], num_tokens: int, expected: slice | None) -> None:
    (slots,) = RaggedBatch([Segment([0], num_tokens - 1, table)], 4, CPU).context_slots
    if expected is None:
        assert isinstance(slots, torch.Tensor)
    else:
        assert slots == expected


def test_a_segment_may_want_no_logits_at_all() -> None:
    batch = RaggedBatch([Segment([1, 2], 0, [0], logits_from=2), Segment([3], 4, [1, 2])], 4, CPU)
    assert batch.logits_spans == [(0, 0), (0, 1)]
    assert batch.logits_rows.tolist() == [2]
    none = RaggedBatch([Segment([1, 2], 0, [0], logits_from=2)], 4, CPU)
    assert none.logits_rows.shape == (0,)

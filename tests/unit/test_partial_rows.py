"""Which rows that were begun the target's own pass may take over, and which it must not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.state import KVView
from outrider.model.batch import Segment
from outrider.model.runner import PartialChain, PartialRows

TABLE = (3, 1, 4)


@pytest.fixture
def kv() -> KVView:
    return KVView(StateMemory(BlockManager(8, 4)).state())


@pytest.fixture
def rows() -> PartialRows:
    return PartialRows()


def segment(tokens: list[int], start: int, parents: tuple[int, ...] | None = None) -> Segment:
    return Segment(tokens, start, TABLE, parents)


def states(*values: float) -> Tensor:
    return torch.tensor(values)[:, None].repeat(1, 2)


def run(rows: PartialRows, kv: KVView, segment: Segment, *values: float, depth: int = 2) -> None:
    """As `Target.run` notes a run through the first layers."""
    rows.add(kv, segment, depth, states(*values), rows.take(kv))


def found(rows: PartialRows, kv: KVView, asked: Segment) -> tuple[tuple[int, ...], list[float]] | None:
    begun = rows.find([kv], [asked])[0]
    return None if begun is None else (begun.token_ids, begun.hidden[:, 0].tolist())


def test_a_chain_grows_row_by_row(rows: PartialRows, kv: KVView) -> None:
    run(rows, kv, segment([7, 8], 5), 1.0, 2.0)
    run(rows, kv, segment([9], 7), 3.0)
    assert found(rows, kv, segment([7, 8, 9, 6], 5)) == ((7, 8, 9), [1.0, 2.0, 3.0])
    assert found(rows, kv, segment([7, 8], 5)) == ((7, 8), [1.0, 2.0]), "a draft that was cut"
    assert found(rows, kv, segment([7, 6, 9], 5)) == ((7,), [1.0]), "only up to the first other token"
    assert found(rows, kv, segment([6, 8, 9], 5)) is None


def test_what_runs_again_takes_the_place_of_what_ran_before(rows: PartialRows, kv: KVView) -> None:
    run(rows, kv, segment([7, 8, 9], 5), 1.0, 2.0, 3.0)
    run(rows, kv, segment([6], 6), 4.0)
    assert found(rows, kv, segment([7, 6, 9], 5)) == ((7, 6), [1.0, 4.0])
    run(rows, kv, segment([7], 5), 5.0)
    assert found(rows, kv, segment([7, 6, 9], 5)) == ((7,), [5.0])


def test_rows_behind_a_gap_are_not_taken_for_their_neighbours(rows: PartialRows, kv: KVView) -> None:
    """Equal tokens, so that nothing but the position tells them apart."""
    run(rows, kv, segment([7], 5), 1.0)
    run(rows, kv, segment([7, 7], 7), 2.0, 3.0)
    assert found(rows, kv, segment([7, 7, 7, 7], 5)) is None
    assert found(rows, kv, segment([7, 7], 7)) == ((7, 7), [2.0, 3.0])


def test_rows_at_another_position_are_other_rows(rows: PartialRows, kv: KVView) -> None:
    run(rows, kv, segment([7, 7], 5), 1.0, 2.0)
    assert found(rows, kv, segment([7, 7], 4)) is None
    assert found(rows, kv, segment([7, 7], 6)) is None


def test_other_numbers_of_layers_do_not_join(rows: PartialRows, kv: KVView) -> None:
    run(rows, kv, segment([7, 8], 5), 1.0, 2.0)
    run(rows, kv, segment([9], 7), 3.0, depth=1)
    assert found(rows, kv, segment([7, 8, 9], 5)) is None
    run(rows, kv, segment([7, 8, 9], 5), 4.0, 5.0, 6.0, depth=3)
    begun = rows.find([kv], [segment([7, 8, 9], 5)])[0]
    assert isinstance(begun, PartialChain)
    assert (begun.depth, len(begun)) == (3, 3)


@pytest.mark.parametrize("change", [{"block_table": (3, 2, 4)}, {"block_table": (3, 1)}, {"long_rope": True}])
def test_other_memory_holds_other_rows(rows: PartialRows, kv: KVView, change: dict[str, object]) -> None:
    moved = replace(segment([7, 8], 5), **change)  # type: ignore[arg-type]
    run(rows, kv, segment([7, 8], 5), 1.0, 2.0)
    assert found(rows, kv, moved) is None
    run(rows, kv, replace(moved, token_ids=[9], start=7), 3.0)
    assert found(rows, kv, replace(moved, token_ids=[7, 8, 9])) is None
    assert found(rows, kv, segment([7, 8, 9], 5)) is None


def test_sequences_are_kept_apart(rows: PartialRows, kv: KVView) -> None:
    other = KVView(StateMemory(BlockManager(8, 4)).state())
    run(rows, kv, segment([7], 5), 1.0)
    run(rows, other, segment([7], 5), 2.0)
    both = rows.find([other, kv], [segment([7], 5), segment([7], 5)])
    assert [begun.hidden[0, 0].item() for begun in both if begun is not None] == [2.0, 1.0]


def test_trees_are_neither_kept_nor_found(rows: PartialRows, kv: KVView) -> None:
    run(rows, kv, segment([7, 8], 5), 1.0, 2.0)
    assert found(rows, kv, segment([7, 8, 9], 5, (-1, 0, 0))) is None
    run(rows, kv, segment([7, 8, 9], 5, (-1, 0, 0)), 1.0, 2.0, 3.0)
    assert found(rows, kv, segment([7, 8, 9], 5)) is None, "a tree has written over the chain"


def test_what_is_taken_or_cleared_is_gone(rows: PartialRows, kv: KVView) -> None:
    run(rows, kv, segment([7], 5), 1.0)
    assert rows.take(kv) is not None
    assert rows.take(kv) is None
    assert found(rows, kv, segment([7], 5)) is None
    run(rows, kv, segment([7], 5), 1.0)
    rows.clear()
    assert found(rows, kv, segment([7], 5)) is None


def test_nobody_else_holds_the_hidden_states(rows: PartialRows, kv: KVView) -> None:
    given = states(1.0, 2.0)
    rows.add(kv, segment([7, 8], 5), 2, given, None)
    given.zero_()
    assert found(rows, kv, segment([7, 8], 5)) == ((7, 8), [1.0, 2.0])

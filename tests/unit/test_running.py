"""The record of a running state: where it is known, and what its tape stands for."""

from __future__ import annotations

import pytest
import torch

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.running import Anchor, CellRecord, RunningText
from outrider.model.running import Convolution, StateRows


def record(first: int = 3, tape: tuple[int, ...] = (10, 11, 12, 13, 14)) -> CellRecord:
    """A window of two inputs, with a tape of rows from position `first` on."""
    window = torch.tensor([[8.0], [9.0]])
    inputs = torch.tensor(tape, dtype=torch.float32)[:, None]
    return CellRecord(Convolution(torch.ones(1, 3), None), (Anchor(first, window),), first, (inputs,))


@pytest.mark.parametrize(("position", "window"), [(3, [8, 9]), (4, [9, 10]), (6, [11, 12]), (8, [13, 14])])
def test_a_state_is_computed_from_the_nearest_one_before_it(position: int, window: list[int]) -> None:
    assert record().state_at(position).flatten().tolist() == window


def test_a_state_that_is_gone_or_not_there_yet_is_not_made_up() -> None:
    with pytest.raises(AssertionError, match="before position 2"):
        record().state_at(2)
    with pytest.raises(AssertionError, match="from 3 to 8"):
        record().state_at(9)
    late = CellRecord(record().function, record().anchors, 5, record().tape)
    with pytest.raises(AssertionError, match="behind position 3 are gone"):
        late.state_at(6)


def test_what_stands_of_a_tree_moves_to_the_front() -> None:
    moved = record().lined_up(3, [0, 2, 4])
    assert moved.tape[0].flatten().tolist() == [10, 12, 14]
    assert moved.state_at(6).flatten().tolist() == [12, 14]


def test_states_behind_rows_that_moved_are_forgotten() -> None:
    known = record()
    later = CellRecord(
        known.function, (*known.anchors, Anchor(4, torch.zeros(2, 1)), Anchor(8, torch.ones(2, 1))), 3, known.tape
    )
    assert [anchor.position for anchor in later.lined_up(3, [0, 2]).anchors] == [3, 4]


def test_rows_before_the_tape_stay_where_they_are() -> None:
    """The first two rows were certain, and the tape begins behind them."""
    assert record(first=5).lined_up(3, [0, 1, 3, 5]).tape[0].flatten().tolist() == [11, 13]


def test_a_fork_goes_its_own_way() -> None:
    text = RunningText()
    text.records[0, 0] = record()
    twin = text.fork()
    twin.line_up(3, [1])
    assert text.records[0, 0].tape[0].flatten().tolist() == [10, 11, 12, 13, 14]
    text.clear()
    assert twin.records[0, 0].tape[0].flatten().tolist() == [11]


def test_a_text_that_is_freed_has_no_states() -> None:
    state = StateMemory(BlockManager(4, 4)).state()
    assert state.reserve(4)
    state.running.records[0, 0] = record(0)
    twin = state.fork()
    state.free()
    assert not state.running.records
    assert twin.running.records


@pytest.mark.parametrize("parents", [None, (-1, 0, 0, 1, 2, -1)])
def test_a_convolution_looks_along_the_path(parents: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    weight, bias, state, rows = torch.randn(5, 4), torch.randn(5), torch.randn(3, 5), torch.randn(6, 5)
    function = Convolution(weight, bias)
    got, states = function.run(state, StateRows((rows,), parents=parents), [0, 5])
    for row in range(6):
        path, at = [], row
        while at >= 0:
            path, at = [at, *path], at - 1 if parents is None else parents[at]
        window = torch.cat([state, rows[path]])[-4:]
        assert torch.allclose(got[row], (window * weight.t()).sum(0) + bias, atol=1e-6)
        if row in states:
            assert torch.equal(states[row], window[1:])

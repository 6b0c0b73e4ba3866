"""RunningText: what the layers with a running state keep of one text. No torch at import.

A running state is one tensor for a whole text, and every token changes it. So a pass never writes the state that it reads.
It leaves new tensors: the state at a place that is certain to stay, and a *tape* of the inputs of the rows behind it. Once
it is known which of these rows are part of the text, the next pass applies them to the state, and then computes its own
rows. Rejected rows touch nothing, whether they were a chain or a tree. Tensors are replaced and never changed, so a fork
shares them, and a pass that fails leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

#: Which running state: the index of a layer, and which of the functions with a state that the layer calls in turn.
Cell = tuple[int, int]
#: Most states that a cell keeps of a text: where the tape begins, behind what is certain, and behind the last row.
MOST_STATES = 3


class Advance(Protocol):
    """A function that reads and changes a running state."""

    def replay(self, state: Tensor, tape: Sequence[Tensor]) -> Tensor:
        """The state behind rows [n, ...] of a chain, from the state before them. Neither is changed."""


@dataclass(frozen=True)
class Anchor:
    """The state behind so many leading tokens of a text."""

    position: int
    state: Tensor


@dataclass(frozen=True)
class CellRecord:
    """Holds what one cell keeps of one text."""

    function: Advance  # what advances the state
    anchors: tuple[Anchor, ...]  # known states, by position
    tape_start: int  # position of the first row of the tape
    # [n, ...] each, inputs of the rows from there on. Row i stands for the token at tape_start + i, as a slot of the memory
    # of keys and values does: who writes there again replaces it.
    tape: tuple[Tensor, ...]
    # Known states at places that the last pass went past, until the prefix cache has taken them.
    passed: tuple[Anchor, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return self.anchors[0].state.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the tape."""
        return sum(prod(kept.shape[1:]) * kept.element_size() for kept in self.tape)

    def state_at(self, position: int) -> Tensor:
        """The state behind so many tokens."""
        anchor = max((a for a in self.anchors if a.position <= position), key=lambda a: a.position, default=None)
        assert anchor is not None, f"no state is kept from before position {position}"
        if anchor.position == position:
            return anchor.state
        assert anchor.position >= self.tape_start, f"the inputs behind position {anchor.position} are gone"
        return self.function.replay(anchor.state, self.rows(anchor.position, position))

    def cut(self, position: int) -> CellRecord | None:
        """All that a text needs that goes on at a position; None where the state there is not known and cannot be computed
        any more."""
        state = next((anchor.state for anchor in self.passed if anchor.position == position), None)
        known = (a.position for a in self.anchors if a.position == position or self.tape_start <= a.position <= position)
        if state is None and any(True for _ in known):
            state = self.state_at(position)
        return None if state is None else self._begun(position, state)

    def moved_to(self, position: int) -> CellRecord:
        """The last state, as if it stood behind so many tokens."""
        return self._begun(position, self.anchors[-1].state)

    def _begun(self, position: int, state: Tensor) -> CellRecord:
        """A record that begins with a state."""
        empty = tuple(kept.new_empty((0, *kept.shape[1:])) for kept in self.tape)  # a view would keep the whole tape
        return CellRecord(self.function, (Anchor(position, state),), position, empty)

    def rows(self, start: int, stop: int) -> list[Tensor]:
        """The inputs of the tokens from position `start` to `stop`."""
        end = self.tape_start + len(self.tape[0])
        assert self.tape_start <= start <= stop <= end, f"the tape goes from {self.tape_start} to {end}"
        return [kept[start - self.tape_start : stop - self.tape_start] for kept in self.tape]

    def lined_up(self, start: int, rows: Sequence[int]) -> CellRecord:
        """The record after rows that were written from position `start` on have moved behind each other, in this order."""
        stay = next((place for place, row in enumerate(rows) if row != place), len(rows))
        before = max(start - self.tape_start, 0)
        kept = [*range(before), *(start + row - self.tape_start for row in rows if start + row >= self.tape_start)]
        return replace(
            self,
            anchors=tuple(anchor for anchor in self.anchors if anchor.position <= start + stay),
            tape=tuple(each[kept] for each in self.tape),
        )


class RunningText:
    """The running states of one text.

    Attributes:
        records: By cell; none for layers that have computed nothing yet.
        is_arbitrary: Whether a pass may begin anywhere, with states of zeros where there are none: for passes that are
            timed, and whose numbers nobody reads.
    """

    def __init__(self, *, is_arbitrary: bool = False) -> None:
        self.records: dict[Cell, CellRecord] = {}
        self.is_arbitrary = is_arbitrary

    def line_up(self, start: int, rows: Sequence[int]) -> None:
        """Move rows that were written from position `start` on behind each other, in this order."""
        self.records = {cell: record.lined_up(start, rows) for cell, record in self.records.items()}

    def cut(self, position: int) -> RunningText | None:
        """The states behind so many leading tokens, for another text that begins with these; None where they are gone."""
        records = {cell: record.cut(position) for cell, record in self.records.items()}
        found = {cell: record for cell, record in records.items() if record is not None}
        if not found or len(found) < len(records):
            return None
        text = RunningText()
        text.records = found
        return text

    def leave_passed(self) -> None:
        """Keep no longer what the last pass left for the prefix cache."""
        for cell, record in self.records.items():
            if record.passed:  # as in hardly any step
                self.records[cell] = replace(record, passed=())

    def moved_to(self, position: int) -> RunningText:
        """Returns the same states, as if they stood behind so many tokens; for a text that is arbitrary."""
        assert self.is_arbitrary, "the states of a text belong to its tokens"
        text = RunningText(is_arbitrary=True)
        text.records = {cell: record.moved_to(position) for cell, record in self.records.items()}
        return text

    def fork(self) -> RunningText:
        """Returns the same states for a second text that begins alike."""
        twin = RunningText(is_arbitrary=self.is_arbitrary)
        twin.records = dict(self.records)
        return twin

    def clear(self) -> None:
        """Forget everything; the text will be computed again."""
        self.records.clear()

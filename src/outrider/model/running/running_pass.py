"""RunningPass: one pass over the running states of all its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.cache.running import Anchor, Cell, CellRecord, RunningText
from outrider.model.batch import RaggedBatch, Segment
from outrider.model.running.function import StateFunction, StateRows


class RunningPass:
    """Computes state functions over the rows of a batch, text by text.

    What the texts keep is replaced by `keep`, once the whole pass has succeeded.

    Args:
        batch: The rows.
        most_places: Most places whose states may be left to the prefix cache.
    """

    def __init__(self, batch: RaggedBatch, most_places: int = 0) -> None:
        self._batch = batch
        self._places: list[tuple[int, ...]] = []
        for segment in batch.segments:
            self._places.append(segment.places[: max(most_places, 0)])
            most_places -= len(segment.places)
        self._texts = [RunningText() if s.running is None else s.running for s in batch.segments]
        self._left: list[dict[Cell, CellRecord]] = [{} for _ in self._texts]
        self._cell: Cell = (-1, 0)

    @property
    def layers(self) -> set[int]:
        """Layers whose states were used."""
        return {layer for left in self._left for layer, _ in left}

    def enter(self, layer: int) -> None:
        """A part of a layer begins to compute; the functions that are called next are the layer's own."""
        if layer != self._cell[0]:
            self._cell = (layer, 0)

    def compute(self, function: StateFunction, tape: tuple[Tensor, ...], queries: tuple[Tensor, ...] = ()) -> Tensor:
        """The outputs [num_rows, ...] of a function over rows [num_rows, ...] of all texts."""
        cell = self._cell
        self._cell = (cell[0], cell[1] + 1)
        outputs = []
        for part, (first, end) in zip(self.open(cell, function, tape), self._batch.row_spans, strict=True):
            inputs, asked = (tuple(each[first:end] for each in some) for some in (tape, queries))
            out, states = function.run(part.state, StateRows(inputs, asked, part.segment.parents), part.wanted)
            part.leave(inputs, states)
            outputs.append(out)
        return torch.cat(outputs)

    def open(self, cell: Cell, function: StateFunction, tape: tuple[Tensor, ...]) -> list[TextRows]:
        """The texts in one cell, in their order, for rows that leave such a tape [num_rows, ...]."""
        some = zip(self._texts, self._batch.segments, self._places, self._left, strict=True)
        return [TextRows(text, cell, function, segment, tape, passed, left) for text, segment, passed, left in some]

    def keep(self) -> None:
        """The pass has succeeded: leave the states, and the tape of its rows, to the next one."""
        for text, left in zip(self._texts, self._left, strict=True):
            text.records.update(left)


class TextRows:
    """The rows of one text in one cell: the state that they go on from, and what the text keeps of them.

    The rows of earlier passes that are certain by now are applied first, and for good. Those behind them, which some
    proposer has computed ahead of the text, are applied for this pass alone. States behind some rows are for the prefix
    cache.

    Args:
        text: What the text keeps.
        cell: Of which layer and function.
        function: What advances the state.
        segment: The rows.
        tape: [n, ...] inputs such as those of the rows.
        passed: Positions whose states are for the prefix cache.
        left: Where the record goes that the text keeps once the pass has succeeded.

    Attributes:
        state: Before the first row; it is not to be changed.
        wanted: Rows behind which the state is asked for.
    """

    def __init__(
        self,
        text: RunningText,
        cell: Cell,
        function: StateFunction,
        segment: Segment,
        tape: Sequence[Tensor],
        passed: tuple[int, ...],
        left: dict[Cell, CellRecord],
    ) -> None:
        self.segment = segment
        self._cell, self._function, self._passed, self._left = cell, function, passed, left
        start, end = segment.start, segment.context_len
        base = min(segment.certain, start)
        known = text.records.get(cell)
        if known is None:
            assert start == 0 or text.is_arbitrary, f"cell {cell} has no state for the {start} tokens before this pass"
            self._first = before = Anchor(base, function.start(tape))
            self._ahead = [each[:0] for each in tape]
        else:
            self._first, before = Anchor(base, known.state_at(base)), Anchor(start, known.state_at(start))
            self._ahead = known.rows(base, start) if base < start else [each[:0] for each in tape]
        self.state = before.state
        self._mark = min(segment.certain, end)
        last = segment.num_rows - 1 if segment.parents is None else -1
        self._places = sorted({row for row in (self._mark - start - 1, last) if row >= 0})
        self.wanted = sorted({*self._places, *(position - start - 1 for position in passed)})

    def leave(self, tape: Sequence[Tensor], states: Mapping[int, Tensor]) -> None:
        """Leave the inputs of the rows [num_rows, ...], and the states behind those that were wanted."""
        start, mark = self.segment.start, self._mark
        anchors = (self._first, *(Anchor(start + row + 1, states[row]) for row in self._places))
        if mark > start:
            kept = tuple(each[mark - start :].clone() for each in tape)
            passed = tuple(Anchor(position, states[position - start - 1]) for position in self._passed)
            self._left[self._cell] = CellRecord(self._function, anchors, mark, kept, passed)
            return
        kept = tuple(torch.cat(pair) for pair in zip(self._ahead, tape, strict=True))
        self._left[self._cell] = CellRecord(self._function, anchors, self._first.position, kept)

"""RunningPass: one pass over the running states of all its texts."""

from __future__ import annotations

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
        for index, (first, end) in enumerate(self._batch.row_spans):
            segment = self._batch.segments[index]
            inputs, asked = (tuple(each[first:end] for each in some) for some in (tape, queries))
            rows = StateRows(inputs, asked, segment.parents)
            out, record = _computed(self._texts[index], cell, function, segment, rows, self._places[index])
            self._left[index][cell] = record
            outputs.append(out)
        return torch.cat(outputs)

    def keep(self) -> None:
        """The pass has succeeded: leave the states, and the tape of its rows, to the next one."""
        for text, left in zip(self._texts, self._left, strict=True):
            text.records.update(left)


def _computed(
    text: RunningText, cell: Cell, function: StateFunction, segment: Segment, rows: StateRows, passed: tuple[int, ...]
) -> tuple[Tensor, CellRecord]:
    """The outputs of the rows of one text, and what the text keeps of them.

    The rows of earlier passes that are certain by now are applied first, and for good. Those behind them, which some
    proposer has computed ahead of the text, are applied for this pass alone. States behind some rows (`passed`, positions)
    are for the prefix cache.
    """
    start, end = segment.start, segment.start + rows.num_rows
    base = min(segment.certain, start)
    known = text.records.get(cell)
    if known is None:
        assert start == 0 or text.is_arbitrary, f"cell {cell} has no state for the {start} tokens before this pass"
        first = before = Anchor(base, function.start(rows.tape))
        ahead = [each[:0] for each in rows.tape]
    else:
        first, before = Anchor(base, known.state_at(base)), Anchor(start, known.state_at(start))
        ahead = known.rows(base, start) if base < start else [each[:0] for each in rows.tape]
    mark = min(segment.certain, end)
    places = {row for row in (mark - start - 1, rows.num_rows - 1 if rows.parents is None else -1) if row >= 0}
    out, states = function.run(before.state, rows, places | {position - start - 1 for position in passed})
    anchors = (first, *(Anchor(start + row + 1, states[row]) for row in sorted(places)))
    if mark > start:
        tape = tuple(each[mark - start :].clone() for each in rows.tape)
        left = tuple(Anchor(position, states[position - start - 1]) for position in passed)
        return out, CellRecord(function, anchors, mark, tape, left)
    return out, CellRecord(function, anchors, base, tuple(torch.cat(pair) for pair in zip(ahead, rows.tape, strict=True)))

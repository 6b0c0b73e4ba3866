"""The batch-invariant backend for any decoder: a row's bits are a function of its text.

Neither the batch, nor the chunk, nor the draft that a row comes in has a part in them. Products of rows with weights that
are not packed are computed one row at a time (`kernels.row_by_row`). Attention in our kernels has this property anyway.
Elsewhere every row attends alone, over exactly the keys it may see, in the order of their positions. That is slow; being
right comes first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor

from outrider.kernels.row_by_row import RowByRow
from outrider.model.backends.paged import PagedAttention, Scores, StockAttention, attend
from outrider.model.context import ForwardContext


class RowByRowAttention(PagedAttention):
    """Like the paged backend, one row at a time."""

    name: ClassVar[str] = "row_by_row"
    invariant = True
    guards: ClassVar[bool] = False  # the whole pass runs under `RowByRow`

    def stock(self) -> StockAttention:
        return attend_alone

    def scope(self) -> AbstractContextManager[object]:
        mode: AbstractContextManager[object] = RowByRow()  # type: ignore[no-untyped-call]
        return mode


def attend_alone(context: ForwardContext, layer: int, query: Tensor, scores: Scores, to_source: bool) -> Tensor:
    """Each row over the keys that it sees, one row after another."""
    outputs = []
    for index, (first, end) in enumerate(context.batch.row_spans):
        parts = [context.source_part(index)] * (end - first) if to_source else context.parts_by_row(index, layer)
        for row, part in enumerate(parts, first):
            keys, values = context.pool.read(layer, part.slots)  # a copy, so that its place in memory is nobody's business
            if to_source:
                keys, values = keys.clone(), values.clone()
            alone = query[:, row : row + 1].clone()
            outputs.append(attend(alone, keys, values, part, scores))
    return torch.cat(outputs)

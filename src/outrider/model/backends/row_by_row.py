"""The batch-invariant backend: every row attends alone, over exactly the keys it may see, in the order of their positions.

A row's bits are then a function of its text: neither the batch, nor the chunk, nor the draft it came in has a part in them.
Together with `kernels.row_by_row` this makes the whole forward pass so. It is slow; being right comes first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.kernels.row_by_row import RowByRow
from outrider.model import hf
from outrider.model.backends.paged import PagedAttention, attend
from outrider.model.context import current_context


class RowByRowAttention(PagedAttention):
    """Like the paged backend, one row at a time."""

    name: ClassVar[str] = "row_by_row"

    def install(self, model: Any) -> None:
        hf.set_attention(model, hf.register_attention("outrider_row_by_row", _row_by_row_attention))

    def scope(self) -> AbstractContextManager[object]:
        mode: AbstractContextManager[object] = RowByRow()  # type: ignore[no-untyped-call]
        return mode


def _row_by_row_attention(
    module: Any,
    query: Tensor,  # [1, num_heads, num_rows, head_dim], rotary embedding applied
    key: Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_rows, value_dim]
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    context = current_context()
    layer = module.layer_idx
    context.pool.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), context.batch.slot_mapping)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for index, (first, _end) in enumerate(context.batch.row_spans):
        for row, slots in enumerate(context.slots_by_row(index, layer), first):
            keys, values = context.pool.read(layer, slots)  # a copy, so that its place in memory is nobody's business
            alone = query[0, :, row : row + 1].clone()
            outputs.append(attend(alone, keys, values, None, scale=scale, softcap=softcap, sinks=s_aux))
    return torch.cat(outputs)[None], None

"""The portable backend: stock attention, our own Cache subclass and an explicit 4D mask.

Slower, because every sequence's rows are compared with every sequence's context, but it asks nothing of the attention
code. It is the oracle that the paged backend is tested against.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, ClassVar

import torch

from outrider.cache.layer_spec import LayerReach
from outrider.cache.pool import Slots
from outrider.model import hf
from outrider.model.backends.hosted import HostedAttention
from outrider.model.context import ForwardContext, additive, visible


class GatherAttention(HostedAttention):
    """Hands stock attention the gathered contexts of all sequences and a block-diagonal mask."""

    name: ClassVar[str] = "gather"

    def install(self, model: Any) -> None:
        if hf.has_encoder(model.config):
            raise ValueError("it has an encoder")
        self._layers = hf.layer_specs(model.config)
        self._dtype = model.dtype
        hf.set_attention(model, hf.stock_attention(model))

    def forward_kwargs(self, context: ForwardContext) -> dict[str, Any]:
        masks = {reach: _block_diagonal(context, reach, self._dtype) for reach in {layer.reach for layer in self._layers}}
        by_type = {layer.type_name: masks[layer.reach] for layer in self._layers}
        mask: Any = next(iter(by_type.values())) if len(by_type) == 1 else by_type
        cache = hf.PoolCache(context.pool, context.batch.slot_mapping, _all_slots(context))
        return {"attention_mask": mask, "past_key_values": cache, "use_cache": True}


def _all_slots(context: ForwardContext) -> Slots:
    slots = context.batch.context_slots
    device = context.batch.device
    return torch.cat([torch.arange(s.start, s.stop, device=device) if isinstance(s, slice) else s for s in slots])


def _block_diagonal(context: ForwardContext, reach: LayerReach, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [1, 1, num_rows, sum of context lengths]."""
    batch = context.batch
    ends = list(accumulate(s.context_len for s in batch.segments))
    seen = torch.zeros(batch.num_rows, ends[-1], dtype=torch.bool, device=batch.device)
    for segment, (first, end), right in zip(batch.segments, batch.row_spans, ends, strict=True):
        seen[first:end, right - segment.context_len : right] = visible(segment, reach, device=batch.device)
    return additive(seen, dtype)[None, None]

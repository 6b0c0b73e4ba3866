"""The fast backend: our own attention function under an unmodified decoder.

transformers hands each layer's query, key and value to a registered function. No mask function is registered with it, so
the model passes no mask, and causality, windows and trees are decided here.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.model import hf
from outrider.model.backends.hosted import HostedAttention
from outrider.model.context import ForwardContext, current_context


class PagedAttention(HostedAttention):
    """Writes KV by slot and reads each sequence's context from the pool; nothing is padded."""

    name: ClassVar[str] = "paged"

    def install(self, model: Any) -> None:
        hf.set_attention(model, hf.register_attention("outrider_paged", _paged_attention))

    def forward_kwargs(self, context: ForwardContext) -> dict[str, Any]:
        return {"use_cache": False}


def _paged_attention(
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
    for index, (first, end) in enumerate(context.batch.row_spans):
        keys, values = context.pool.read(layer, context.batch.context_slots[index])
        mask = context.mask(index, layer, query.dtype)
        outputs.append(attend(query[0, :, first:end], keys, values, mask, scale=scale, softcap=softcap, sinks=s_aux))
    return torch.cat(outputs)[None], None


def attend(
    query: Tensor,  # [num_heads, num_rows, head_dim]
    keys: Tensor,  # [context_len, num_kv_heads, head_dim]
    values: Tensor,  # [context_len, num_kv_heads, value_dim]
    mask: Tensor | None,  # [num_rows, context_len] additive
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads]
) -> Tensor:
    """Attention of one sequence's rows over its context: [num_rows, num_heads, value_dim].

    Query heads that share a KV head are folded into the row dimension, so that keys and values are read once.
    """
    num_heads, num_rows, _ = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    q = query.reshape(num_kv_heads, group * num_rows, -1)
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    folded = None if mask is None else mask.repeat(group, 1)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=folded, scale=scale)[0]
    else:
        scores = (q @ k.transpose(1, 2)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if folded is not None:
            scores = scores + folded
        out = _softmax_with_sinks(scores, sinks, num_rows) @ v
    return out.reshape(num_heads, num_rows, -1).transpose(0, 1)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor | None, num_rows: int) -> Tensor:
    """Softmax over the context, with one learned extra logit a head that takes mass and gives nothing."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sinks is None:
        return wide.softmax(-1).to(scores.dtype)
    column = sinks.to(wide.dtype).reshape(scores.shape[0], -1).repeat_interleave(num_rows, 1)[..., None]
    return torch.cat([wide, column], -1).softmax(-1)[..., :-1].to(scores.dtype)

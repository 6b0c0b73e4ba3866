"""What our passes answer when a layer of transformers calls a function that looks back over the tokens.

The arguments are those of transformers, by its names. A batch of one holds the rows of all texts, one after another. States
are kept in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from outrider.model.running.convolution import Convolution
from outrider.model.running.recurrence import Recurrence
from outrider.model.running.running_pass import RunningPass

_NORM_EPS = 1e-6


def convolve(
    running: RunningPass,
    hidden_states: Tensor,  # [1, num_channels, num_rows]
    weight: Tensor,  # [num_channels, width]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """A causal convolution of each channel: [1, num_channels, num_rows]."""
    rows = hidden_states[0].t().contiguous().to(weight.dtype)
    out = running.compute(Convolution(weight, bias), (rows,))
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.t()[None].to(hidden_states.dtype)


def apply_delta_rule(
    running: RunningPass,
    query: Tensor,  # [1, num_rows, num_key_heads, key_dim]
    key: Tensor,  # [1, num_rows, num_key_heads, key_dim]
    value: Tensor,  # [1, num_rows, num_heads, value_dim]
    g: Tensor,  # [1, num_rows, num_heads] or [1, num_rows, num_heads, key_dim], logarithms of the decay
    beta: Tensor,  # [1, num_rows, num_heads]
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule, or that of Kimi Delta Attention: [1, num_rows, num_heads, value_dim], and no state to keep."""
    dtype = _wide(query)
    queries, keys, values, decay, share = (each[0].to(dtype).contiguous() for each in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        queries, keys = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + _NORM_EPS) for each in (queries, keys))
    queries = queries * query.shape[-1] ** -0.5
    factors = decay.exp() if decay.dim() == keys.dim() else decay.exp()[..., None]
    out = running.compute(Recurrence(), (keys, values, factors, share[..., None]), (queries,))
    return out[None].to(query.dtype), None


def scan_heads(
    running: RunningPass,
    hidden_states: Tensor,  # [1, num_rows, num_heads, head_dim]
    dt: Tensor,  # [1, num_rows, num_heads]
    A: Tensor,  # [num_heads]
    B: Tensor,  # [1, num_rows, num_groups, state_size]
    C: Tensor,  # [1, num_rows, num_groups, state_size]
    chunk_size: int = 0,
    D: Tensor | None = None,  # [num_heads]
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """The scan of Mamba-2: [1, num_rows, num_heads, head_dim]."""
    dtype = _wide(hidden_states)
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)[0].to(dtype)  # [num_rows, num_heads]
    rows = hidden_states[0].to(dtype)
    writes, reads = (each[0].to(dtype).contiguous() for each in (B, C))
    decay = (steps * A.to(dtype)).exp()[..., None]
    out = running.compute(Recurrence(), (writes, rows * steps[..., None], decay), (reads,))
    return (out if D is None else out + rows * D.to(dtype)[:, None])[None]


def scan_channels(
    running: RunningPass,
    hidden_states: Tensor,  # [1, num_channels, num_rows]
    dt: Tensor,  # [1, num_channels, num_rows]
    A: Tensor,  # [num_channels, state_size]
    B: Tensor,  # [1, state_size, num_rows]
    C: Tensor,  # [1, state_size, num_rows]
    D: Tensor | None = None,  # [num_channels]
    z: Tensor | None = None,  # [1, num_channels, num_rows]
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """The scan of Mamba: [1, num_channels, num_rows]."""
    dtype = _wide(hidden_states)
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    steps = (F.softplus(steps) if delta_softplus else steps)[0].t().to(dtype).contiguous()  # [num_rows, num_channels]
    rows = hidden_states[0].t().to(dtype).contiguous()
    writes, reads = (each[0].t().to(dtype).contiguous()[:, None] for each in (B, C))
    decay = (steps[:, None, None] * A.to(dtype).t().contiguous()).exp()  # [num_rows, 1, state_size, num_channels]
    out = running.compute(Recurrence(), (writes, (rows * steps)[:, None], decay), (reads,))[:, 0]
    if D is not None:
        out = out + rows * D.to(dtype)
    if z is not None:
        out = out * F.silu(z[0].t().to(dtype))
    return out.t()[None].to(hidden_states.dtype)


def _wide(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


#: By the names of transformers' functions.
ANSWERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": apply_delta_rule,
    "chunk_kimi_delta_attention": apply_delta_rule,
    "mamba2_chunk_scan": scan_heads,
    "mamba_selective_scan": scan_channels,
}

"""How the wide copy of a T5 is made, see `outrider.measure.widen`: its configuration, and each of its tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

#: The types whose tensors have these names.
TYPES = frozenset({"t5", "mt5", "umt5"})
#: Projections from the hidden state to heads, and back.
_OF_HEADS = ("q", "k", "v", "o")
#: Projections into the feed-forward.
_INTO = ("wi", "wi_0", "wi_1")


def grow(config: Any, hidden: int, ffn: int) -> None:
    """Let a configuration be that of the copy.

    Args:
        config: Of the source; changed in place.
        hidden: The factor for the hidden size and the heads.
        ffn: The factor for the feed-forward units.
    """
    config.d_model *= hidden
    config.num_heads *= hidden
    config.d_ff *= ffn


def tiled(name: str, w: Tensor, hidden: int, ffn: int, *, scales_outputs: bool) -> Tensor:
    """One tensor of the copy.

    Args:
        name: Of the tensor.
        w: That of the source.
        hidden, ffn: The factors.
        scales_outputs: Whether the model divides what enters its head by the root of the hidden size.
    """
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in ("shared", "embed_tokens", "lm_head"):  # [vocab, hidden]
        return w.repeat(1, hidden)
    if name == "decoder.final_layer_norm.weight":  # the head sums `hidden` copies
        return w.repeat(hidden) / (hidden**0.5 if scales_outputs else hidden)
    if w.dim() == 1:
        return w.repeat(hidden)
    if part == "relative_attention_bias":  # [buckets, heads]
        return w.repeat(1, hidden)
    if part in _OF_HEADS:
        return w.repeat(hidden, hidden) / hidden
    if part in _INTO:  # [ffn, hidden]
        return w.repeat(ffn, hidden) / hidden
    assert part == "wo", name  # [hidden, ffn]
    return w.repeat(hidden, ffn) / ffn

"""The layers of heads in the target's sizes, and the layers of the target that they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.errors import InvalidParameterError
from outrider.model.lone_layer import layer_config
from outrider.train.target import FrozenTarget


def layers_to_read(target: FrozenTarget, asked: Sequence[int] | None, usual: Sequence[int]) -> tuple[int, ...]:
    """The layers of the target whose inputs a head reads: those that are asked for, or else the usual ones.

    Raises:
        InvalidParameterError: The target has no such layers.
    """
    layers, count = tuple(usual if asked is None else asked), target.num_layers
    if list(layers) != sorted(set(layers)) or not layers or not 0 <= layers[0] <= layers[-1] < count:
        problem = f"not some of the inputs of the target's layers 0 to {count - 1}, in ascending order"
        raise InvalidParameterError("layers", layers, problem, f"Use a form like {','.join(map(str, usual))}.")
    return layers


def head_layers(kind: str, target: FrozenTarget, feed_forward: int | None, count: int = 1) -> Any:
    """transformers' configuration of so many layers of a kind in the target's sizes.

    Args:
        kind: transformers' name for models that have such layers.
        target: The target.
        feed_forward: Units of the feed-forward part; None takes as many as the target has.
        count: How many layers.
    """
    theirs = target.model.config.get_text_config(decoder=True)
    heads = int(theirs.num_attention_heads)
    rotary = getattr(theirs, "rope_parameters", None) or {}
    return layer_config(
        kind,
        {
            "hidden_size": target.hidden_size,
            "intermediate_size": feed_forward or int(getattr(theirs, "intermediate_size", 0) or 4 * target.hidden_size),
            "num_attention_heads": heads,
            "num_key_value_heads": int(getattr(theirs, "num_key_value_heads", None) or heads),
            "head_dim": int(getattr(theirs, "head_dim", None) or target.hidden_size // heads),
            "num_hidden_layers": count,
            "vocab_size": target.vocab_size,
            "rms_norm_eps": float(getattr(theirs, "rms_norm_eps", None) or 1e-5),
            "hidden_act": "silu",
            "max_position_embeddings": int(getattr(theirs, "max_position_embeddings", None) or 2048),
            "rope_theta": float(rotary.get("rope_theta", 10000.0)),
        },
    )

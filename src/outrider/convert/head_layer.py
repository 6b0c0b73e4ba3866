"""The layer of a head as configurations write it, old and new releases of transformers alike."""

from __future__ import annotations

from typing import Any

_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
)


def layer_fields(layer: Any) -> dict[str, Any]:
    """The fields that say what a layer computes. Rotary factors are written as releases before 5 of transformers read them,
    which newer ones do, too."""
    found = {name: getattr(layer, name) for name in _FIELDS if getattr(layer, name, None) is not None}
    rotary = dict(layer.rope_parameters or {})
    found["rope_theta"] = rotary.pop("rope_theta", 10000.0)
    if rotary.get("rope_type", "default") != "default":
        found["rope_scaling"] = rotary
    return found

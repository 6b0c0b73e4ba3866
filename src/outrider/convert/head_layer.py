"""The layers of a head as configurations write them, for old and new releases of transformers alike."""

from __future__ import annotations

from typing import Any

from outrider.heads.feature_config import FeatureHeadConfig, FeatureNorm
from outrider.heads.formats.layer import SLIDING

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
    """The fields that say what layers compute. Rotary factors are written as releases before 5 of transformers read them,
    which newer ones do, too."""
    found = {name: getattr(layer, name) for name in _FIELDS if getattr(layer, name, None) is not None}
    rotary = dict(layer.rope_parameters or {})
    found["rope_theta"] = rotary.pop("rope_theta", 10000.0)
    if rotary.get("rope_type", "default") != "default":
        found["rope_scaling"] = rotary
    kinds = list(getattr(layer, "layer_types", None) or ())
    if SLIDING in kinds:
        found |= {"layer_types": kinds, "sliding_window": layer.sliding_window, "use_sliding_window": True}
    return found


def norm_flags(config: FeatureHeadConfig) -> dict[str, bool]:
    """The flags of norms that change what a head of EAGLE-3 computes. Those that are false are left out."""
    flags = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm is FeatureNorm.ALL,
        "fc_norm": config.feature_norm is FeatureNorm.EACH,
        "norm_output": config.norm_output,
    }
    return {name: True for name, flag in flags.items() if flag}

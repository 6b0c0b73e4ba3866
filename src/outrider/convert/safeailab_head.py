"""Heads of EAGLE-3 in the format of SafeAILab; `heads/formats/safeailab.py` reads it."""

from __future__ import annotations

from typing import Any

from outrider.convert.head_layer import layer_fields, norm_flags
from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.layer import AUX_LAYERS

#: Names of tensors in files, and here.
PREFIXES = {"midlayer.": "layer."}


def mapping(config: FeatureHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    ids = {} if config.aux_layers is None else {AUX_LAYERS: list(config.aux_layers)}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_fields(config.layer),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **ids,
        **norm_flags(config),
    }

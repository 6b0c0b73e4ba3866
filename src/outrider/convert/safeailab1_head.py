"""Heads of EAGLE in the format of SafeAILab; `heads/formats/safeailab1.py` reads it."""

from __future__ import annotations

from typing import Any

from outrider.convert.head_layer import layer_fields
from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.safeailab1 import PREFIXES as PREFIXES


def mapping(config: FeatureHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    return {"architectures": ["LlamaForCausalLM"], **layer_fields(config.layer)}

"""The format of SafeAILab's first EAGLE heads, which EAGLE-2 drafts trees with.

One decoder layer without a norm before its attention reads fc([embedding, feature]); the feature is what the target's final
norm leaves, and the target's output layer reads what the layer leaves, which is also the feature of the next token. Whether
fc has a bias is seen from the tensors. The first token has no row, as in the format of EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.eagle_config import NESTED
from outrider.heads.formats.layer import Format, layer_fields, read_flag, read_layer, refused

#: Names of tensors in files, and here.
_PREFIXES = {"layers.0.": "layer."}


def fits(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    foreign = any(name in mapping for name in ("draft_vocab_size", NESTED, "speculators_model_type"))
    return not foreign and mapping.get("num_hidden_layers") == 1


def read(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
    """The head that a configuration describes.

    Raises:
        ModelLoadError: A field cannot be used, or it is of a kind that computes something else.
    """
    layer = read_layer(folder, mapping, str(mapping.get("model_type", "llama")))
    if read_flag(folder, mapping, "add_para_norm"):
        problem = "it norms what it reads, which this version does not compute"
        raise refused(folder, "add_para_norm", True, problem, "Use another head.")
    return FeatureHeadConfig(
        method="eagle1",
        layer=layer,
        target_hidden_size=layer.hidden_size,
        vocab_size=layer.vocab_size,
        draft_vocab_size=layer.vocab_size,
    )


def write(config: FeatureHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    return {"architectures": ["LlamaForCausalLM"], **layer_fields(config.layer)}


SAFEAILAB_EAGLE1 = Format("SafeAILab EAGLE", "safeailab", "eagle1", _PREFIXES, fits, read, write)

"""The format of SafeAILab's EAGLE-3 heads, which SpecForge and NVIDIA write too: one layer, a relative d2t.

The states that are read enter layers 2, n // 2 and n - 3 of the target's n, and are joined in this order; a file may name
others. Attention reads [embedding, feature]. Its residual is the feature before its norm. The next token reads what the
layer left before the norm of the output layer. The first token has no row. The row of token i has position i - 1 there and
i here, which is the same under rotary positions.

Flags that only some of these files have change this, and mean what they mean in files of speculators: vLLM, SGLang and
TensorRT-LLM read them so. SpecForge's `norm_output` meant the norm of the output layer alone until September 2026, and was
corrected then. NVIDIA's files name the layer as those of speculators do, and have no embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.eagle_config import NESTED, read_aux_layers
from outrider.heads.formats.layer import AUX_LAYERS, Format, layer_fields, norm_flags, read_flag, read_layer, refused
from outrider.heads.formats.norms import read_feature_norm

#: Names of tensors in files, and here. Older files of SpecForge name the norms of features by their place.
_PREFIXES = {
    "midlayer.": "layer.",
    "layers.0.": "layer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_COUNT = "num_aux_hidden_states"


def fits(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    return ("draft_vocab_size" in mapping or NESTED in mapping) and "speculators_model_type" not in mapping


def read(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
    """The head that a configuration describes.

    Raises:
        ModelLoadError: A field cannot be used, or the file does not settle what it means.
    """
    layer = read_layer(folder, mapping, str(mapping.get("model_type", "llama")))
    size = mapping.get("draft_vocab_size")
    config = FeatureHeadConfig(
        method="eagle3",
        layer=layer,
        target_hidden_size=mapping.get("target_hidden_size") or layer.hidden_size,
        vocab_size=layer.vocab_size,
        draft_vocab_size=layer.vocab_size if size is None else size,
        aux_layers=read_aux_layers(folder, mapping),
        feature_norm=read_feature_norm(folder, mapping),
        norm_before_residual=read_flag(folder, mapping, "norm_before_residual"),
        norm_output=read_flag(folder, mapping, "norm_output"),
    )
    if mapping.get(_COUNT) not in (None, config.num_features):
        problem = f"it names {config.num_features} layers of the target"
        raise refused(folder, _COUNT, mapping[_COUNT], problem, "Write the layers that the head was trained with.")
    return config


def write(config: FeatureHeadConfig) -> dict[str, Any]:
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


SAFEAILAB_EAGLE3 = Format("SafeAILab EAGLE-3", "safeailab", "eagle3", _PREFIXES, fits, read, write, {"midlayer.": "layer."})

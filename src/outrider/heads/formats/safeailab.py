"""The formats of SafeAILab for EAGLE and EAGLE-3, which SpecForge and NVIDIA write too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.features import FeatureHeadConfig
from outrider.heads.formats.folder import (
    AUX_LAYERS,
    Format,
    layer_fields,
    norm_flags,
    read_feature_norm,
    read_flag,
    read_layer,
    read_layer_ids,
    refused,
)

# --- The format of SafeAILab's EAGLE-3 heads, which SpecForge and NVIDIA write too: one layer, a relative d2t.
#
# The states that are read enter layers 2, n // 2 and n - 3 of the target's n, and are joined in this order; a file may
# name others. Attention reads [embedding, feature]. Its residual is the feature before its norm. The next token reads
# what the layer left before the norm of the output layer. The first token has no row. The row of token i has position i
# - 1 there and i here, which is the same under rotary positions.
#
# Flags that only some of these files have change this, and mean what they mean in files of speculators: vLLM, SGLang
# and TensorRT-LLM read them so. SpecForge's `norm_output` meant the norm of the output layer alone until September
# 2026, and was corrected then. NVIDIA's files name the layer as those of speculators do, and have no embeddings.


#: Names of tensors in files, and here. Older files of SpecForge name the norms of features by their place.
_EAGLE3_PREFIXES = {
    "midlayer.": "layer.",
    "layers.0.": "layer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_COUNT = "num_aux_hidden_states"


def _fits_eagle3(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    return ("draft_vocab_size" in mapping or NESTED in mapping) and "speculators_model_type" not in mapping


def _read_eagle3(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
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


def _write_eagle3(config: FeatureHeadConfig) -> dict[str, Any]:
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


SAFEAILAB_EAGLE3 = Format(
    "SafeAILab EAGLE-3",
    "safeailab",
    "eagle3",
    _EAGLE3_PREFIXES,
    _fits_eagle3,
    _read_eagle3,
    _write_eagle3,
    {"midlayer.": "layer."},
)


# --- The format of SafeAILab's first EAGLE heads, which EAGLE-2 drafts trees with.
#
# One decoder layer without a norm before its attention reads fc([embedding, feature]); the feature is what the target's
# final norm leaves, and the target's output layer reads what the layer leaves, which is also the feature of the next
# token. Whether fc has a bias is seen from the tensors. The first token has no row, as in the format of EAGLE-3.


#: Names of tensors in files, and here.
_EAGLE1_PREFIXES = {"layers.0.": "layer."}


def _fits_eagle1(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    foreign = any(name in mapping for name in ("draft_vocab_size", NESTED, "speculators_model_type"))
    return not foreign and mapping.get("num_hidden_layers") == 1


def _read_eagle1(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
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


def _write_eagle1(config: FeatureHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    return {"architectures": ["LlamaForCausalLM"], **layer_fields(config.layer)}


SAFEAILAB_EAGLE1 = Format(
    "SafeAILab EAGLE", "safeailab", "eagle1", _EAGLE1_PREFIXES, _fits_eagle1, _read_eagle1, _write_eagle1
)


# --- What files of NVIDIA, and some of SpecForge, nest in `eagle_config`: layers of the target, and flags.
#
# The layers are those whose *outputs* are read, counted from 0. The trainers of both count so, and so does SGLang. A
# vLLM that knows only layers at the top reads the usual ones instead.


NESTED = "eagle_config"
#: Fields that describe parts which heads of one layer do not have, and the layers themselves.
_READ = frozenset({AUX_LAYERS, "next_layer_regular", "parallel_draft_heads_num_layers"})
#: Other fields, and the value with which each of them changes nothing; so do false, 0 and null of those not named here.
_IDLE = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
_OTHER = "Use another head."


def read_aux_layers(folder: str, mapping: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers of the target whose inputs a head reads; None for those that its method names.

    Raises:
        ModelLoadError: They are no layers, two places disagree, or the head computes what is not computed here.
    """
    top = None if mapping.get(AUX_LAYERS) is None else read_layer_ids(folder, mapping[AUX_LAYERS])
    nested = mapping.get(NESTED)
    if nested is None:
        return top
    if not isinstance(nested, Mapping):
        raise refused(folder, NESTED, nested, "no mapping", _OTHER)
    _check_rest(folder, nested)
    if not nested.get(AUX_LAYERS):
        return top
    inputs = tuple(i + 1 for i in read_layer_ids(folder, nested[AUX_LAYERS], f"{NESTED}.{AUX_LAYERS}"))
    if top is not None and top != inputs:
        problem = f"{AUX_LAYERS}={list(top)} beside it names the inputs of layers, which are the outputs of others"
        remedy = "Keep the one that the head was trained with."
        raise refused(folder, f"{NESTED}.{AUX_LAYERS}", nested[AUX_LAYERS], problem, remedy)
    return inputs


def _check_rest(folder: str, nested: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a field that changes what the head computes in a way that is not read here."""
    for name, value in nested.items():
        if name in _READ or value is None or value == _IDLE.get(name, False) or (name, value) == ("parallel_draft_step", 1):
            continue
        raise refused(folder, f"{NESTED}.{name}", value, "this version does not compute it", _OTHER)

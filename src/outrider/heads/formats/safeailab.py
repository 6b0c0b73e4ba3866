"""The formats of SafeAILab for EAGLE and EAGLE-3, which SpecForge and NVIDIA write too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.features import Eagle1Network, Eagle3Network, FeatureHeadConfig
from outrider.heads.formats.folder import (
    AUX_LAYERS,
    Format,
    eagle3_fields,
    layer_fields,
    read_flag,
    read_layer,
    read_layer_ids,
    read_norms,
    refused,
    widths,
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


def _read_eagle3(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
    layer, size = read_layer(folder, mapping, str(mapping.get("model_type", "llama"))), mapping.get("draft_vocab_size")
    config = FeatureHeadConfig(
        method="eagle3",
        **widths(mapping, layer, layer.vocab_size if size is None else size),
        aux_layers=read_aux_layers(folder, mapping),
        **read_norms(folder, mapping),
    )
    if mapping.get(_COUNT) not in (None, config.num_features):
        problem = f"it names {config.num_features} layers of the target"
        raise refused(folder, _COUNT, mapping[_COUNT], problem, "Write the layers that the head was trained with.")
    return config


def _write_eagle3(config: FeatureHeadConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_fields(config.layer),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **eagle3_fields(config),
    }


SAFEAILAB_EAGLE3 = Format(
    name="SafeAILab EAGLE-3",
    family="safeailab",
    method="eagle3",
    network=Eagle3Network,
    prefixes=_EAGLE3_PREFIXES,
    fits=lambda mapping: ("draft_vocab_size" in mapping or NESTED in mapping) and "speculators_model_type" not in mapping,
    read=_read_eagle3,
    write=_write_eagle3,
    written={"midlayer.": "layer."},
)


# --- The format of SafeAILab's first EAGLE heads, which EAGLE-2 drafts trees with.
#
# One decoder layer without a norm before its attention reads fc([embedding, feature]); the feature is what the target's
# final norm leaves, and the target's output layer reads what the layer leaves, which is also the feature of the next
# token. Whether fc has a bias is seen from the tensors. The first token has no row, as in the format of EAGLE-3.


_FOREIGN = ("draft_vocab_size", "eagle_config", "speculators_model_type")


def _read_eagle1(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
    layer = read_layer(folder, mapping, str(mapping.get("model_type", "llama")))
    if read_flag(folder, mapping, "add_para_norm"):
        problem = "it norms what it reads, which this version does not compute"
        raise refused(folder, "add_para_norm", True, problem, "Use another head.")
    return FeatureHeadConfig("eagle1", layer, layer.hidden_size, layer.vocab_size, layer.vocab_size)


SAFEAILAB_EAGLE1 = Format(
    name="SafeAILab EAGLE",
    family="safeailab",
    method="eagle1",
    network=Eagle1Network,
    prefixes={"layers.0.": "layer."},
    fits=lambda mapping: mapping.get("num_hidden_layers") == 1 and not any(name in mapping for name in _FOREIGN),
    read=_read_eagle1,
    write=lambda config: {"architectures": ["LlamaForCausalLM"], **layer_fields(config.layer)},
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
    """The layers of the target whose inputs a head reads; None for those that its method names."""
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

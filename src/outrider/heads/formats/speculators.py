"""The formats of the speculators package, versions 0.5 to 0.9, for EAGLE-3, DFlash, DSpark and P-EAGLE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import UnsupportedModelError
from outrider.heads.block_networks import BlockHeadConfig, BlockHeadNetwork, MarkovKind, MaskHeadConfig, ParallelNetwork
from outrider.heads.features import Eagle3Network, FeatureHeadConfig
from outrider.heads.formats.deepspec import read_sequential_heads, sequential_fields
from outrider.heads.formats.folder import (
    AUX_LAYERS,
    KINDS,
    SLIDING,
    Format,
    eagle3_fields,
    layer_fields,
    read_flag,
    read_layer,
    read_layer_ids,
    read_layers,
    read_norms,
    refused,
    widths,
)
from outrider.heads.formats.zlab import read_block_size, read_mask_token, read_reaches

# --- The format of the speculators package, versions 0.5 to 0.9, for EAGLE-3: `layers.0`, flags for norms, named layers.
#
# Layers are those whose inputs are read; where none are named, both the package and vLLM take 2, n // 2 and n - 3.
# Copies of the target's own norm and output layer (`verifier_norm`, `verifier_lm_head`) are not used. `norm_output`
# means that the next token reads what the layer left behind the norm.


def _read_eagle3(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
    kind = mapping["speculators_model_type"]
    if kind != "eagle3":
        remedy = "Use an eagle3, peagle, dflash or dspark head."
        raise refused(folder, "speculators_model_type", kind, "this version does not read it", remedy)
    inner = _inner(folder, mapping)
    layer = read_layer(folder, inner, inner["model_type"])
    return FeatureHeadConfig(method="eagle3", **_read_fields(folder, mapping, layer))


def _inner(folder: str, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description of the head's layers in a configuration."""
    inner = mapping.get("transformer_layer_config")
    if not isinstance(inner, Mapping) or "model_type" not in inner:
        problem = "it names no model_type, and versions of the format take different ones then"
        raise refused(folder, "transformer_layer_config", inner, problem, f"Write one of {', '.join(KINDS)}.")
    return inner


def _read_fields(folder: str, mapping: Mapping[str, Any], layer: Any, *, trains_embedding: bool = False) -> dict[str, Any]:
    """The fields of `FeatureHeadConfig` but for the method, of heads of EAGLE-3's kind. Its embeddings were trained as
    `trains_embedding` says where the file does not say it."""
    if not isinstance(mapping.get("norm_before_residual"), bool):
        problem = "vLLM takes true and the package takes false where it is left out"
        remedy = "Write which of them the head was trained with."
        raise refused(folder, "norm_before_residual", mapping.get("norm_before_residual"), problem, remedy)
    ids = mapping.get(AUX_LAYERS)
    return {
        **widths(mapping, layer, mapping.get("draft_vocab_size", 32000)),
        "aux_layers": None if ids is None else read_layer_ids(folder, ids),
        **read_norms(folder, mapping),
        "trains_embedding": read_flag(folder, mapping, "embed_requires_grad", trains_embedding),
        **_read_verifier(mapping),
    }


def _read_verifier(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The model that the head was made for, as `FeatureHeadConfig` has it; empty where it names none."""
    outer = mapping.get("speculators_config")
    inner = outer.get("verifier") if isinstance(outer, Mapping) else None
    found = inner if isinstance(inner, Mapping) else {}
    return {
        "verifier": str(found.get("name_or_path") or ""),
        "architectures": tuple(map(str, found.get("architectures") or ())),
    }


def _fields(config: FeatureHeadConfig) -> dict[str, Any]:
    """The fields that the configurations of all heads of EAGLE-3's kind have."""
    return {
        **_described(config, num_draft_tokens=5),
        **eagle3_fields(config),
        "norm_before_residual": config.norm_before_residual,
        "embed_requires_grad": config.trains_embedding,
    }


def _described(config: FeatureHeadConfig, num_draft_tokens: int) -> dict[str, Any]:
    """The fields that the configurations of all methods have. Other engines draft so many tokens in a step unless they are
    told otherwise."""
    return {
        "speculators_model_type": config.method,
        "speculators_version": "0.5.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_fields(config.layer),
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
            "verifier": {"name_or_path": config.verifier or None, "architectures": list(config.architectures)},
        },
    }


SPECULATORS_EAGLE3 = Format(
    name="speculators",
    family="speculators",
    method="eagle3",
    network=Eagle3Network,
    prefixes={"layers.0.": "layer."},
    fits=lambda mapping: "speculators_model_type" in mapping,
    read=_read_eagle3,
    write=lambda config: {"architectures": ["Eagle3Speculator"], **_fields(config)},
)


# --- The format of the speculators package for DFlash heads.
#
# `aux_hidden_state_layer_ids` name layers whose *inputs* are read, one more than z-lab's ids of the same layers. A
# reduced vocabulary comes with an output layer of its own. Layers without a window see the block both ways; those with
# one see no later rows, unless `sliding_window_non_causal` is true.


_IDS, _ANCHOR = "aux_hidden_state_layer_ids", "sample_from_anchor"


def _read_dflash(folder: str, mapping: Mapping[str, Any]) -> BlockHeadConfig:
    return BlockHeadConfig(**_read_block(folder, mapping, from_anchor=False))


def _read_block(folder: str, mapping: Mapping[str, Any], *, from_anchor: bool) -> dict[str, Any]:
    """The fields of `BlockHeadConfig` of a head that drafts blocks. Whether the last token of the text drafts is as
    `from_anchor` says where the file does not say it."""
    _check_kind(folder, mapping)
    inner = mapping.get("transformer_layer_config")
    if not isinstance(inner, Mapping) or inner.get("model_type") != "qwen3":
        problem = "it describes no layers of Qwen3, which such heads have"
        raise refused(folder, "transformer_layer_config", inner, problem, "Write model_type 'qwen3' and its sizes.")
    layers = read_layers(folder, inner, "qwen3")
    one_way = not read_flag(folder, mapping, "sliding_window_non_causal")
    return {
        "method": mapping["speculators_model_type"],
        **widths(mapping, layers, mapping.get("draft_vocab_size", 32000)),
        "aux_layers": read_layer_ids(folder, mapping.get(_IDS), _IDS),
        **_read_verifier(mapping),
        "block_size": read_block_size(folder, mapping.get("block_size", 8)),
        "mask_token_id": read_mask_token(folder, mapping.get("mask_token_id"), layers.vocab_size),
        "reaches": read_reaches(folder, layers, causal=False, causal_in_windows=one_way),
        "from_anchor": read_flag(folder, mapping, _ANCHOR, from_anchor),
    }


def _check_kind(folder: str, mapping: Mapping[str, Any]) -> None:
    if mapping.get("projector_type") not in (None, "dflash"):
        problem = "it corrects what a block drafts, which this version does not compute"
        raise refused(folder, "projector_type", mapping["projector_type"], problem, "Use another head.")
    if read_flag(folder, mapping, "shift_label"):
        problem = "its places were moved in training, which this version does not compute"
        raise refused(folder, "shift_label", True, problem, "Use another head.")


def _write_dflash(config: BlockHeadConfig) -> dict[str, Any]:
    assert config.aux_layers is not None, "a block drafter names the layers that it reads"
    in_windows = {reach.causal for reach in config.reaches if reach.window is not None}
    if len(in_windows) > 1 or any(reach.causal for reach in config.reaches if reach.window is None):
        problem = "rows of its layers without a window see no later rows, which the format of speculators cannot say"
        raise UnsupportedModelError("the head", problem, "Use it in the format that it has.")
    return {
        "architectures": ["DFlashSpeculator"],
        **_described(config, num_draft_tokens=config.num_places),
        _IDS: list(config.aux_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        _ANCHOR: config.from_anchor,
        **({"sliding_window_non_causal": True} if in_windows == {False} else {}),
    }


SPECULATORS_DFLASH = Format(
    name="speculators DFlash",
    family="speculators",
    method="dflash",
    network=BlockHeadNetwork,
    prefixes={},
    fits=lambda mapping: mapping.get("speculators_model_type") == "dflash",
    read=_read_dflash,
    write=_write_dflash,
)


# --- The format of the speculators package for DSpark heads: that of DFlash, with the fields of the two small heads.
#
# Where nothing is said, the last token of the text drafts, the sequential head has rank 256, and the confidence head is
# there and reads the token before a place.


def _read_dspark(folder: str, mapping: Mapping[str, Any]) -> BlockHeadConfig:
    markov, judge = read_sequential_heads(folder, mapping, rank=256, judged=True)
    config = BlockHeadConfig(**_read_block(folder, mapping, from_anchor=True), markov=markov, judge=judge)
    if markov is not None and markov.kind is MarkovKind.RNN and not config.from_anchor:
        problem = "markov_head_type is rnn, and engines disagree whether it reads the row that drafts nothing"
        raise refused(folder, _ANCHOR, False, problem, "Use another head.")
    return config


def _write_dspark(config: BlockHeadConfig) -> dict[str, Any]:
    return {**_write_dflash(config), "architectures": ["DSparkSpeculator"], **sequential_fields(config)}


SPECULATORS_DSPARK = Format(
    name="speculators DSpark",
    family="speculators",
    method="dspark",
    network=BlockHeadNetwork,
    prefixes={},
    fits=lambda mapping: mapping.get("speculators_model_type") == "dspark",
    read=_read_dspark,
    write=_write_dspark,
)


# --- The format of the speculators package for P-EAGLE heads: that of EAGLE-3, with further layers and `mask_hidden`.
#
# `mask_hidden` [1, 1, n] stands for the target's joined states at a token that is to be drafted, and passes the same
# norms and the same `fc`. Embeddings are trained unless the file says otherwise. Rows see the text and the rows of
# their draft before them, as the package trains them and as vLLM runs them.


def _read_peagle(folder: str, mapping: Mapping[str, Any]) -> MaskHeadConfig:
    inner = _inner(folder, mapping)
    layers = read_layers(folder, inner, inner["model_type"])
    if SLIDING in (getattr(layers, "layer_types", None) or ()):
        raise refused(folder, "layer_types", layers.layer_types, "a window is not computed", "Use another head.")
    return MaskHeadConfig(
        method="peagle",
        **_read_fields(folder, mapping, layers, trains_embedding=True),
        mask_token_id=read_mask_token(folder, mapping.get("mask_token_id"), layers.vocab_size),
    )


def _write_peagle(config: MaskHeadConfig) -> dict[str, Any]:
    return {"architectures": ["PEagleSpeculator"], **_fields(config), "mask_token_id": config.mask_token_id}


SPECULATORS_PEAGLE = Format(
    name="speculators P-EAGLE",
    family="speculators",
    method="peagle",
    network=ParallelNetwork,
    prefixes={"layers.0.": "layer.", "layers.": "further."},
    fits=lambda mapping: mapping.get("speculators_model_type") == "peagle",
    read=_read_peagle,
    write=_write_peagle,
)

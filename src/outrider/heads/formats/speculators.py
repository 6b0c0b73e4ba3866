"""The formats of the speculators package, versions 0.5 to 0.9, for EAGLE-3, DFlash and P-EAGLE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import UnsupportedModelError
from outrider.heads.block_networks import BlockHeadConfig, ParallelHeadConfig
from outrider.heads.features import FeatureHeadConfig
from outrider.heads.formats.folder import (
    AUX_LAYERS,
    KINDS,
    SLIDING,
    Format,
    layer_fields,
    norm_flags,
    read_feature_norm,
    read_flag,
    read_layer,
    read_layer_ids,
    read_layers,
    refused,
)
from outrider.heads.formats.zlab import read_block_size, read_mask_token, read_reaches

# --- The format of the speculators package, versions 0.5 to 0.9, for EAGLE-3: `layers.0`, flags for norms, named layers.
#
# Layers are those whose inputs are read; where none are named, both the package and vLLM take 2, n // 2 and n - 3.
# Copies of the target's own norm and output layer (`verifier_norm`, `verifier_lm_head`) are not used. `norm_output`
# means that the next token reads what the layer left behind the norm.


#: Names of tensors in files, and here.
_EAGLE3_PREFIXES = {"layers.0.": "layer."}


def _fits(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    return "speculators_model_type" in mapping


def _read_eagle3(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
    """The head that a configuration describes.

    Raises:
        ModelLoadError: A field cannot be used, or the file does not settle what it means.
    """
    kind = mapping["speculators_model_type"]
    if kind != "eagle3":
        raise refused(
            folder, "speculators_model_type", kind, "this version does not read it", "Use an eagle3, peagle or dflash head."
        )
    inner = read_inner(folder, mapping)
    layer = read_layer(folder, inner, inner["model_type"])
    return FeatureHeadConfig(method="eagle3", **read_fields(folder, mapping, layer))


def read_inner(folder: str, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration says of the head's layers.

    Raises:
        ModelLoadError: It does not say of which kind they are.
    """
    inner = mapping.get("transformer_layer_config")
    if not isinstance(inner, Mapping) or "model_type" not in inner:
        problem = "it names no model_type, and versions of the format take different ones then"
        raise refused(folder, "transformer_layer_config", inner, problem, f"Write one of {', '.join(KINDS)}.")
    return inner


def read_fields(folder: str, mapping: Mapping[str, Any], layer: Any, *, trains_embedding: bool = False) -> dict[str, Any]:
    """The fields of `FeatureHeadConfig` but for the method, which all heads of EAGLE-3's kind have.

    Args:
        folder: Of the head, to name.
        mapping: Its configuration.
        layer: transformers' configuration of its layers.
        trains_embedding: Whether its embeddings were trained where the file does not say it.

    Raises:
        ModelLoadError: A field cannot be used, or the file does not settle what it means.
    """
    if not isinstance(mapping.get("norm_before_residual"), bool):
        problem = "vLLM takes true and the package takes false where it is left out"
        remedy = "Write which of them the head was trained with."
        raise refused(folder, "norm_before_residual", mapping.get("norm_before_residual"), problem, remedy)
    ids = mapping.get(AUX_LAYERS)
    verifier = read_verifier(mapping)
    return {
        "layer": layer,
        "target_hidden_size": mapping.get("target_hidden_size") or layer.hidden_size,
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": mapping.get("draft_vocab_size", 32000),
        "aux_layers": None if ids is None else read_layer_ids(folder, ids),
        "feature_norm": read_feature_norm(folder, mapping),
        "norm_before_residual": mapping["norm_before_residual"],
        "norm_output": read_flag(folder, mapping, "norm_output"),
        "trains_embedding": read_flag(folder, mapping, "embed_requires_grad", trains_embedding),
        "verifier": str(verifier.get("name_or_path") or ""),
        "architectures": tuple(map(str, verifier.get("architectures") or ())),
    }


def read_verifier(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the head says of the model that it was made for; empty where it says nothing."""
    outer = mapping.get("speculators_config")
    inner = outer.get("verifier") if isinstance(outer, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _write_eagle3(config: FeatureHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    return {"architectures": ["Eagle3Speculator"], **fields(config, num_draft_tokens=5)}


def fields(config: FeatureHeadConfig, num_draft_tokens: int) -> dict[str, Any]:
    """What the configurations of all heads of EAGLE-3's kind say; the arguments are those of `described`."""
    ids = {} if config.aux_layers is None else {AUX_LAYERS: list(config.aux_layers)}
    return {
        **described(config, num_draft_tokens),
        **ids,
        "norm_before_residual": False,
        **norm_flags(config),
        "embed_requires_grad": config.trains_embedding,
    }


def described(config: FeatureHeadConfig, num_draft_tokens: int) -> dict[str, Any]:
    """What the configurations of all methods say in this format.

    Args:
        config: Of the head.
        num_draft_tokens: That other engines draft in a step unless they are told otherwise.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
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
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.verifier or None, "architectures": list(config.architectures)},
        },
    }


SPECULATORS_EAGLE3 = Format("speculators", "speculators", "eagle3", _EAGLE3_PREFIXES, _fits, _read_eagle3, _write_eagle3)


# --- The format of the speculators package for DFlash heads.
#
# `aux_hidden_state_layer_ids` name layers whose *inputs* are read, one more than z-lab's ids of the same layers. A
# reduced vocabulary comes with an output layer of its own. Layers without a window see the block both ways; those with
# one see no later rows, unless `sliding_window_non_causal` is true.


_IDS = "aux_hidden_state_layer_ids"


def _fits_dflash(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    return mapping.get("speculators_model_type") == "dflash"


def _read_dflash(folder: str, mapping: Mapping[str, Any]) -> BlockHeadConfig:
    """The head that a configuration describes.

    Raises:
        ModelLoadError: A field cannot be used, or it is of a kind that computes something else.
    """
    _check_kind(folder, mapping)
    inner = mapping.get("transformer_layer_config")
    if not isinstance(inner, Mapping) or inner.get("model_type") != "qwen3":
        problem = "it describes no layers of Qwen3, which such heads have"
        raise refused(folder, "transformer_layer_config", inner, problem, "Write model_type 'qwen3' and its sizes.")
    layers = read_layers(folder, inner, "qwen3")
    verifier = read_verifier(mapping)
    return BlockHeadConfig(
        method="dflash",
        layer=layers,
        target_hidden_size=mapping.get("target_hidden_size") or layers.hidden_size,
        vocab_size=layers.vocab_size,
        draft_vocab_size=mapping.get("draft_vocab_size", 32000),
        aux_layers=read_layer_ids(folder, mapping.get(_IDS), _IDS),
        verifier=str(verifier.get("name_or_path") or ""),
        architectures=tuple(map(str, verifier.get("architectures") or ())),
        block_size=read_block_size(folder, mapping.get("block_size", 8)),
        mask_token_id=read_mask_token(folder, mapping.get("mask_token_id"), layers.vocab_size),
        reaches=read_reaches(
            folder,
            layers,
            causal=False,
            causal_in_windows=not read_flag(folder, mapping, "sliding_window_non_causal"),
        ),
    )


def _check_kind(folder: str, mapping: Mapping[str, Any]) -> None:
    if mapping.get("projector_type") not in (None, "dflash"):
        problem = "it corrects what a block drafts, which this version does not compute"
        raise refused(folder, "projector_type", mapping["projector_type"], problem, "Use another head.")
    for name in ("sample_from_anchor", "shift_label"):
        if read_flag(folder, mapping, name):
            problem = "it drafts at the last token of the text too, which this version does not compute"
            raise refused(folder, name, True, problem, "Use another head.")


def _write_dflash(config: BlockHeadConfig) -> dict[str, Any]:
    """The configuration of a head.

    Raises:
        UnsupportedModelError: The format cannot say what its rows see.
    """
    assert config.aux_layers is not None, "a block drafter names the layers that it reads"
    in_windows = {reach.causal for reach in config.reaches if reach.window is not None}
    if len(in_windows) > 1 or any(reach.causal for reach in config.reaches if reach.window is None):
        problem = "rows of its layers without a window see no later rows, which the format of speculators cannot say"
        raise UnsupportedModelError("the head", problem, "Use it in the format that it has.")
    return {
        "architectures": ["DFlashSpeculator"],
        **described(config, num_draft_tokens=config.block_size - 1),
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        **({"sliding_window_non_causal": True} if in_windows == {False} else {}),
    }


SPECULATORS_DFLASH = Format("speculators DFlash", "speculators", "dflash", {}, _fits_dflash, _read_dflash, _write_dflash)


# --- The format of the speculators package for P-EAGLE heads: that of EAGLE-3, with further layers and `mask_hidden`.
#
# `mask_hidden` [1, 1, n] stands for the target's joined states at a token that is to be drafted, and passes the same
# norms and the same `fc`. Embeddings are trained unless the file says otherwise. Rows see the text and the rows of
# their draft before them, as the package trains them and as vLLM runs them.


#: Names of tensors in files, and here.
_PEAGLE_PREFIXES = {"layers.0.": "layer.", "layers.": "further."}


def _fits_peagle(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    return mapping.get("speculators_model_type") == "peagle"


def _read_peagle(folder: str, mapping: Mapping[str, Any]) -> ParallelHeadConfig:
    """The head that a configuration describes.

    Raises:
        ModelLoadError: A field cannot be used, or the file does not settle what it means.
    """
    inner = read_inner(folder, mapping)
    layers = read_layers(folder, inner, inner["model_type"])
    if SLIDING in (getattr(layers, "layer_types", None) or ()):
        raise refused(folder, "layer_types", layers.layer_types, "a window is not computed", "Use another head.")
    return ParallelHeadConfig(
        method="peagle",
        **read_fields(folder, mapping, layers, trains_embedding=True),
        num_layers=int(layers.num_hidden_layers),
        mask_token_id=read_mask_token(folder, mapping.get("mask_token_id"), layers.vocab_size),
    )


def _write_peagle(config: ParallelHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    return {
        "architectures": ["PEagleSpeculator"],
        **fields(config, num_draft_tokens=5),
        "mask_token_id": config.mask_token_id,
    }


SPECULATORS_PEAGLE = Format(
    "speculators P-EAGLE", "speculators", "peagle", _PEAGLE_PREFIXES, _fits_peagle, _read_peagle, _write_peagle
)

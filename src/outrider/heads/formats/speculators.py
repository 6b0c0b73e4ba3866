"""The format of the speculators package, versions 0.5 to 0.9, for EAGLE-3: `layers.0`, flags for norms, named layers.

Layers are those whose inputs are read; where none are named, both the package and vLLM take 2, n // 2 and n - 3. Copies of
the target's own norm and output layer (`verifier_norm`, `verifier_lm_head`) are not used.
`norm_output` means that the next token reads what the layer left behind the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.layer import (
    AUX_LAYERS,
    KINDS,
    Format,
    layer_fields,
    norm_flags,
    read_flag,
    read_layer,
    read_layer_ids,
    refused,
)
from outrider.heads.formats.norms import read_feature_norm

#: Names of tensors in files, and here.
_PREFIXES = {"layers.0.": "layer."}


def fits(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    return "speculators_model_type" in mapping


def read(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
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


def write(config: FeatureHeadConfig) -> dict[str, Any]:
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


SPECULATORS_EAGLE3 = Format("speculators", "speculators", "eagle3", _PREFIXES, fits, read, write)

"""Heads of EAGLE-3 in the format of the speculators package; `heads/formats/speculators.py` reads it."""

from __future__ import annotations

from typing import Any

from outrider.convert.head_layer import layer_fields, norm_flags
from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.layer import AUX_LAYERS
from outrider.heads.formats.speculators import PREFIXES as PREFIXES


def mapping(config: FeatureHeadConfig) -> dict[str, Any]:
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

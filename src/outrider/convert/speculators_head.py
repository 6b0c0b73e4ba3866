"""Heads of EAGLE-3 in the format of the speculators package; `heads/formats/speculators.py` reads it."""

from __future__ import annotations

from typing import Any

from outrider.convert.head_layer import layer_fields
from outrider.heads.feature_config import FeatureHeadConfig, FeatureNorm
from outrider.heads.formats.speculators import PREFIXES as PREFIXES

#: The version of the format that is written: the first with all fields that are used here.
_VERSION = "0.5.0"


def mapping(config: FeatureHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    ids = {} if config.aux_layers is None else {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers)}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **ids,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm is FeatureNorm.ALL,
        "fc_norm": config.feature_norm is FeatureNorm.EACH,
        "norm_output": config.norm_output,
        "embed_requires_grad": config.trains_embedding,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_fields(config.layer),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": config.verifier or None, "architectures": list(config.architectures)},
        },
    }

"""Checks that heads fit a target.

The target's facts and the hidden states that the heads read are noted where heads are made, and compared where they draft.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.errors import HeadMismatchError
from outrider.heads.checkpoint import Witness, witness_tokens
from outrider.heads.config import HeadsConfig, HeadTarget, RowHeadsConfig
from outrider.model import hf
from outrider.model.target import Target

#: How far the hidden states may lie from the witness, as a share of its length. Rounding of weights and passes in bfloat16
#: or int8 stays far below; other weights, another layer or a forgotten norm lie far above.
TOLERANCE = 0.25


def describe_target(model: Any, name: str) -> HeadTarget:
    """What heads note of the target that they are made for.

    Args:
        model: The stock model of transformers.
        name: Path or hub id, to show.
    """
    config = model.config.get_text_config(decoder=True)
    return HeadTarget(
        name=name,
        model_type=str(config.model_type),
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
    )


def take_witness(model: Any, config: HeadsConfig) -> Witness:
    """What heads note of the hidden states of the target that they are made for.

    Args:
        model: The stock model of transformers, with its weights in its own modules.
        config: Of the heads.
    """
    tokens = witness_tokens(config.target.vocab_size)
    features = hf.layer_features(model, tokens[None].to(model.device), config.layer, normed=config.normed)
    return Witness(tokens, features[0].float().cpu())


def check_pairing(folder: str, config: HeadsConfig, witness: Witness, target: Target) -> None:
    """Raise HeadMismatchError unless heads were made for this target.

    Args:
        folder: Of the heads, to name.
        config: What they say of themselves.
        witness: What they were shown.
        target: The target.
    """
    meant = config.target
    found = {
        "model_type": target.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
    }
    for field, value in found.items():
        needed = getattr(meant, field)
        if needed != value:
            problem = f"its heads were made for {meant.name!r} with {field}={needed}, and {target.name!r} has {value}"
            raise HeadMismatchError(folder, problem, "Use heads that were trained for this target.", field, needed, value)
    distance = _distance(config, witness, target)
    if not distance <= TOLERANCE:  # NaN is no match either
        problem = (
            f"behind layer {config.layer} the hidden states of {target.name!r} differ from those of {meant.name!r}, which "
            f"its heads were made for, by {distance:.2f} of their length"
        )
        raise HeadMismatchError(
            folder, problem, "Use heads that were trained for these weights.", "features", TOLERANCE, distance
        )


def read_features(config: HeadsConfig, target: Target, hidden: Tensor) -> Tensor:
    """What heads read, from hidden states of the target.

    Args:
        config: Of the heads.
        target: The target.
        hidden: [n, hidden_size] as the target shows them: rows that came back where the heads read such rows, else what
            the first layers left.

    Returns:
        [n, hidden_size]
    """
    normed_already = isinstance(config, RowHeadsConfig) and config.layer == target.num_layers
    return target.norm(hidden) if config.normed and not normed_already else hidden


def _distance(config: HeadsConfig, witness: Witness, target: Target) -> float:
    tokens = witness.token_ids.tolist()
    if isinstance(config, RowHeadsConfig):
        hidden = target.run_apart(tokens, aux_layers=(config.layer,)).aux_hidden_states[config.layer]
    else:
        target.try_layers(range(config.layer))
        left = target.run_apart(tokens, layers=range(config.layer)).hidden
        assert left is not None, "a pass through chosen layers says what they left"
        hidden = left
    features = read_features(config, target, hidden).double().cpu()
    return float((features - witness.features).norm() / witness.features.double().norm())

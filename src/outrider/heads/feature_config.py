"""FeatureHeadConfig: the shape of a head that reads the target's features, whatever format it was published in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FeatureNorm(StrEnum):
    """How features are normed before they are fused."""

    NONE = "none"
    EACH = "each"  # those of each layer apart
    ALL = "all"  # those of all layers as one row


@dataclass(frozen=True)
class FeatureHeadConfig:
    """What a published head says of itself.

    Attributes:
        method: Whose head it is: "eagle1" reads what the target's final norm leaves, and the others
            what enters several layers.
        layer: transformers' configuration of its layer: sizes, activation, rotary factors.
        target_hidden_size: Width of the target's hidden states.
        vocab_size: Width of the target's logits.
        draft_vocab_size: Width of its own logits.
        aux_layers: Layers of the target whose *inputs* it reads, low to high; None for those that its method names by the
            target's number of layers.
        feature_norm: How these are normed before they are fused.
        norm_before_residual: Whether what its layer adds to is the normed feature, and not the feature itself.
        norm_output: Whether the next token reads what the layer left behind the norm of the output layer, and not before.
        trains_embedding: Whether its own embeddings may be others than the target's.
        verifier: The model that it was made for, as it names it; empty where it names none.
        architectures: That model's classes in transformers.
    """

    method: str
    layer: Any
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...] | None = None
    feature_norm: FeatureNorm = FeatureNorm.NONE
    norm_before_residual: bool = False
    norm_output: bool = False
    trains_embedding: bool = False
    verifier: str = ""
    architectures: tuple[str, ...] = ()

    @property
    def hidden_size(self) -> int:
        """Width of its layer."""
        return int(self.layer.hidden_size)

    @property
    def num_features(self) -> int:
        """Layers of the target that it reads."""
        if self.aux_layers is not None:
            return len(self.aux_layers)
        return 1 if self.method == "eagle1" else 3

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with so many layers, by transformers' index."""
        if self.aux_layers is not None:
            return self.aux_layers
        return (num_layers,) if self.method == "eagle1" else (2, num_layers // 2, num_layers - 3)

    @property
    def kept_per_token(self) -> int:
        """Numbers that it keeps of a token: keys and values."""
        return 2 * int(self.layer.num_key_value_heads) * int(self.layer.head_dim)

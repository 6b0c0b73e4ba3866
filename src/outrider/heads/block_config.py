"""BlockHeadConfig: the shape of a head that drafts a whole block of tokens in one pass."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.heads.feature_config import FeatureHeadConfig


@dataclass(frozen=True)
class BlockReach:
    """What the rows of a block see in a layer: the text before the block and the block itself, as far as this allows.

    Attributes:
        window: A row sees places that are less than this away from its own; None for all.
        causal: Whether a row sees no later row of its block.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockHeadConfig(FeatureHeadConfig):
    """What a published block drafter says of itself.

    Attributes:
        block_size: Rows of a block: the last token of the text, then a mask token for each token that is drafted.
        mask_token_id: The target's token whose embedding stands for a token that is to be drafted.
        reaches: What rows see, by layer.
    """

    block_size: int
    mask_token_id: int
    reaches: tuple[BlockReach, ...]

    @property
    def num_layers(self) -> int:
        """Layers of its own."""
        return len(self.reaches)

    @property
    def kept_per_token(self) -> int:
        return self.num_layers * super().kept_per_token

"""ParallelHeadConfig: the shape of a head that drafts several tokens in one pass of all its layers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.heads.feature_config import FeatureHeadConfig


@dataclass(frozen=True, kw_only=True)
class ParallelHeadConfig(FeatureHeadConfig):
    """What a published head of P-EAGLE says of itself.

    Attributes:
        num_layers: Layers of its own. The first one reads tokens beside features, and the others read what the one before
            left.
        mask_token_id: The target's token whose embedding stands for a token that is to be drafted.
    """

    num_layers: int
    mask_token_id: int

    @property
    def kept_per_token(self) -> int:
        return self.num_layers * super().kept_per_token

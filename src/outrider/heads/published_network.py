"""PublishedNetwork: what the layers of all heads that read the target's features have in common."""

from __future__ import annotations

from torch import Tensor, nn

from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.networks import TargetHead


class PublishedNetwork(nn.Module):
    """The layers of a published head. Modules carry the names that such heads are published with.

    Attributes:
        config: Its shape.
        embed_tokens: Embeddings of its own; None where the target lends its own.
    """

    def __init__(self, config: FeatureHeadConfig, *, own_embedding: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        """Features [n, hidden_size] of the target's hidden states [n, target_hidden_size], low to high."""
        raise NotImplementedError

    def logits(self, left: Tensor, target_head: TargetHead) -> Tensor:
        """Logits [n, draft_vocab_size], of what the last layer left [n, hidden_size].

        Args:
            left: What the layer left.
            target_head: The target's output layer, for heads without one of their own.
        """
        raise NotImplementedError

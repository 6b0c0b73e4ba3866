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
        lm_head: An output layer of its own; None where the target lends its own.
    """

    def __init__(self, config: FeatureHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if own_output else None

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        """Features [n, hidden_size] of the target's hidden states [n, target_hidden_size], low to high."""
        raise NotImplementedError

    def logits(self, left: Tensor, target_head: TargetHead) -> Tensor:
        """Logits [n, draft_vocab_size], of what the last layer left [n, hidden_size].

        Args:
            left: What the layer left.
            target_head: The target's output layer, for heads without one of their own.
        """
        states = self.output_states(left)
        return target_head(states) if self.lm_head is None else self.lm_head(states)

    def output_states(self, left: Tensor) -> Tensor:
        """What the output layer reads [n, hidden_size], of what the last layer left."""
        raise NotImplementedError

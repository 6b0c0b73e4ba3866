"""The layers of heads that draft several tokens in one pass: those of EAGLE-3, further layers behind, and a mask state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.heads.block_network import BlockLayer
from outrider.heads.feature_networks import Eagle3Network
from outrider.heads.parallel_config import ParallelHeadConfig


class ParallelNetwork(Eagle3Network):
    """The head of P-EAGLE (2026): a token that is to be drafted has the embedding of a mask token, and a trained state in
    place of the target's.

    Args:
        config: Its shape.
        own_embedding: Whether it brings embeddings.
        own_output: Whether it brings an output layer.
    """

    config: ParallelHeadConfig

    def __init__(self, config: ParallelHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        self.further = nn.ModuleDict({str(i): BlockLayer(config.layer) for i in range(1, config.num_layers)})
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, config.num_features * config.target_hidden_size))

    @property
    def further_layers(self) -> list[BlockLayer]:
        """The layers behind the first, in order."""
        return [layer for layer in self.further.values() if isinstance(layer, BlockLayer)]

    def mask_feature(self, dtype: torch.dtype) -> Tensor:
        """The feature [1, hidden_size] of a token that is to be drafted."""
        return self.fuse(list(self.mask_hidden[0].to(dtype).chunk(self.config.num_features, -1)))

"""The layers of block drafters: a fusion, and layers whose rows see the text and each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.block_config import BlockHeadConfig
from outrider.heads.feature_networks import HeadLayer
from outrider.heads.published_network import PublishedNetwork


class BlockHeadNetwork(PublishedNetwork):
    """The head of DFlash (2026): features of several layers are fused, and every layer takes keys and values from them.

    Args:
        config: Its shape.
        own_embedding: Whether it brings embeddings.
        own_output: Whether it brings an output layer.
    """

    config: BlockHeadConfig

    def __init__(self, config: BlockHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        hidden, eps = config.hidden_size, config.layer.rms_norm_eps
        self.layers = nn.ModuleList(BlockLayer(config.layer) for _ in range(config.num_layers))
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.norm = nn.RMSNorm(hidden, eps)

    @property
    def own_layers(self) -> list[BlockLayer]:
        """Its layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        fused: Tensor = self.hidden_norm(self.fc(torch.cat(hidden, -1)))
        return fused

    def output_states(self, left: Tensor) -> Tensor:
        normed: Tensor = self.norm(left)
        return normed


class BlockLayer(HeadLayer):
    """A decoder layer; what it takes from the text's features has no norm before attention."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, layer.hidden_size)
        self.input_layernorm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)

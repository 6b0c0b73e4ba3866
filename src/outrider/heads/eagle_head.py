"""EagleHead: runs a published EAGLE head beside its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.cache.added_layers import AddedShape
from outrider.heads.feature_head import FeatureHead
from outrider.heads.feature_networks import FeatureHeadNetwork, LayerInput
from outrider.heads.formats.published import PublishedHead
from outrider.heads.placed_network import PlacedNetwork
from outrider.model.backends.paged import Scores
from outrider.model.lone_layer import Look, attend_alone
from outrider.model.target import Target


class EagleHead(FeatureHead):
    """A head of one layer.

    Args:
        head: As it was published; its network is taken over.
        target: The target.

    Raises:
        HeadMismatchError: It was made for another target.
    """

    def __init__(self, head: PublishedHead, target: Target) -> None:
        super().__init__(target)
        assert isinstance(head.network, FeatureHeadNetwork), head.config
        self._placed = PlacedNetwork(head.folder, head.config, head.network, target)
        self._network, self.aux_layers, self.dtype = self._placed.network, self._placed.aux_layers, self._placed.dtype
        layer, width = head.config.layer, head.config.hidden_size
        self.shape = AddedShape(1, layer.num_key_value_heads, layer.head_dim, feature_size=width)

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        return self._placed.fuse(hidden)

    @torch.inference_mode()
    def keys_and_values(
        self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        rows = self._enter(token_ids, features).rows
        keys, values = self._network.layer.self_attn.keys_and_values(rows, self._placed.tables(positions))
        return keys.to(self._target.dtype), values.to(self._target.dtype)

    @torch.inference_mode()
    def run(self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int], look: Look) -> Tensor:
        read, tables = self._enter(token_ids, features), self._placed.tables(positions)
        attention = self._network.layer.self_attn
        queries = attention.queries(read.rows, tables)
        seen = look(*attention.keys_and_values(read.rows, tables))
        found = attend_alone(queries, seen, Scores(attention.scaling))
        return self._network.layer.leave(read.residual, found)

    @torch.inference_mode()
    def next_feature(self, left: Tensor) -> Tensor:
        return self._network.next_feature(left)

    @torch.inference_mode()
    def logits(self, left: Tensor) -> Tensor:
        return self._placed.logits(left)

    def _enter(self, token_ids: Sequence[int], features: Tensor) -> LayerInput:
        return self._network.enter(self._embed(token_ids), features.to(self.dtype))

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        return self._placed.embed(token_ids)

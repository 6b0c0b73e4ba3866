"""EagleHead: runs a published EAGLE head beside its target, on our kernels where these multiply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.cache.added_layers import AddedShape
from outrider.heads.feature_head import FeatureHead
from outrider.heads.feature_networks import LayerInput
from outrider.heads.feature_pairing import check_embedding, paired_layers
from outrider.heads.formats.published import PublishedHead
from outrider.heads.running import use_kernels
from outrider.model.backends.paged import Scores
from outrider.model.lone_layer import Look, RotaryFactors, attend_alone
from outrider.model.runner import upcast_logits
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
        config = head.config
        self.aux_layers = paired_layers(head.folder, config, target)
        check_embedding(head.folder, config, head.network.embed_tokens, target)
        layer = config.layer
        self.shape = AddedShape(1, layer.num_key_value_heads, layer.head_dim, feature_size=config.hidden_size)
        self._network = head.network.to(target.device, target.dtype)
        self.dtype = use_kernels(self._network, target)
        self._rotary = RotaryFactors(layer, target.device)

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        states = [hidden[layer].to(self.dtype) for layer in self.aux_layers]
        return self._network.fuse(states).to(self._target.dtype)

    @torch.inference_mode()
    def keys_and_values(
        self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        rows = self._enter(token_ids, features).rows
        keys, values = self._network.layer.self_attn.keys_and_values(rows, self._rotary.at(positions, self.dtype))
        return keys.to(self._target.dtype), values.to(self._target.dtype)

    @torch.inference_mode()
    def run(self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int], look: Look) -> Tensor:
        read, tables = self._enter(token_ids, features), self._rotary.at(positions, self.dtype)
        attention = self._network.layer.self_attn
        queries = attention.queries(read.rows, tables)
        seen = look(*attention.keys_and_values(read.rows, tables))
        found = attend_alone(queries, seen, Scores(queries.shape[-1] ** -0.5))
        return self._network.layer.leave(read.residual, found)

    @torch.inference_mode()
    def next_feature(self, left: Tensor) -> Tensor:
        return self._network.next_feature(left)

    @torch.inference_mode()
    def logits(self, left: Tensor) -> Tensor:
        return upcast_logits(self._network.logits(left, self._target.head))

    def _enter(self, token_ids: Sequence[int], features: Tensor) -> LayerInput:
        return self._network.enter(self._embed(token_ids), features.to(self.dtype))

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        own = self._network.embed_tokens
        if own is None:
            return super()._embed(token_ids)
        rows: Tensor = own(torch.tensor(token_ids, device=self._target.device))
        return rows.to(self.dtype)

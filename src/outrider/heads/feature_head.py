"""FeatureHead: runs a head that reads the target's features beside its target, on our kernels where these multiply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.heads.feature_pairing import check_embedding, paired_layers
from outrider.heads.formats.published import PublishedHead
from outrider.heads.running import use_kernels
from outrider.model.backends.paged import Scores, attend
from outrider.model.context import SeenPart
from outrider.model.lone_layer import RotaryFactors
from outrider.model.runner import upcast_logits
from outrider.model.target import Target


class HeadRows(NamedTuple):
    """Rows of the head's layer before attention.

    Attributes:
        queries: [n, num_heads, head_dim]
        keys, values: [n, num_kv_heads, head_dim]
        residual: [n, hidden_size] what attention adds to.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    residual: Tensor


class FeatureHead:
    """A head with attention of its own, which reads each token beside the target's feature of the token before it.

    Args:
        head: As it was published; its network is taken over.
        target: The target.

    Attributes:
        config: Its shape.
        aux_layers: Hidden states of the target that it reads, low to high.
        dtype: That its rows are computed in.

    Raises:
        HeadMismatchError: It was made for another target.
    """

    def __init__(self, head: PublishedHead, target: Target) -> None:
        self.config = head.config
        self.aux_layers = paired_layers(head.folder, head.config, target)
        check_embedding(head.folder, head.config, head.network.embed_tokens, target)
        self._target = target
        self._network = head.network.to(target.device, target.dtype)
        self.dtype = use_kernels(self._network, target)
        self._rotary = RotaryFactors(head.config.layer, target.device)

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Features [n, hidden_size] in the target's dtype, of its hidden states [n, target_hidden_size] by layer."""
        states = [hidden[layer].to(self.dtype) for layer in self.aux_layers]
        return self._network.fuse(states).to(self._target.dtype)

    @torch.inference_mode()
    def keys_and_values(
        self, token_ids: Sequence[int], features: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """What is kept of tokens, [n, num_kv_heads, head_dim] each in the target's dtype.

        Args:
            token_ids: The tokens.
            features: [n, hidden_size] of the tokens before them.
            positions: Of the tokens.
        """
        rows = self._network.enter(self._embed(token_ids), features.to(self.dtype)).rows
        kept = self._network.layer.self_attn.keys_and_values(rows, self._tables(positions))
        return kept[0].to(self._target.dtype), kept[1].to(self._target.dtype)

    @torch.inference_mode()
    def enter(self, token_ids: Sequence[int], features: Tensor, positions: Sequence[int]) -> HeadRows:
        """Rows that are to attend; the arguments are those of `keys_and_values`."""
        read, tables = self._network.enter(self._embed(token_ids), features.to(self.dtype)), self._tables(positions)
        attention = self._network.layer.self_attn
        return HeadRows(attention.queries(read.rows, tables), *attention.keys_and_values(read.rows, tables), read.residual)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """What rows find [n, num_heads, head_dim].

        Args:
            queries: [n, num_heads, head_dim]
            keys, values: [num_slots, num_kv_heads, head_dim]
            mask: [n, num_slots] additive; None where every row sees everything.
        """
        part = SeenPart(slice(0, len(keys)), causal=False, mask=mask)
        return attend(queries.transpose(0, 1), keys, values, part, Scores(queries.shape[-1] ** -0.5))

    @torch.inference_mode()
    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What the layer leaves [n, hidden_size], from `HeadRows.residual` and what `attend` found."""
        return self._network.layer.leave(residual, attended)

    @torch.inference_mode()
    def next_feature(self, left: Tensor) -> Tensor:
        """In place of the target's feature, for the token behind: [n, hidden_size]."""
        return self._network.next_feature(left)

    @torch.inference_mode()
    def logits(self, left: Tensor) -> Tensor:
        """Logits [n, draft_vocab_size] of what the layer left, float32 at least."""
        return upcast_logits(self._network.logits(left, self._target.head))

    def recompute(self, token_ids: Sequence[int], hidden: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What is kept of a whole text, for the proofs: see `AddedLayers`. The first token has no feature before it."""
        features = self.fuse(hidden)
        before = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        return [self.keys_and_values(token_ids, before, range(len(token_ids)))]

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        own = self._network.embed_tokens
        if own is None:
            return self._target.embed(token_ids).to(self.dtype)
        rows: Tensor = own(torch.tensor(token_ids, device=self._target.device))
        return rows.to(self.dtype)

    def _tables(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, head_dim]."""
        return self._rotary.at(positions, self.dtype)

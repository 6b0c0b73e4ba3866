"""UnrolledHead: a head that drafts several tokens behind every token of a text at once, as it will in the engine.

EAGLE-3 (Li et al. 2025) calls this the training-time test, and HASS (Zhang et al. 2025) trains heads of EAGLE so. The row
of token i reads the token beside the target's feature of token i - 1, and drafts token i + 1. The next draft token is made
from token i + 1 beside what the head itself left in row i, and so on. Token i + 1 is that of the text here, with which a
draft goes on as long as it stands. A row sees the first rows of its text up to token i, and its own later rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.heads.feature_networks import FeatureHeadNetwork
from outrider.heads.networks import TargetHead
from outrider.model.lone_layer import RotaryFactors
from outrider.train.depths import shifted


class UnrolledHead(nn.Module):
    """A head in training.

    Args:
        network: Its layers.
    """

    def __init__(self, network: FeatureHeadNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, embeddings: Tensor, hidden: list[Tensor], wanted: Sequence[Tensor], target_head: TargetHead
    ) -> list[Tensor]:
        """Logits [n, draft_vocab_size] of the draft tokens of each depth.

        Args:
            embeddings: [num_texts, num_tokens, hidden_size] of the texts.
            hidden: [num_texts, num_tokens, target_hidden_size] of the target, low to high.
            wanted: By depth: [num_texts, num_tokens] whether a draft token is made from this row. Row 0 has no feature
                before it, and makes none.
            target_head: The target's output layer, for heads without one of their own.
        """
        length = embeddings.shape[1]
        positions = range(length + len(wanted))
        tables = RotaryFactors(self.network.config.layer, embeddings.device).at(positions, torch.float32)
        fused = self.network.fuse(hidden)
        features = torch.cat([torch.zeros_like(fused[:, :1]), fused[:, :-1]], 1)
        kept: list[tuple[Tensor, Tensor]] = []
        logits = []
        for depth, rows in enumerate(wanted):
            here = (tables[0][depth : depth + length], tables[1][depth : depth + length])
            left = self._through(shifted(embeddings, depth), features, here, kept)
            logits.append(self.network.logits(left[rows], target_head))
            features = self.network.next_feature(left)
        return logits

    def _through(
        self, embeddings: Tensor, features: Tensor, tables: tuple[Tensor, Tensor], kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """What the layer leaves [num_texts, num_tokens, hidden_size]. What it keeps of the rows is added to `kept`."""
        layer = self.network.layer
        read = self.network.enter(embeddings, features)
        queries = layer.self_attn.queries(read.rows, tables)
        keys, values = layer.self_attn.keys_and_values(read.rows, tables)
        shared_by = queries.shape[2] // keys.shape[2]
        kept.append((keys.repeat_interleave(shared_by, 2), values.repeat_interleave(shared_by, 2)))
        found = _attended(queries, kept)
        return layer.leave(read.residual.flatten(0, 1), found.flatten(0, 1)).reshape(read.residual.shape)


def _attended(queries: Tensor, kept: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """What rows find [num_texts, num_tokens, num_heads, head_dim] among the first rows of their text up to their own, and
    among their own later rows.

    Args:
        queries: [num_texts, num_tokens, num_heads, head_dim]
        kept: By depth, the keys and values of the rows, of this shape each.
    """
    (first, of_first), *later = kept
    places = torch.arange(queries.shape[1], device=queries.device)
    seen = (places <= places[:, None]) & (places > 0) | (places == places[:, None])  # row 0 sees itself, to be a number
    of_text = torch.einsum("bihd,bjhd->bhij", queries, first).masked_fill(~seen, float("-inf"))
    own = [(queries * keys).sum(-1).transpose(1, 2)[..., None] for keys, _ in later]
    shares = (torch.cat([of_text, *own], -1) * queries.shape[-1] ** -0.5).softmax(-1)
    found = torch.einsum("bhij,bjhd->bihd", shares[..., : len(places)], of_first)
    for depth, (_, values) in enumerate(later):
        found = found + shares[..., len(places) + depth].transpose(1, 2)[..., None] * values
    return found

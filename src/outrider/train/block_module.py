"""TextBlocks: a block drafter that drafts many blocks of a text at once, each as it will in the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.heads.block_network import BlockHeadNetwork, BlockLayer
from outrider.heads.networks import TargetHead
from outrider.model.lone_layer import RotaryFactors


class TextBlocks(nn.Module):
    """A block drafter in training.

    A block begins with a token of the text. Its row r drafts the token that is r tokens ahead of that one. Rows see the
    text before the block and all rows of the block.

    Args:
        network: Its layers, none with a window.
        mask: [hidden_size] the embedding of the mask token.
    """

    mask: Tensor

    def __init__(self, network: BlockHeadNetwork, mask: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mask", mask, persistent=False)

    def forward(
        self, embeddings: Tensor, hidden: list[Tensor], wanted: Sequence[Tensor], target_head: TargetHead
    ) -> list[Tensor]:
        """Logits [n, vocab_size] of the draft tokens of each depth; see `Design`."""
        size = self.network.config.block_size
        places = _places(wanted[0])
        features = self.network.fuse(hidden)
        rows = torch.stack([_taken(embeddings, places), *[self.mask.expand(*places.shape, -1)] * (size - 1)], 2)
        rotary = RotaryFactors(self.network.config.layer, rows.device)
        tables = rotary.at(range(embeddings.shape[1] + size), torch.float32)
        for layer in self.network.own_layers:
            rows = _through(layer, rows, features, places, tables)
        return [
            self.network.logits(rows[:, :, depth][_taken(asked, places) & (places > 0)], target_head)
            for depth, asked in enumerate(wanted, 1)
        ]


def _places(begun: Tensor) -> Tensor:
    """[num_texts, most] where the blocks of each text begin, in ascending order, and 0 where it has no more."""
    most = max(1, int(begun.sum(1).max()))
    places = torch.arange(begun.shape[1], device=begun.device).masked_fill(~begun, begun.shape[1])
    found = places.sort(1).values[:, :most]
    return found.masked_fill(found == begun.shape[1], 0)


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """[num_texts, most, ...] of values [num_texts, num_tokens, ...]."""
    return values[torch.arange(len(values), device=values.device)[:, None], places]


def _through(layer: BlockLayer, rows: Tensor, features: Tensor, places: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """What a layer leaves of the rows [num_texts, most, block_size, hidden_size] of blocks.

    Args:
        layer: Which.
        rows: Of the blocks.
        features: [num_texts, num_tokens, hidden_size] of the texts.
        places: [num_texts, most] where the blocks begin.
        tables: Cosines and sines by position.
    """
    texts, most, size, _ = rows.shape
    of_text, attention = slice(0, features.shape[1]), layer.self_attn
    keys, values = attention.keys_and_values(features, (tables[0][of_text], tables[1][of_text]))
    normed = layer.input_layernorm(rows).flatten(0, 2)
    positions = (places[..., None] + torch.arange(size, device=rows.device)).flatten()
    here = (tables[0][positions], tables[1][positions])
    queries = attention.queries(normed, here)
    queries = queries.reshape(texts, most, size, *queries.shape[1:])
    own = [each.reshape(texts, most, size, *each.shape[1:]) for each in attention.keys_and_values(normed, here)]
    shared_by = queries.shape[3] // keys.shape[2]
    keys, values = (each.repeat_interleave(shared_by, 2) for each in (keys, values))
    own_keys, own_values = (each.repeat_interleave(shared_by, 3) for each in own)
    before = torch.arange(features.shape[1], device=rows.device) < places[..., None]
    scores = torch.einsum("bmihd,bjhd->bmhij", queries, keys).masked_fill(~before[:, :, None, None], float("-inf"))
    among = torch.einsum("bmihd,bmjhd->bmhij", queries, own_keys)
    shares = (torch.cat([scores, among], -1) * queries.shape[-1] ** -0.5).softmax(-1)
    found = torch.einsum("bmhij,bjhd->bmihd", shares[..., of_text], values)
    found = found + torch.einsum("bmhij,bmjhd->bmihd", shares[..., features.shape[1] :], own_values)
    return layer.leave(rows.flatten(0, 2), found.flatten(0, 2)).reshape(rows.shape)

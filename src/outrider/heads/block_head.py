"""BlockHead: runs a head that drafts a whole block in one pass beside its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.heads.block_config import BlockHeadConfig, BlockReach
from outrider.heads.block_network import BlockHeadNetwork, BlockLayer
from outrider.heads.formats.published import PublishedHead
from outrider.heads.placed_network import PlacedNetwork
from outrider.model.backends.paged import Scores
from outrider.model.context import additive
from outrider.model.lone_layer import SeenRows, attend_alone
from outrider.model.target import Target


@dataclass(frozen=True)
class Block:
    """A block that is to be drafted.

    Attributes:
        anchor: The last token of the text, which the block begins with.
        position: Where that stands: so many tokens come before the block.
        context: By number of a layer, what is kept of these tokens: keys and values [position, num_kv_heads, head_dim].
        places: Which tokens are wanted; 0 is the one behind the anchor.
    """

    anchor: int
    position: int
    context: Callable[[int], tuple[Tensor, Tensor]]
    places: range


class BlockHead:
    """A head whose layers take keys and values of the text from the target's features, and draft at mask tokens.

    Args:
        head: As it was published; its network is taken over.
        target: The target.

    Attributes:
        config: Its shape.
        aux_layers: Hidden states of the target that it reads, low to high.

    Raises:
        HeadMismatchError: It was made for another target.
    """

    def __init__(self, head: PublishedHead, target: Target) -> None:
        assert isinstance(head.network, BlockHeadNetwork), head.config
        self.config: BlockHeadConfig = head.network.config
        self._placed = PlacedNetwork(head.folder, self.config, head.network, target)
        self._layers, self._target = head.network.own_layers, target
        self.aux_layers = self._placed.aux_layers

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Features [n, hidden_size] in the target's dtype, of its hidden states [n, target_hidden_size] by layer."""
        return self._placed.fuse(hidden)

    @torch.inference_mode()
    def keys_and_values(self, features: Tensor, positions: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """What each layer keeps of tokens of the text, [n, num_kv_heads, head_dim] each in the target's dtype.

        Args:
            features: [n, hidden_size] of the tokens, from `fuse`.
            positions: Of the tokens.
        """
        tables, rows, dtype = self._placed.tables(positions), features.to(self._placed.dtype), self._target.dtype
        kept = [layer.self_attn.keys_and_values(rows, tables) for layer in self._layers]
        return [(keys.to(dtype), values.to(dtype)) for keys, values in kept]

    @torch.inference_mode()
    def draft(self, blocks: Sequence[Block]) -> list[Tensor]:
        """Logits [len(places), draft_vocab_size] of the wanted tokens of each block, float32 at least.

        A block is computed whole, as it was in training, however few of its tokens are wanted.
        """
        size, masks = self.config.block_size, [self.config.mask_token_id] * (self.config.block_size - 1)
        rows = self._placed.embed([token for block in blocks for token in (block.anchor, *masks)])
        tables = self._placed.tables([block.position + i for block in blocks for i in range(size)])
        for number, (layer, reach) in enumerate(zip(self._layers, self.config.reaches, strict=True)):
            rows = self._through(layer, reach, rows, tables, [(block.position, block.context(number)) for block in blocks])
        wanted = [i * size + 1 + place for i, block in enumerate(blocks) for place in block.places]
        return list(torch.split(self._placed.logits(rows[wanted]), [len(block.places) for block in blocks]))

    def recompute(self, token_ids: Sequence[int], hidden: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What is kept of a whole text, for the proofs: see `AddedLayers`."""
        return self.keys_and_values(self.fuse(hidden), range(len(token_ids)))

    def _through(
        self,
        layer: BlockLayer,
        reach: BlockReach,
        rows: Tensor,
        tables: tuple[Tensor, Tensor],
        contexts: Sequence[tuple[int, tuple[Tensor, Tensor]]],
    ) -> Tensor:
        """What a layer leaves of the rows [num_blocks * block_size, hidden_size] of blocks, given where each of them begins
        and what is kept of the text before it."""
        normed, size = layer.input_layernorm(rows), self.config.block_size
        queries = layer.self_attn.queries(normed, tables)
        own = layer.self_attn.keys_and_values(normed, tables)
        seen = []
        for i, (position, context) in enumerate(contexts):
            block = slice(i * size, (i + 1) * size)
            keys, values = (torch.cat([old.to(new.dtype), new[block]]) for old, new in zip(context, own, strict=True))
            seen.append(SeenRows(block, keys, values, _mask(reach, position, queries[block])))
        return layer.leave(rows, attend_alone(queries, seen, Scores(layer.self_attn.scaling)))


def _mask(reach: BlockReach, position: int, rows: Tensor) -> Tensor | None:
    """What the rows of a block that begins at a position see of the text before it and of the block: an additive mask
    [block_size, position + block_size]; None for all."""
    if reach.window is None and not reach.causal:
        return None
    slots = torch.arange(position + len(rows), device=rows.device)
    ahead = slots[None] - slots[position:, None]
    seen = ahead <= 0 if reach.causal else torch.ones_like(ahead, dtype=torch.bool)
    return additive(seen if reach.window is None else seen & (ahead.abs() < reach.window), rows.dtype)

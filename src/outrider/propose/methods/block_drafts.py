"""Drafting with a head that fills in a block of tokens at once, and keeps keys and values of the text beside the target's.

The slot of token i holds what the target's feature of token i gives in each layer of the head; its own rows are kept
nowhere. Each place of a block is guessed given the text alone, whatever stands at the other places of the draft. So the law
of a place is its softmax, and a draft behind one of another proposer takes the places that come after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.cache.added_layers import AddedShape
from outrider.draft import Draft
from outrider.heads.block_head import Block, BlockHead
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.propose.bridge import Bridge
from outrider.propose.methods.beside_target import ProposerBesideTarget
from outrider.propose.methods.feature_rows import TextRows, unread_tokens
from outrider.propose.trees.by_depth import grow_by_depth, wanted_places
from outrider.propose.trees.growth import Growth


class BlockHeadProposer(ProposerBesideTarget):
    """Greedy, drawn or coupled chains and trees from a head that drafts blocks, batched over sequences.

    Args:
        head: The head.
        target: Its target.
        bridge: From the tokens that the head drafts to the target's.
        min_confidence: Nothing is drafted behind a token whose own draft probability is smaller.
    """

    def __init__(self, head: BlockHead, target: Target, bridge: Bridge, min_confidence: float = 0.0) -> None:
        layer = head.config.layer
        shape = AddedShape(head.config.num_layers, layer.num_key_value_heads, layer.head_dim)
        super().__init__(shape, head.recompute, head.aux_layers, target, bridge, min_confidence)
        self._head = head

    def _read(self, read: Sequence[TextRows], states: Mapping[int, Tensor]) -> None:
        positions = [position for text in read for position in text.positions]
        kept, first = self._head.keys_and_values(self._head.fuse(states), positions), 0
        for text in read:
            end = first + len(text)
            for number, (keys, values) in enumerate(kept):
                self.added.write(text.kv, number, text.start, keys[first:end], values[first:end])
            self.added.fill(text.kv, text.stop)
            first = end

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growths = [self._begin(request) for request in requests]
        begun = [growth for growth in growths if growth.growing]
        if begun:
            drafted = self._head.draft([self._block(growth) for growth in begun])
            grow_by_depth(begun, [self._bridge.logits(rows) for rows in drafted], noise)
        return [growth.draft() for growth in growths]

    def _begin(self, request: ProposeRequest) -> Growth:
        """An empty draft, no longer than what is left of the block."""
        left = self._head.config.block_size - (request.length - self.added.num_filled(request.sequence.kv))
        return self._growth(request, min(request.max_depth, left), 1)

    def _block(self, growth: Growth) -> Block:
        sequence = growth.request.sequence
        held = self.added.num_filled(sequence.kv)
        anchor, *others = unread_tokens(growth.request, held)

        def context(layer: int) -> tuple[Tensor, Tensor]:
            return self.added.read(sequence.kv, layer, held)

        return Block(anchor, held, context, wanted_places(growth, len(others)))

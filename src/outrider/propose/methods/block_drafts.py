"""Drafting with a head that fills in a block of tokens at once, and keeps keys and values of the text beside the target's.

The slot of token i holds what the target's feature of token i gives in each layer of the head; its own rows are kept
nowhere. Each place of a block is guessed given the text alone, whatever stands at the other places of the draft. So the law
of a place is its softmax, and a draft behind one of another proposer takes the places that come after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.added_layers import AddedLayers, AddedShape
from outrider.draft import Draft
from outrider.heads.block_head import Block, BlockHead
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, ObservedRows, Proposer, ProposeRequest, Requirements
from outrider.propose.bridge import Bridge
from outrider.propose.methods.feature_rows import TextRows
from outrider.propose.trees.by_depth import grow_by_depth, wanted_places
from outrider.propose.trees.growth import Growth


class BlockHeadProposer(Proposer):
    """Greedy, drawn or coupled chains and trees from a head that drafts blocks, batched over sequences.

    Args:
        head: The head.
        target: Its target.
        bridge: From the tokens that the head drafts to the target's.
        min_confidence: Nothing is drafted behind a token whose own draft probability is smaller.
    """

    def __init__(self, head: BlockHead, target: Target, bridge: Bridge, min_confidence: float = 0.0) -> None:
        self._head = head
        self._bridge = bridge
        self._min_confidence = min_confidence
        layer = head.config.layer
        shape = AddedShape(head.config.num_layers, layer.num_key_value_heads, layer.head_dim)
        self.added: AddedLayers = target.add_layers(shape, head.recompute, head.aux_layers)
        self.requires = Requirements(aux_layers=head.aux_layers, added_layers=self.added)

    @torch.inference_mode()
    def observe(self, rows: Sequence[ObservedRows]) -> None:
        read = [text for seen in rows if (text := TextRows.of(seen)).start == self.added.num_filled(text.kv)]
        if not read:
            return
        layers = self._head.aux_layers
        states = {layer: torch.cat([text.hidden(layer) for text in read]) for layer in layers}
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
        growths = [self._growth(request) for request in requests]
        begun = [growth for growth in growths if growth.growing]
        if begun:
            drafted = self._head.draft([self._block(growth) for growth in begun])
            grow_by_depth(begun, [self._bridge.logits(rows) for rows in drafted], noise)
        return [growth.draft() for growth in growths]

    def _growth(self, request: ProposeRequest) -> Growth:
        """An empty draft where the head has not read the text up to its last token, or where that is the only one."""
        held = self.added.num_filled(request.sequence.kv)
        ready = held == len(request.sequence.token_ids) - 1 and held > 0
        depth = min(request.max_depth, self._head.config.block_size - 1 - len(request.path))
        return Growth.of(request, request.budget if ready else 0, depth, self._min_confidence)

    def _block(self, growth: Growth) -> Block:
        sequence = growth.request.sequence
        held = self.added.num_filled(sequence.kv)

        def context(layer: int) -> tuple[Tensor, Tensor]:
            return self.added.read(sequence.kv, layer, held)

        return Block(sequence.token_ids[-1], held, context, wanted_places(growth, len(growth.request.path)))

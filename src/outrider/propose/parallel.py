"""Heads that draft several tokens in one pass: DFlash and P-EAGLE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from outrider.cache.memory import AddedShape
from outrider.draft import Draft
from outrider.heads.block import Block, BlockHead, Continuation, ParallelHead
from outrider.heads.formats.published import PublishedHead
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.beside_target import FeatureTextProposer, ProposerBesideTarget, read_texts
from outrider.propose.bridge import Bridge
from outrider.propose.eagle import FeatureMethod
from outrider.propose.feature_rows import TextRows, unread_tokens
from outrider.propose.trees.growth import Growth, grow_by_depth, wanted_places

# --- DFlash: a head drafts a whole block of tokens in one pass, from features of several of the target's layers (2026).


class DFlash(FeatureMethod):
    """A published DFlash head drafts a whole block of tokens in one pass, from what several of the target's layers left.

    Attributes:
        model: Local folder of the head, as z-lab or the speculators package publish it; or a GGUF file. A
            draft is shorter than its block.
    """

    name: ClassVar[str] = "dflash"
    default_num_draft_tokens: ClassVar[int] = 15  # a whole block of 16 rows, or of fewer
    drafts_in_one_pass: ClassVar[bool] = True

    def proposer(self, head: PublishedHead, target: Target, bridge: Bridge) -> Proposer:
        return BlockHeadProposer(BlockHead(head, target), target, bridge, self.min_confidence)


# --- P-EAGLE: a head of EAGLE-3's kind drafts several tokens in one pass of its layers (2026).


class PEagle(FeatureMethod):
    """A published P-EAGLE head drafts several tokens in one pass, from what entered three of the target's layers.

    Attributes:
        model: Local folder of the head, as the speculators package publishes it.
    """

    name: ClassVar[str] = "peagle"
    drafts_in_one_pass: ClassVar[bool] = True

    def proposer(self, head: PublishedHead, target: Target, bridge: Bridge) -> Proposer:
        return ParallelHeadProposer(ParallelHead(head, target), target, bridge, self.min_confidence)


# --- Drafting with a head that fills in a block of tokens at once, and keeps keys and values of the text beside the
# target's.
#
# The slot of token i holds what the target's feature of token i gives in each layer of the head; its own rows are kept
# nowhere. Each place of a block is guessed given the text alone, whatever stands at the other places of the draft. So
# the law of a place is its softmax, and a draft behind one of another proposer takes the places that come after that.


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


# --- Drafting with a head that guesses several tokens in one pass of all its layers, from masks behind the text.
#
# Each place is guessed given the text alone, whatever stands at the other places of the draft. So the law of a place is
# its softmax, and a draft behind one of another proposer takes the places that come after that.


class ParallelHeadProposer(FeatureTextProposer):
    """Greedy, drawn or coupled chains and trees, batched over sequences. The arguments are those of
    `FeatureTextProposer`."""

    def __init__(self, head: ParallelHead, target: Target, bridge: Bridge, min_confidence: float = 0.0) -> None:
        super().__init__(head, target, bridge, min_confidence)
        self._head = head

    def _compute(self, read: Sequence[TextRows], before: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        return read_texts(self.added, self._head, read, before, states)

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growths = [self._growth(request, request.max_depth, 1) for request in requests]
        begun = [growth for growth in growths if growth.growing]
        if begun:
            drafted = self._head.draft([self._continuation(growth) for growth in begun])
            grow_by_depth(begun, [self._bridge.logits(rows) for rows in drafted], noise)
        return [growth.draft() for growth in growths]

    def _continuation(self, growth: Growth) -> Continuation:
        sequence = growth.request.sequence
        held = self.added.num_filled(sequence.kv)
        token, *others = unread_tokens(growth.request, held)

        def context(layer: int) -> tuple[Tensor, Tensor]:
            return self.added.read(sequence.kv, layer, held)

        return Continuation(token, held, self._last_features(sequence), context, wanted_places(growth, len(others)))

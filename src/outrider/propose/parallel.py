"""Heads that draft several tokens in one pass: DFlash and P-EAGLE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from outrider.draft import Draft
from outrider.heads.block import Block, BlockRunner
from outrider.heads.formats.published import PublishedHead
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.beside_target import ProposerBesideTarget, unread_tokens
from outrider.propose.bridge import Bridge
from outrider.propose.eagle import FeatureMethod
from outrider.propose.trees.growth import Growth, grow_by_depth, wanted_places


class BlockMethod(FeatureMethod):
    """A published head drafts several tokens in one pass."""

    drafts_in_one_pass: ClassVar[bool] = True

    def proposer(self, head: PublishedHead, target: Target, bridge: Bridge) -> Proposer:
        return BlockProposer(BlockRunner.of(head, target), bridge, self.min_confidence)


class DFlash(BlockMethod):
    """A published DFlash head drafts a whole block of tokens in one pass, from what several of the target's layers left.

    Attributes:
        model: Local folder of the head, as z-lab or the speculators package publish it; or a GGUF file. A
            draft is shorter than its block.
    """

    name: ClassVar[str] = "dflash"
    default_num_draft_tokens: ClassVar[int] = 15  # a whole block of 16 rows, or of fewer


class PEagle(BlockMethod):
    """A published P-EAGLE head drafts several tokens in one pass, from what entered three of the target's layers.

    Attributes:
        model: Local folder of the head, as the speculators package publishes it.
    """

    name: ClassVar[str] = "peagle"


class BlockProposer(ProposerBesideTarget):
    """Greedy, drawn or coupled chains and trees from a head that drafts blocks, batched over sequences. The arguments are
    those of `ProposerBesideTarget`.

    Each place of a block is guessed given the text alone, whatever stands at the other places of the draft. So the law of a
    place is its softmax, and a draft behind one of another proposer takes the places that come after that.
    """

    _head: BlockRunner

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
        size = self._head.network.block_size
        read = request.length - self.added.num_filled(request.sequence.kv)
        return self._growth(request, 1, None if size is None else size - read)

    def _block(self, growth: Growth) -> Block:
        sequence, held = growth.request.sequence, self.added.num_filled(growth.request.sequence.kv)
        token, *others = unread_tokens(growth.request, held)
        feature = self._last_features(sequence) if self.added.shape.feature_size else None

        return Block(
            token,
            held,
            lambda layer: self.added.read(sequence.kv, layer, held),
            wanted_places(growth, len(others)),
            feature,
        )

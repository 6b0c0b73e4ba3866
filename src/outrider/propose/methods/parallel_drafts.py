"""Drafting with a head that guesses several tokens in one pass of all its layers, from masks behind the text.

Each place is guessed given the text alone, whatever stands at the other places of the draft. So the law of a place is its
softmax, and a draft behind one of another proposer takes the places that come after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.heads.parallel_head import Continuation, ParallelHead
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.propose.bridge import Bridge
from outrider.propose.methods.feature_rows import TextRows, unread_tokens
from outrider.propose.methods.feature_texts import FeatureTextProposer, read_texts
from outrider.propose.trees.by_depth import grow_by_depth, wanted_places
from outrider.propose.trees.growth import Growth


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

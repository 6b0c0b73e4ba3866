"""Drafting with a head that reads the target's features and that our kernels compute in one pass a level.

Keys and values of a draft lie in blocks of its own, behind those of the text, so no level of it copies what is kept of the
text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.heads.fused_head import FusedHead, Left
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.propose.bridge import Bridge
from outrider.propose.methods.feature_drafts import FeatureHeadProposer
from outrider.propose.methods.feature_rows import TextRows, unread_tokens
from outrider.propose.methods.fused_rows import BlockRows, pass_through


class FusedHeadProposer(FeatureHeadProposer[BlockRows]):
    """Drafts from a head in our kernels; the arguments are those of `FeatureHeadProposer`."""

    def __init__(self, head: FusedHead, target: Target, bridge: Bridge, min_confidence: float = 0.0) -> None:
        super().__init__(head, target, bridge, min_confidence)
        self._head = head
        self._free: Iterator[int] = iter(())
        head.kernel.use_memory(self.added.memory)

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        self._free = iter(self.added.draft_blocks)  # no earlier draft is growing any more
        return super().propose(requests, noise)

    def _compute(self, read: Sequence[TextRows], before: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        tokens, positions = [text.token_ids for text in read], [text.positions for text in read]
        slots = [slot for text in read for slot in self.added.writable_slots(text.kv, text.start, len(text))]
        return self._head.read(tokens, positions, before, states, slots)

    def _begin(self, request: ProposeRequest) -> BlockRows:
        growth = self._growth(request, request.max_depth, 1)
        kv = request.sequence.kv
        held = self.added.num_filled(kv)
        drafting = BlockRows(growth, held, unread_tokens(request, held))
        if growth.growing:
            if drafting.begin(kv, self.added, self._free):
                drafting.features[-1] = self._last_features(request.sequence)
            else:
                growth.level = []
        return drafting

    def _run(self, work: Sequence[tuple[BlockRows, list[int]]]) -> None:
        self._leave(work, wanted=False)

    def _guess(self, work: Sequence[tuple[BlockRows, list[int]]]) -> Tensor:
        return self._leave(work, wanted=True).logits

    def _leave(self, work: Sequence[tuple[BlockRows, list[int]]], *, wanted: bool) -> Left:
        rows = [(drafting, row) for drafting, own in work for row in own]
        read = torch.stack([drafting.features[drafting.parent(row)].to(self._head.dtype) for drafting, row in rows])
        left = self._head.run(pass_through(work, wanted=wanted), read)
        for (drafting, row), features in zip(rows, left.features, strict=True):
            drafting.features[row] = features
        return left

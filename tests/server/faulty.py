"""A method whose proposer fails now and then: it raises, or answers nonsense of many kinds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from outrider.draft import Draft, Law
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.settings import Method, ProposerContext


class Faulty(Method):
    """Settings.

    Attributes:
        rate: How often an answer is faulty.
    """

    name: ClassVar[str] = "faulty"

    rate: float = 0.3

    def build(self, context: ProposerContext) -> Proposer:
        return FaultyProposer(self.rate, context.target.vocab_size)


class FaultyProposer(Proposer):
    """Guesses at random, so that most drafts are refused, and some of them are none."""

    def __init__(self, rate: float, vocab_size: int) -> None:
        self._rate, self._vocab_size, self._chance = rate, vocab_size, random.Random(5)

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafts: list[Any] = [self._draft(request) for request in requests]
        if self._chance.random() > self._rate:
            return drafts
        place, kind = self._chance.randrange(len(drafts)), self._chance.randrange(7)
        if kind == 0:
            raise RuntimeError("this proposer fails now and then")
        if kind == 1:
            return drafts[1:]
        draft = drafts[place]
        drafts[place] = [
            None,
            replace(draft, token_ids=(self._vocab_size, *draft.token_ids[1:])),
            replace(draft, parents=(3, *draft.parents[1:])),
            replace(draft, laws=(Law.SAMPLED,) * len(draft), draft_probs=torch.full((len(draft), 3), float("nan"))),
            Draft.chain((1,) * (requests[place].budget + 3), Law.OPAQUE),
        ][kind - 2]
        return drafts

    def _draft(self, request: ProposeRequest) -> Draft:
        tokens = [self._chance.randrange(self._vocab_size) for _ in range(request.budget)]
        return Draft.chain(tuple(tokens), Law.OPAQUE)

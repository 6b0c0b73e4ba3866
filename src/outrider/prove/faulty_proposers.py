"""Planted faults: proposers that change the drafts of a draft model, and noise that breaks off behind a drawn token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from outrider.draft import Draft, Law
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest, ProposerSequence
from outrider.propose.method import Method, ProposerContext
from outrider.propose.methods.draft_model import DraftModel, DraftModelProposer
from outrider.prove.tiny import raise_norms
from outrider.verify.noise import Key, NoiseSource, Stream


class _Around(Proposer):
    """A draft model whose drafts are changed before the engine sees them.

    Args:
        inner: The draft model.
    """

    def __init__(self, inner: DraftModelProposer) -> None:
        self._inner = inner
        self.runner = inner.runner

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafts = self._inner.propose(requests, noise)
        return [self.changed(draft, request) for draft, request in zip(drafts, requests, strict=True)]

    def changed(self, draft: Draft, request: ProposeRequest) -> Draft:
        raise NotImplementedError

    def finish(self, sequence: ProposerSequence) -> None:
        self._inner.finish(sequence)

    def check_integrity(self) -> None:
        self._inner.check_integrity()


class MergedProposer(_Around):
    """Adds a guess of up to two tokens to the tree of a draft model. The guess depends on the length of the text alone.

    The first token stands below the root, and it may repeat a sampled sibling. The second one follows it and is declared
    opaque.
    """

    def changed(self, draft: Draft, request: ProposeRequest) -> Draft:
        token = request.length % 3
        extra = min(2, request.max_depth, request.budget - len(draft))
        if not len(draft) or extra <= 0:
            return draft
        size, probs = len(draft), draft.draft_probs
        return Draft(
            (*draft.token_ids, *(token, (token + 1) % 3)[:extra]),
            (*draft.parents, *(-1, size)[:extra]),
            (*draft.laws, *(Law.DETERMINISTIC, Law.OPAQUE)[:extra]),
            None if probs is None else torch.cat([probs, probs.new_zeros(extra, probs.shape[-1])]),
        )


class FaultyProposer(_Around):
    """A draft model whose drafts are spoilt wherever the length of the text is odd."""

    def __init__(self, inner: DraftModelProposer, fault: str) -> None:
        super().__init__(inner)
        self._fault = fault

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafts = super().propose(requests, noise)
        if self._fault == "raises" and any(request.length % 2 == 1 for request in requests):
            raise RuntimeError("planted fault")
        return drafts

    def changed(self, draft: Draft, request: ProposeRequest) -> Draft:
        if request.length % 2 == 0 or not len(draft) or self._fault == "raises":
            return draft
        if self._fault == "truncated":
            return draft.first(1)
        if self._fault == "token outside":
            return Draft((*draft.token_ids[:-1], 99), draft.parents, draft.laws, draft.draft_probs)
        assert draft.draft_probs is not None
        probs = draft.draft_probs.clone()
        if self._fault == "nan row":
            probs[-1] = float("nan")
            return Draft(draft.token_ids, draft.parents, draft.laws, probs)
        size = len(draft)
        longer = torch.cat([probs, probs[-1:]])
        return Draft(
            (*draft.token_ids, draft.token_ids[-1]), (*draft.parents, size - 1), (*draft.laws, draft.laws[-1]), longer
        )


class BreakingNoise:
    """Chance that raises when a proposer draws on behind a certain token, as a proposer does that knows no more of it.

    Args:
        source: Where chance comes from.
        token: The token.

    Attributes:
        num_breaks: How often it raised.
    """

    def __init__(self, source: NoiseSource, token: int) -> None:
        self._source = source
        self._token = token
        self._broken: set[tuple[int, int]] = set()  # owner and drafter whose last draw was the token
        self.num_breaks = 0

    def bernoulli(self, probability: Tensor, keys: Sequence[Key]) -> Tensor:
        return self._source.bernoulli(probability, keys)

    def categorical(self, probs: Tensor, keys: Sequence[Key]) -> Tensor:
        drawing = [(key.owner, key.drafter) if key.stream is Stream.DRAFT else None for key in keys]
        if not self._broken.isdisjoint(drawing):
            self.num_breaks += 1
            self._broken.difference_update(drawing)
            raise RuntimeError("planted fault behind a drawn token")
        tokens = self._source.categorical(probs, keys)
        for who, key, token in zip(drawing, keys, tokens.tolist(), strict=True):
            if who is None:  # the draft is checked, and whoever draws next begins another one
                self._broken = {broken for broken in self._broken if broken[0] != key.owner}
            elif token == self._token:
                self._broken.add(who)
        return tokens

    def forget(self, owner: int) -> None:
        self._source.forget(owner)

    def mark(self) -> None:
        self._source.mark()

    def rewind(self) -> None:
        self._source.rewind()


class _OfDraftModel(Method):
    """The settings of a method that changes the drafts of a draft model.

    Attributes:
        model: The draft model.
    """

    name: ClassVar[str] = "_prove_around"

    model: str

    def inner(self, context: ProposerContext) -> DraftModelProposer:
        """The draft model, in float64 throughout."""
        proposer = context.build(DraftModel(model=self.model))
        assert isinstance(proposer, DraftModelProposer)
        raise_norms(proposer.runner.loaded.model)
        return proposer


class Merged(_OfDraftModel):
    """The settings of `MergedProposer`."""

    name: ClassVar[str] = "_prove_merged"

    def build(self, context: ProposerContext) -> Proposer:
        return MergedProposer(self.inner(context))


class Faulty(_OfDraftModel):
    """The settings of `FaultyProposer`.

    Attributes:
        fault: How it fails, one of `FAULTS`.
    """

    name: ClassVar[str] = "_prove_faulty"

    fault: Literal["raises", "nan row", "truncated", "token outside", "too long"]

    def build(self, context: ProposerContext) -> Proposer:
        return FaultyProposer(self.inner(context), self.fault)

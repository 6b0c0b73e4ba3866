"""Any small model drafts for any target, whatever its vocabulary (Timor et al. 2025).

The paper has two ways that need nothing but two tokenizers. In one (TLI, here "tokens") the draft keeps to the tokens that
both models write alike: what it says of them, renormalised, is the law that its drafts are drawn from, so they are checked
like any drawn draft. In the other (SLEM, here "text") it writes freely in its own tokens, and the target's tokenizer says
which tokens of the target write the same; no law is known of these, so the target draws and follows them while it agrees.
That is likeliest where the draft takes its own most likely tokens, so it always does, where the paper draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import Field

from outrider.draft import EMPTY, Draft, Law
from outrider.errors import ContradictionError, VocabularyMismatchError
from outrider.model.runner import ModelRunner
from outrider.model.vocabulary import ModelVocabulary
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.bridge import SharedTokens
from outrider.propose.draft_model import DraftModel, DraftModelProposer, PartialDraft, Work
from outrider.propose.draft_vocabulary import DraftVocabulary
from outrider.propose.settings import ProposerContext
from outrider.propose.tree import CHAIN
from outrider.verify.logits import argmax

#: The draft writes so many tokens of its own at most for each one that is wanted of the target.
_MOST_OWN = 6


class CrossVocabulary(DraftModel):
    """A smaller model of another vocabulary drafts.

    Attributes:
        match: "tokens" drafts the tokens that both models write alike; "text" drafts any text, and checks it by equality.
            `outrider vocabulary TARGET DRAFT` says which suits a pair.
    """

    name: ClassVar[str] = "cross_vocabulary"
    instead_of_tree: ClassVar[str] = 'Use match="tokens", or leave it out.'

    match: Literal["tokens", "text"] = Field("tokens", description="Use tokens or text.")

    @property
    def allows_tree(self) -> bool:
        return self.match == "tokens"

    def build(self, context: ProposerContext) -> Proposer:
        if self.match == "text" and self.min_confidence > 0.0:
            problem = 'match="text" drafts whole tokens of the target, which have no probability of their own'
            raise ContradictionError("min_confidence", self.min_confidence, problem, "Leave it out.")
        theirs = context.target
        target = ModelVocabulary(theirs.tokenizer, theirs.name, theirs.vocab_size, theirs.eos_token_ids)
        runner = self.load(context)
        loaded = runner.loaded
        draft = ModelVocabulary(loaded.tokenizer, loaded.name, loaded.vocab_size, loaded.eos_token_ids)
        bridge = SharedTokens(target, draft, by_text=self.match == "text")
        if self.match == "tokens":
            _check_shared(bridge)
            return DraftModelProposer(
                runner, bridge, context.max_num_batched_tokens, self.min_confidence, self.drafted_tokens(runner)
            )
        _check_writable(bridge)
        return TextProposer(runner, bridge, context.max_num_batched_tokens, self.drafted_tokens(runner))


@dataclass
class _Writing:
    """Holds what the draft writes for one request."""

    request: ProposeRequest  # the request
    text: bytes = b""  # the bytes so far
    token_ids: list[int] = field(default_factory=list)  # the target's tokens that write them, as many as are wanted
    num_own: int = 0  # how many tokens of its own the draft has chosen
    ended: bool = False  # whether it has written enough, or what the target cannot

    @property
    def most(self) -> int:
        """The target's tokens that are wanted."""
        return min(self.request.budget, self.request.max_depth)


class TextProposer(DraftModelProposer):
    """Chains of the text that a draft model writes in its own tokens, in the target's tokens."""

    def __init__(
        self,
        runner: ModelRunner,
        bridge: SharedTokens,
        max_num_batched_tokens: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        super().__init__(runner, bridge, max_num_batched_tokens, vocabulary=vocabulary)
        self._target, self._draft = bridge.target, bridge.draft

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        own = [_in_own_tokens(request) for request in requests]
        writings = [_Writing(request) for request in requests]
        drafting = [self.begin_draft(request, own) for request in own]
        by_drafting = {id(d): writing for d, writing in zip(drafting, writings, strict=True)}
        ready = self.run(self.due([d for d in drafting if d.growth.budget > 0]))
        while ready is not None:
            drafts, logits = ready
            tokens: list[int] = argmax(logits).tolist()
            for d, token in zip(drafts, tokens, strict=True):
                self._write(by_drafting[id(d)], token, d.growth.budget)
            going_on = [pair for pair in zip(drafts, tokens, strict=True) if not by_drafting[id(pair[0])].ended]
            ready = self.run([_next_row(d, token) for d, token in going_on])
        return [_draft(writing) for writing in writings]

    def _write(self, writing: _Writing, token: int, most_own: int) -> None:
        """Add what the draft's token writes, and spell all of it anew: the tokenizer may join it with what came before."""
        writing.num_own += 1
        piece = self._draft.pieces[token]
        text = writing.text + (piece or b"")
        spelled = self._target.spell(text)
        if piece is None:
            writing.ended = True
            if token == self._draft.eos and self._target.eos is not None:
                writing.token_ids.append(self._target.eos)
        elif self._target.written(spelled) != text:
            writing.ended = True
        else:
            writing.text, writing.token_ids = text, spelled
            writing.ended = len(spelled) >= writing.most or writing.num_own >= most_own


def _in_own_tokens(request: ProposeRequest) -> ProposeRequest:
    """Returns the same wish as a chain of the draft's own tokens."""
    most = _MOST_OWN * min(request.budget, request.max_depth)
    return replace(request, budget=most, max_depth=most, builder=CHAIN)


def _next_row(d: PartialDraft, token: int) -> Work:
    return Work(d, d.text.segment([token]), True)


def _draft(writing: _Writing) -> Draft:
    return Draft.chain(writing.token_ids[: writing.most], Law.OPAQUE) if writing.token_ids else EMPTY


def _check_shared(bridge: SharedTokens) -> None:
    if any(twin >= 0 for id, twin in enumerate(bridge.twins) if bridge.target.pieces[id] is not None):
        return
    raise VocabularyMismatchError(
        bridge.draft.name,
        f"no token of it writes the same as a token of {bridge.target.name}",
        'Use another draft model, or match="text".',
    )


def _check_writable(bridge: SharedTokens) -> None:
    if any(piece and bridge.target.can_write(piece) for piece in bridge.draft.pieces):
        return
    raise VocabularyMismatchError(
        bridge.draft.name, f"the tokens of {bridge.target.name} write nothing that it writes", "Use another draft model."
    )

"""Prompt lookup (Saxena 2023; Yang et al. 2023): drafts what followed the last occurrence of the latest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, model_validator

from outrider.draft import EMPTY, Draft, Law
from outrider.errors import ContradictionError
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest, ProposerSequence
from outrider.propose.method import Method, ProposerContext


class Ngram(Method):
    """The continuation of the latest earlier occurrence of the longest matching suffix, in the text or the source that an
    encoder has read for it; needs no model.

    Attributes:
        max_match: Longest suffix that is looked up.
        min_match: Shortest one.
    """

    name: ClassVar[str] = "ngram"
    takes_tree: ClassVar[bool] = False
    grows_from_probabilities: ClassVar[bool] = False
    instead_of_tree: ClassVar[str] = "Use another method."

    max_match: int = Field(5, ge=1, le=64, description="Use 1 to 64, at least min_match.")
    min_match: int = Field(2, ge=1, description="Use 1 or more, at most max_match.")

    @model_validator(mode="after")
    def _lengths_agree(self) -> Ngram:
        if self.min_match > self.max_match:
            problem = f"more than max_match={self.max_match}"
            raise ContradictionError("min_match", self.min_match, problem, "Lower it or raise max_match.")
        return self

    def build(self, context: ProposerContext) -> Proposer:
        return NgramProposer(self.max_match, self.min_match)


class _Index:
    """Where each n-gram of one sequence last ended, kept up to date a token at a time."""

    def __init__(self, lengths: range) -> None:
        self._lengths = lengths
        self._last_end: dict[tuple[int, ...], int] = {}
        self._known = 0  # n-grams ending before this position are indexed

    def continuation(self, tokens: Sequence[int], path: tuple[int, ...], count: int) -> list[int]:
        """Up to `count` tokens that followed the latest occurrence in `tokens` of the longest known suffix of `tokens` and
        `path`."""
        size = len(tokens)
        for end in range(self._known, size - 1):  # the suffix itself stays out: it is no earlier occurrence
            for length in self._lengths:
                if length <= end + 1:
                    self._last_end[tuple(tokens[end + 1 - length : end + 1])] = end + 1
        self._known = max(self._known, size - 1)
        longest = self._lengths[-1]
        suffix = (*tokens[max(0, size - longest) : size], *path)[-longest:]
        for length in reversed(self._lengths):
            start = self._last_end.get(suffix[len(suffix) - length :]) if length <= len(suffix) else None
            if start is not None:
                return list(tokens[start : start + count])
        return []


class NgramProposer(Proposer):
    """Proposes the continuation of the latest earlier occurrence of the longest matching suffix.

    Args:
        max_match: Longest suffix looked up.
        min_match: Shortest one.
    """

    def __init__(self, max_match: int, min_match: int) -> None:
        self._lengths = range(min_match, max_match + 1)
        self._indices: dict[int, _Index] = {}

    def begin(self, sequence: ProposerSequence) -> None:
        self._indices[sequence.seq_id] = _Index(self._lengths)

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [self._lookup(request) for request in requests]

    def finish(self, sequence: ProposerSequence) -> None:
        self._indices.pop(sequence.seq_id, None)

    def check_rest(self) -> None:
        assert not self._indices, f"{len(self._indices)} texts are still looked up"

    def _lookup(self, request: ProposeRequest) -> Draft:
        index = self._indices[request.sequence.seq_id]
        tokens = index.continuation(request.sequence.known_token_ids, request.path, request.budget)
        return Draft.chain(tokens, Law.DETERMINISTIC) if tokens else EMPTY

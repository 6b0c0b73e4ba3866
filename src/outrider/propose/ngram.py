"""Prompt lookup (Saxena 2023; Yang et al. 2023): what followed the last time these tokens stood here?"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.propose.base import DraftNoise, Proposer, ProposeRequest, ProposerSequence
from outrider.propose.draft import EMPTY, Draft, Law


class _Index:
    """Where each n-gram of one sequence last ended, kept up to date a token at a time."""

    def __init__(self, lengths: range) -> None:
        self._lengths = lengths
        self._last_end: dict[tuple[int, ...], int] = {}
        self._known = 0  # n-grams ending before this position are indexed

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the latest earlier occurrence of the longest known suffix."""
        size = len(tokens)
        for end in range(self._known, size - 1):  # the suffix itself stays out: it is no earlier occurrence
            for length in self._lengths:
                if length <= end + 1:
                    self._last_end[tuple(tokens[end + 1 - length : end + 1])] = end + 1
        self._known = max(self._known, size - 1)
        for length in reversed(self._lengths):
            start = self._last_end.get(tuple(tokens[size - length : size])) if length <= size else None
            if start is not None:
                return list(tokens[start : start + count])
        return []


class NgramProposer(Proposer):
    """Proposes the continuation of the latest earlier occurrence of the longest matching suffix.

    Args:
        ngram_max: Longest suffix looked up.
        ngram_min: Shortest one.
    """

    def __init__(self, ngram_max: int, ngram_min: int) -> None:
        self._lengths = range(ngram_min, ngram_max + 1)
        self._indices: dict[int, _Index] = {}

    def begin(self, sequence: ProposerSequence) -> None:
        self._indices[sequence.seq_id] = _Index(self._lengths)

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [self._lookup(request) for request in requests]

    def finish(self, sequence: ProposerSequence) -> None:
        self._indices.pop(sequence.seq_id, None)

    def _lookup(self, request: ProposeRequest) -> Draft:
        index = self._indices[request.sequence.seq_id]
        tokens = index.continuation(request.sequence.token_ids, request.budget)
        return Draft.chain(tokens, Law.DETERMINISTIC) if tokens else EMPTY

"""N-grams by their first token, the latest first, in bounded memory; no torch."""

from __future__ import annotations

from collections.abc import Sequence

Ngram = tuple[int, ...]


class NgramPool:
    """The latest n-grams that begin with each token; what was longest not added again is forgotten first.

    Args:
        size: Tokens of an n-gram.
        per_token: N-grams kept for each first token.
        max_tokens: First tokens kept.
    """

    def __init__(self, size: int, per_token: int, max_tokens: int) -> None:
        self.size, self.per_token, self.max_tokens = size, per_token, max_tokens
        self._found: dict[int, dict[Ngram, None]] = {}  # both least recently added first

    def __len__(self) -> int:
        return sum(len(found) for found in self._found.values())

    def add(self, ngram: Ngram) -> None:
        """Remember an n-gram as the latest."""
        assert len(ngram) == self.size
        found = self._found.pop(ngram[0], {})
        self._found[ngram[0]] = found
        found.pop(ngram, None)
        found[ngram] = None
        if len(found) > self.per_token:
            del found[next(iter(found))]
        if len(self._found) > self.max_tokens:
            del self._found[next(iter(self._found))]

    def add_text(self, tokens: Sequence[int], start: int) -> None:
        """Remember the n-grams of a text that end at position `start` or later."""
        for end in range(max(start, self.size - 1), len(tokens)):
            self.add(tuple(tokens[end + 1 - self.size : end + 1]))

    def after(self, token_id: int) -> list[Ngram]:
        """N-grams that begin with a token, latest first."""
        return list(reversed(self._found.get(token_id, {})))

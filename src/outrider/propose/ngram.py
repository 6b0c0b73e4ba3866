"""Prompt lookup (Saxena 2023; Yang et al. 2023), in the text itself or in a text that the caller predicts."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from outrider.config import Elsewhere
from outrider.draft import EMPTY, Draft, Law
from outrider.errors import ContradictionError
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest, ProposerSequence
from outrider.propose.settings import Method, ProposerContext

# --- Prompt lookup (Saxena 2023; Yang et al. 2023): drafts what followed the last occurrence of the latest tokens.


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

    max_match: Annotated[int, Elsewhere(options=("--spec-ngram-simple-size-n", "--spec-ngram-size-n"))] = Field(
        5, ge=1, le=64, description="Use 1 to 64, at least min_match."
    )
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
    """Says where each n-gram of one sequence last ended, kept up to date a token at a time."""

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
    """Proposes the continuation of the latest earlier occurrence of the longest matching suffix."""

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


# --- Drafting from a text that the caller predicts, as OpenAI's `prediction`: what follows the place where the text stands?
#
# Somebody who edits a text knows most of the answer before it is written. The prediction comes with each request and
# not with the settings, so all requests share one proposer, and a request without a prediction is written plainly.


class Prediction(Method):
    """Drafts what comes next in the text that the caller predicted; needs no model.

    Attributes:
        min_match: How many of the latest tokens must stand in the prediction, after the text left it, before drafts go on
            there.
    """

    name: ClassVar[str] = "prediction"
    default_num_draft_tokens: ClassVar[int] = 16
    takes_tree: ClassVar[bool] = False
    grows_from_probabilities: ClassVar[bool] = False
    instead_of_tree: ClassVar[str] = "Use another method."

    min_match: int = Field(3, ge=1, le=64, description="Use 1 to 64.")

    def build(self, context: ProposerContext) -> Proposer:
        return PredictionProposer(self.min_match)


class _PredictionReader:
    """Says how far a text has come in its prediction.

    Args:
        min_match: Tokens that must agree before it is resumed.
    """

    def __init__(self, prediction: tuple[int, ...], min_match: int) -> None:
        self._prediction = prediction
        self._min_match = min_match
        self._ends: defaultdict[tuple[int, ...], list[int]] | None = None
        self._latest: tuple[int, ...] = ()  # tokens of the text, as many as must agree
        self._place = 0  # the text stands before this token of the prediction, or left the prediction there
        self._diverged = False
        self.num_read = 0

    def read(self, token: int) -> None:
        """The text goes on with this token."""
        self._latest = (*self._latest, token)[-self._min_match :]
        expected = self._prediction[self._place] if self._place < len(self._prediction) else None
        if not self._diverged and token == expected:
            self._place += 1
            return
        resumed = self._found()
        self._diverged = resumed is None
        if resumed is not None:
            self._place = resumed

    def rest(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that come next in the prediction; none where the text has left it."""
        return () if self._diverged else self._prediction[self._place : self._place + count]

    def _found(self) -> int | None:
        """Behind the latest tokens in the prediction: the first such place after the one that was left, else the last."""
        if self._ends is None:
            self._ends = defaultdict(list)
            for end in range(self._min_match, len(self._prediction) + 1):
                self._ends[self._prediction[end - self._min_match : end]].append(end)
        ends = self._ends.get(self._latest)
        if not ends:
            return None
        later = bisect_left(ends, self._place)
        return ends[later] if later < len(ends) else ends[-1]


class PredictionProposer(Proposer):
    """Chains from each request's own prediction.

    Args:
        min_match: Tokens that must agree before a prediction is resumed.
    """

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._readers: dict[int, _PredictionReader] = {}

    def begin(self, sequence: ProposerSequence) -> None:
        self._readers[sequence.seq_id] = _PredictionReader(sequence.prediction, self._min_match)

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [self._draft(request) for request in requests]

    def finish(self, sequence: ProposerSequence) -> None:
        self._readers.pop(sequence.seq_id, None)

    def check_rest(self) -> None:
        assert not self._readers, f"{len(self._readers)} texts are still looked up"

    def _draft(self, request: ProposeRequest) -> Draft:
        sequence, reader = request.sequence, self._readers[request.sequence.seq_id]
        for token in sequence.token_ids[sequence.num_prompt_tokens + reader.num_read :]:
            reader.read(token)
        reader.num_read = len(sequence.token_ids) - sequence.num_prompt_tokens
        if request.path:
            reader = copy(reader)  # what another proposer drafted may not stand
            for token in request.path:
                reader.read(token)
        tokens = reader.rest(min(request.budget, request.max_depth))
        return Draft.chain(tokens, Law.OPAQUE) if tokens else EMPTY

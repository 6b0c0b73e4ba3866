"""Lookahead decoding (Fu et al. 2024): the target writes n-grams in scratch rows of the same pass.

Beside the draft every pass computes a *window* of scratch rows. Its first level are guesses for the next places, a chain
behind the last token. Each further level holds, for each of these columns, what the target found most likely after the
column so far. So a pass adds a token to each column; a column that is long enough gives an n-gram of tokens that the
target likes to write one after another, and loses its first token. N-grams are kept in a *pool*, and those that begin with
the last token of the text are the drafts. Nothing but the target is needed, and its rows are the price.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import Field, model_validator

from outrider.draft import Draft, Law, ScratchRows
from outrider.errors import ContradictionError
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
)
from outrider.propose.settings import Method, ProposerContext
from outrider.propose.tree import MAX_ROWS

# --- N-grams by their first token, the latest first, in bounded memory; no torch.


Ngram = tuple[int, ...]


class NgramPool:
    """The latest n-grams that begin with each token; what was longest not added again is forgotten first."""

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


# --- The method: the window of scratch rows, and the drafts.


#: First tokens that a sequence's pool keeps n-grams of.
_MAX_TOKENS = 8192


class Lookahead(Method):
    """N-grams that the target writes beside its text, in rows of the same pass; needs no model.

    Attributes:
        window: Places ahead that each pass writes at.
        ngram: Tokens of an n-gram: one that stands already, and those that it drafts.
        guesses: N-grams that are drafted at a time.
    """

    name: ClassVar[str] = "lookahead"
    takes_tree: ClassVar[bool] = False
    grows_from_probabilities: ClassVar[bool] = False
    branches_freely: ClassVar[bool] = True
    instead_of_tree: ClassVar[str] = "Use Lookahead(guesses=...): its guesses are branches."

    window: int = Field(1, ge=1, le=MAX_ROWS, description=f"Use 1 to {MAX_ROWS}; window * (ngram - 1) rows in all.")
    ngram: int = Field(4, ge=2, le=16, description="Use 2 to 16.")
    guesses: int = Field(2, ge=1, le=64, description="Use 1 to 64.")

    @model_validator(mode="after")
    def _fits_a_draft(self) -> Lookahead:
        if self.least_length() > MAX_ROWS:
            problem = f"with ngram={self.ngram} these are {self.least_length()} rows, and a draft has up to {MAX_ROWS}"
            raise ContradictionError("window", self.window, problem, f"Use {MAX_ROWS // (self.ngram - 1)} or less.")
        return self

    def usual_length(self) -> int:
        """Rows of the window and of all guesses."""
        return min(MAX_ROWS, (self.window + self.guesses) * (self.ngram - 1))

    def least_length(self) -> int:
        """Rows of the window."""
        return self.window * (self.ngram - 1)

    def build(self, context: ProposerContext) -> Proposer:
        return LookaheadProposer(self.window, self.ngram, self.guesses)


@dataclass
class _Look:
    """Holds what is kept for one sequence."""

    pool: NgramPool  # n-grams of its own text and window
    columns: list[list[int]]  # the window: tokens of each column, level by level
    num_read: int = 0  # tokens of the text whose n-grams are in the pool
    asked: list[list[int]] = field(default_factory=list)  # columns that the pass under way computes, left to right

    def asked_tokens(self) -> list[int]:
        return [token for column in self.asked for token in column]


class LookaheadProposer(Proposer):
    """Trees of the latest n-grams that begin with the last token, and a window of scratch rows that writes new ones.

    Args:
        ngram: Tokens of an n-gram.
    """

    requires = Requirements(target_top_k=1)

    def __init__(self, window: int, ngram: int, guesses: int) -> None:
        self._window, self._ngram, self._guesses = window, ngram, guesses
        self._looks: dict[int, _Look] = {}

    def begin(self, sequence: ProposerSequence) -> None:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        seeds = [[prompt[column * len(prompt) // self._window]] for column in range(self._window)]
        self._looks[sequence.seq_id] = _Look(NgramPool(self._ngram, self._guesses, _MAX_TOKENS), seeds)

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        self._looks[child.seq_id] = deepcopy(self._looks[parent.seq_id])

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [self._draft(request) for request in requests]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for seen in rows:
            self._advance(self._looks[seen.sequence.seq_id], seen)

    def finish(self, sequence: ProposerSequence) -> None:
        self._looks.pop(sequence.seq_id, None)

    def check_rest(self) -> None:
        assert not self._looks, f"{len(self._looks)} texts are still looked up"

    def _draft(self, request: ProposeRequest) -> Draft:
        look, text = self._looks[request.sequence.seq_id], request.sequence.token_ids
        look.pool.add_text(text, look.num_read)
        look.num_read = len(text)
        guesses = [ngram[1:] for ngram in look.pool.after(request.last_token_id)]
        tokens, parents = _merged(guesses, request.budget, request.max_depth)
        again = bool(look.asked)  # a second turn in one step: the window is under way already
        if not again:
            look.asked = _fitting(look.columns, request.budget - len(tokens), request.max_depth)
        scratch = ScratchRows() if again else _rows(look.asked, len(tokens))
        return Draft(tuple(tokens), tuple(parents), (Law.OPAQUE,) * len(tokens), scratch=scratch)

    def _advance(self, look: _Look, seen: ObservedRows) -> None:
        """Each column that was computed grows by the target's most likely token, or moves on by it."""
        asked, tokens, look.asked = look.asked, look.asked_tokens(), []
        rows, top = seen.where(RowStatus.SCRATCH), seen.target_top_k
        if top is None or not rows or [seen.token_ids[row] for row in rows] != tokens[: len(rows)]:
            return
        likeliest = dict(zip(top.rows, top.token_ids[:, 0].tolist(), strict=True))
        end = 0
        for column in asked:
            end += len(column)
            if end > len(rows):
                return  # the engine has cut the rest
            column.append(likeliest[rows[end - 1]])
            if len(column) == self._ngram:
                look.pool.add(tuple(column))
                del column[0]


def _merged(guesses: Sequence[Sequence[int]], budget: int, max_depth: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree that holds these continuations, the first ones first, as far as it may grow."""
    nodes: dict[tuple[int, ...], int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    for guess in guesses:
        for depth in range(1, min(len(guess), max_depth) + 1):
            path = tuple(guess[:depth])
            if path not in nodes and len(tokens) < budget:
                nodes[path] = len(tokens)
                tokens.append(path[-1])
                parents.append(nodes[path[:-1]])
            elif path not in nodes:
                return tokens, parents
    return tokens, parents


def _fitting(columns: Sequence[list[int]], budget: int, max_depth: int) -> list[list[int]]:
    """The first columns of the window, as many as have room: column j begins at depth j + 1."""
    fitting: list[list[int]] = []
    for place, column in enumerate(columns):
        budget -= len(column)
        if budget < 0 or place + len(column) > max_depth:
            break
        fitting.append(column)
    return fitting


def _rows(columns: Sequence[Sequence[int]], num_nodes: int) -> ScratchRows:
    """A window as rows behind `num_nodes` nodes, column by column: first levels follow each other from column to column,
    and all others what stands before them in their own column."""
    tokens: list[int] = []
    parents: list[int] = []
    left = -1
    for column in columns:
        first = num_nodes + len(tokens)
        parents += [left, *range(first, first + len(column) - 1)]
        tokens += column
        left = first
    return ScratchRows(tuple(tokens), tuple(parents))

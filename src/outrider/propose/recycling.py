"""Token recycling (Luo et al. 2024): drafts trees of tokens that the target held likely before.

Every row of a pass comes with the target's most likely next tokens, and plain decoding uses one of them. Here they are
kept, the latest ones for each context, which is a token or the last few. They grow into a tree behind the last token: its
successors, their successors, and so on, those first that came true most often. Rows that were computed anyway serve,
rejected draft tokens included, and none is computed for it. In the paper a context is one token, and the shape of the tree
is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from outrider.draft import Draft, Law
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
from outrider.propose.tree import CHAIN, StaticTree, children_of, cut

# --- Bounded memory of the tokens that the target held likely after given tokens, for many callers.


Context = tuple[int, ...]
#: What an entry takes beside its rows of the arrays: its key, the tokens of the key, and its place in the dictionary.
_ENTRY_BYTES = 240
#: What the table of a namespace takes while it is empty.
_TABLE_BYTES = 2048


class Successors:
    """The latest likely successors of each context; the one longest not refreshed goes first."""

    def __init__(self, width: int, max_bytes: int) -> None:
        self._most = max(1, max_bytes // (_ENTRY_BYTES + 8 * width))
        self._slots: dict[Context, int] = {}  # least recently refreshed first
        self._tokens = np.zeros((0, width), np.int32)
        self._shares = np.zeros((0, width), np.float32)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Memory it takes, estimated for what is not in arrays."""
        return len(self._slots) * _ENTRY_BYTES + self._tokens.nbytes + self._shares.nbytes

    def find(self, context: Context) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
        """Tokens [width] that may follow, most likely first, and their shares [width]; None for an unknown context."""
        slot = self._slots.get(context)
        return None if slot is None else (self._tokens[slot], self._shares[slot])

    def put(self, context: Context, tokens: npt.NDArray[np.int32], shares: npt.NDArray[np.float32]) -> None:
        """Remember successors [width] in the place of earlier ones."""
        slot = self._slots.pop(context, None)
        if slot is None:
            slot = self._free_slot()
        self._slots[context] = slot
        self._tokens[slot], self._shares[slot] = tokens, shares

    def _free_slot(self) -> int:
        size = len(self._slots)
        if size >= self._most:
            return self._slots.pop(next(iter(self._slots)))
        if size == len(self._tokens):
            more = min(self._most, max(64, size + size // 2)) - size
            self._tokens = np.concatenate([self._tokens, np.zeros((more, self._tokens.shape[1]), np.int32)])
            self._shares = np.concatenate([self._shares, np.zeros((more, self._shares.shape[1]), np.float32)])
        return size


class SharedSuccessors:
    """Successors by namespace, within a limit of bytes; the namespace longest unused is dropped first.

    Attributes:
        num_bytes: Memory they take, as far as it was counted: see `count`.
    """

    def __init__(self, width: int, max_bytes: int) -> None:
        self.width, self.max_bytes = width, max_bytes
        self.num_bytes = 0
        self._tables: dict[str | None, Successors] = {}  # least recently used first
        self._counted: dict[str | None, int] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, namespace: str | None) -> Successors:
        """Those of a namespace, and of no other; being used keeps them."""
        table = self._tables.pop(namespace, None)
        known = table is not None
        if table is None:
            table = Successors(self.width, self.max_bytes - _TABLE_BYTES)
        self._tables[namespace] = table
        if not known:
            self.count(namespace)
        return table

    def count(self, namespace: str | None) -> None:
        """Take into account how a namespace that was used just now has grown, and drop others that are over the limit."""
        size = self._tables[namespace].num_bytes + _TABLE_BYTES
        self.num_bytes += size - self._counted.get(namespace, 0)
        self._counted[namespace] = size
        while self.num_bytes > self.max_bytes and len(self._tables) > 1:
            oldest = next(iter(self._tables))
            del self._tables[oldest]
            self.num_bytes -= self._counted.pop(oldest)


# --- Token recycling.


#: A node is worth its row where the target is expected to follow the draft that far at least so often.
_LEAST_CHANCE = 0.003
#: A share is a probability only as far as the context decides; until outcomes tell more, so much of it is believed.
_BELIEVED = 0.6
#: Outcomes that this first belief weighs as much as.
_PRIOR_WEIGHT = 16.0
#: Shares between two of these are expected to come true equally often.
_EDGES = np.array([0.01, 0.03, 0.06, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97], np.float32)


class TokenRecycling(Method):
    """The target's own likely successors of tokens, from rows that it computed anyway; needs no model.

    Attributes:
        top_k: Successors kept for each context.
        context: Tokens of the longest context; shorter ones are kept too, and serve where a longer one is unknown.
        cache_mib: Memory for these, all namespaces together.
    """

    name: ClassVar[str] = "token_recycling"
    default_num_draft_tokens: ClassVar[int] = 10
    branches_freely: ClassVar[bool] = True
    grows_from_probabilities: ClassVar[bool] = False

    top_k: int = Field(16, ge=1, le=64, description="Use 1 to 64.")
    context: int = Field(2, ge=1, le=8, description="Use 1 to 8.")
    cache_mib: int = Field(64, ge=1, description="Use 1 or more.")

    def build(self, context: ProposerContext) -> Proposer:
        top_k = min(self.top_k, context.target.vocab_size)  # a small vocabulary has no more
        return TokenRecyclingProposer(top_k, self.context, self.cache_mib * 2**20)


class Chances:
    """Says how often successors came true, by what is known of them beforehand.

    Args:
        longest: Tokens of the longest context.
    """

    def __init__(self, top_k: int, longest: int) -> None:
        shape = (2, longest + 1, top_k, len(_EDGES) + 1)  # greedy or not, length of the context, rank, share
        self._came = np.zeros(shape)
        self._seen = np.zeros(shape)
        self._ranks = np.arange(top_k)

    def of(self, shares: npt.NDArray[np.float32], length: int, *, greedy: bool) -> npt.NDArray[np.float64]:
        """Chance [k] of each successor to be the next token, where a context of `length` tokens had these shares [k]."""
        cells = (int(greedy), length, self._ranks, np.searchsorted(_EDGES, shares))
        came, seen = self._came[cells], self._seen[cells]
        chances: npt.NDArray[np.float64] = (came + _PRIOR_WEIGHT * _BELIEVED * shares) / (seen + _PRIOR_WEIGHT)
        return chances

    def learn(self, shares: npt.NDArray[np.float32], right: npt.NDArray[np.bool_], length: int, *, greedy: bool) -> None:
        """Notes what became of successors [k] with these shares: which of them was the next token, if any."""
        cells = (int(greedy), length, self._ranks, np.searchsorted(_EDGES, shares))
        self._seen[cells] += 1.0
        self._came[cells] += right


@dataclass
class _Tree:
    """The tree in the making."""

    tokens: list[int] = field(default_factory=list)  # so far
    parents: list[int] = field(default_factory=list)  # so far

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def draft(self) -> Draft:
        laws = (Law.OPAQUE,) * len(self.tokens)  # they depend on earlier texts too
        return Draft(tuple(self.tokens), tuple(self.parents), laws)


@dataclass
class _KnownSuccessors:
    """Holds what serves one request."""

    table: Successors  # successors of its namespace
    chances: Chances  # what they are worth
    greedy: bool  # whether it takes the likeliest token
    longest: int  # tokens of the longest context

    def find(self, tail: Context) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
        """Length, successors [k] and their shares [k] of the longest known context that ends with `tail`."""
        for length in range(min(self.longest, len(tail)), 0, -1):
            found = self.table.find(tail[len(tail) - length :])
            if found is not None:
                return length, *found
        return None

    def followers(self, tail: Context) -> Iterator[tuple[int, float]]:
        """(token, chance) of what may follow, most likely first."""
        found = self.find(tail)
        if found is not None:
            length, tokens, shares = found
            yield from zip(tokens.tolist(), self.chances.of(shares, length, greedy=self.greedy).tolist(), strict=True)


class TokenRecyclingProposer(Proposer):
    """Trees of the target's own likely successors, best first.

    Args:
        longest: Tokens of the longest context.
    """

    def __init__(self, top_k: int, longest: int, max_bytes: int) -> None:
        self.requires = Requirements(target_top_k=top_k)
        self.longest = longest
        self.shared = SharedSuccessors(top_k, max_bytes)
        self.chances = Chances(top_k, longest)

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [self._draft(request) for request in requests]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for seen in rows:
            self._learn(seen)

    def snapshot(self) -> object | None:
        return deepcopy((self.shared, self.chances))

    def restore(self, state: object) -> None:
        assert isinstance(state, tuple)
        self.shared, self.chances = deepcopy(state)

    def _known(self, sequence: ProposerSequence) -> _KnownSuccessors:
        return _KnownSuccessors(self.shared.of(sequence.namespace), self.chances, sequence.sampling.greedy, self.longest)

    def _draft(self, request: ProposeRequest) -> Draft:
        known = self._known(request.sequence)
        tail = (*request.sequence.token_ids[-self.longest :], *request.path)[-self.longest :]
        if request.builder is not CHAIN and isinstance(request.builder, StaticTree):
            return _of_shape(known, tail, request, request.builder.shape)
        return _best_first(known, tail, request)

    def _learn(self, seen: ObservedRows) -> None:
        top = seen.target_top_k
        if top is None or not top.rows:
            return
        known = self._known(seen.sequence)
        tails = self._tails(seen)
        text = seen.sequence.token_ids
        for row in top.rows:
            behind = seen.positions[row] + 1
            if seen.statuses[row] in (RowStatus.TEXT, RowStatus.ACCEPTED) and behind < len(text):
                found = known.find(tails[row])
                if found is not None:
                    length, tokens, shares = found
                    known.chances.learn(shares, tokens == text[behind], length, greedy=known.greedy)
        shares = top.logits.double().softmax(-1).float().cpu().numpy()
        tokens = top.token_ids.int().cpu().numpy()
        for place, row in enumerate(top.rows):
            for length in range(1, min(self.longest, len(tails[row])) + 1):
                known.table.put(tails[row][len(tails[row]) - length :], tokens[place], shares[place])
        self.shared.count(seen.sequence.namespace)

    def _tails(self, seen: ObservedRows) -> list[Context]:
        """The last tokens up to and with each row, along its own path."""
        tails: list[Context] = []
        for token, position, parent in zip(seen.token_ids, seen.positions, seen.parents, strict=True):
            before = (
                tails[parent] if parent >= 0 else tuple(seen.sequence.token_ids[max(0, position - self.longest) : position])
            )
            tails.append((*before, token)[-self.longest :])
        return tails


def _best_first(known: _KnownSuccessors, tail: Context, request: ProposeRequest) -> Draft:
    """The most likely nodes; no child is likelier than its parent."""
    tree, order = _Tree(), 0
    heap: list[tuple[float, int, int, int, int, Context]] = []

    def offer(above: float, parent: int, depth: int, context: Context) -> None:
        nonlocal order
        for token, chance in known.followers(context):
            if above * chance >= _LEAST_CHANCE:
                heappush(heap, (-above * chance, order, token, parent, depth, (*context, token)[-known.longest :]))
                order += 1

    if request.max_depth > 0:
        offer(1.0, -1, 1, tail)
    while heap and len(tree.tokens) < request.budget:
        chance, _, token, parent, depth, context = heappop(heap)
        node = tree.add(token, parent)
        if depth < request.max_depth:
            offer(-chance, node, depth + 1, context)
    return tree.draft()


def _of_shape(known: _KnownSuccessors, tail: Context, request: ProposeRequest, shape: tuple[int, ...]) -> Draft:
    """The likeliest children of each node, so many as the shape has, level by level."""
    tree = _Tree()
    children = children_of(cut(shape, request.budget, request.max_depth))
    nodes: dict[int, tuple[int, float, Context]] = {-1: (-1, 1.0, tail)}  # by place in the shape
    for place in range(-1, len(children) - 1):
        if place not in nodes:
            continue  # there was no successor for this place
        parent, above, context = nodes[place]
        for (token, chance), child in zip(known.followers(context), children[place + 1], strict=False):
            node = tree.add(token, parent)
            nodes[child] = (node, above * chance, (*context, token)[-known.longest :])
    return tree.draft()

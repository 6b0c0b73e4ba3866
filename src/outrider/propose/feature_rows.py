"""Rows of a head that reads features: those of a text that the target has computed, and those of a growing draft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

import numpy as np
import torch
from torch import Tensor

from outrider.cache.memory import AddedLayers
from outrider.cache.state import KVView
from outrider.heads.lone import SeenContext
from outrider.kernels.decoder import PassRows
from outrider.propose.base import ObservedRows, ProposeRequest, ProposerSequence, RowStatus, rows_at
from outrider.propose.trees.growth import Growth

# --- Rows of a head that reads features: those of a text that the target has computed, and those of a draft in the making.


@dataclass(frozen=True)
class TextRows:
    """The rows of a pass that belong to the text.

    Attributes:
        seen: All rows of the sequence in this pass.
        places: Which of them.
    """

    seen: ObservedRows
    places: list[int]

    @staticmethod
    def of(seen: ObservedRows, held: int) -> TextRows | None:
        """The rows that stand, from the token on that a head does not hold yet; None where that one is not among them."""
        places = [row for row in seen.where(RowStatus.TEXT, RowStatus.ACCEPTED) if seen.positions[row] >= held]
        return TextRows(seen, places) if places and seen.positions[places[0]] == held else None

    def __len__(self) -> int:
        return len(self.places)

    @property
    def sequence(self) -> ProposerSequence:
        """Whose."""
        return self.seen.sequence

    @property
    def kv(self) -> KVView:
        """The target's KV of the text."""
        return self.sequence.kv

    @property
    def token_ids(self) -> list[int]:
        """Their tokens."""
        return [self.seen.token_ids[place] for place in self.places]

    @property
    def positions(self) -> list[int]:
        """Where these stand in the text."""
        return [self.seen.positions[place] for place in self.places]

    @property
    def start(self) -> int:
        """Position of the first."""
        return self.seen.positions[self.places[0]]

    @property
    def stop(self) -> int:
        """Position behind the last."""
        return self.start + len(self)

    def hidden(self, layer: int) -> Tensor:
        """The target's hidden states [n, hidden_size] of a layer."""
        return self.seen.aux_hidden_states[layer][rows_at(self.places)]


@dataclass(frozen=True)
class LastFeatures:
    """Features of the last tokens that a head holds of a text: all that it may go on behind. A draft model may take back
    what it has computed ahead of the text, and its last token of the text too.

    Attributes:
        start: Position of the first.
        rows: [n, feature_size]
    """

    start: int
    rows: Tensor

    @staticmethod
    def of(text: TextRows, rows: Tensor, before: LastFeatures | None) -> LastFeatures:
        """With the features of rows of a text behind those that were held before them."""
        first = max(text.kv.num_computed - 2, 0)
        if before is not None and first < text.start:
            kept = before.rows[max(first - before.start, 0) : text.start - before.start]
            return LastFeatures(text.start - len(kept), torch.cat([kept, rows]))
        start = max(first, text.start)
        return LastFeatures(start, rows[start - text.start :].clone())  # a view would keep all rows

    def at(self, position: int) -> Tensor:
        """The feature [feature_size] of a token."""
        assert self.start <= position, f"features are kept from position {self.start} on, and not of {position}"
        return self.rows[position - self.start]


def unread_tokens(request: ProposeRequest, held: int) -> list[int]:
    """The tokens that a head has not read of what its draft follows: the last one of the text, and the path. Inside a stage
    there may be one more, since the draft model computes its last two tokens together with the guess. None where the head
    lacks more of the text, as where it came late."""
    return request.text(held) if held > 0 and held >= len(request.sequence.token_ids) - 2 else []


@dataclass
class PartialDraft:
    """A draft in the making and the head's rows for it: tokens of the text that it has not read, then the nodes.

    Attributes:
        growth: The draft.
        held: Tokens of the text that the head holds.
        unread: Those behind them that the draft follows.
        features: By row: what the token behind it reads; -1 stands for the text.
    """

    growth: Growth
    held: int
    unread: list[int]
    features: dict[int, Tensor] = field(default_factory=dict, kw_only=True)

    @property
    def _root(self) -> int:
        """The row of the token that the draft follows."""
        return len(self.unread) - 1

    def row(self, node: int) -> int:
        """The row of a node; -1 is the token that the draft follows."""
        return self._root + 1 + node

    def token(self, row: int) -> int:
        """Its token."""
        return self.unread[row] if row <= self._root else self.growth.nodes[row - self._root - 1].token_id

    def parent(self, row: int) -> int:
        """The row before it; -1 for the text."""
        return row - 1 if row <= self._root else self.row(self.growth.nodes[row - self._root - 1].parent)

    def depth(self, row: int) -> int:
        """How far behind the first token that is not held its token stands."""
        return row if row <= self._root else self._root + self.growth.nodes[row - self._root - 1].depth

    def position(self, row: int) -> int:
        """Where its token stands in the text."""
        return self.held + self.depth(row)


@dataclass
class PartialModuleDraft(PartialDraft):
    """A draft in the making for heads that run as torch modules. Features are [num_layers, width].

    Attributes:
        window: How many tokens back rows look; None for all.
        keys, values: By layer: [slots, num_kv_heads, dim] of the text but for tokens that no row sees, then of the rows.
        num_rows: Rows that have been written.
    """

    window: int | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    num_rows: int = 0

    def begin(self, text: Sequence[tuple[Tensor, Tensor]], features: Tensor, dtype: torch.dtype) -> None:
        """Take what each layer holds of the text, and what the token behind it reads."""
        room = self._root + 1 + self.growth.budget
        self.keys = [_with_room(keys[layer + 1 :], room, dtype) for layer, (keys, _) in enumerate(text)]
        self.values = [_with_room(values[layer + 1 :], room, dtype) for layer, (_, values) in enumerate(text)]
        self.features = {-1: features}

    def write(self, layer: int, rows: list[int], taken: slice, keys: Tensor, values: Tensor) -> SeenContext:
        """Keep rows of a layer; returns what they see.

        Args:
            layer: Which of the head's layers.
            rows: Which rows.
            taken: Where they stand among those that the layer computes.
            keys, values: [len(rows), num_kv_heads, dim]
        """
        text = self.held - 1 - layer
        slots = [text + row for row in rows]
        self.keys[layer][slots], self.values[layer][slots] = keys, values
        self.num_rows = max(self.num_rows, rows[-1] + 1)
        stop = text + self.num_rows
        mask = keys.new_full((len(rows), stop), float("-inf"))
        for place, row in enumerate(rows):
            nearest = 0 if self.window is None else max(0, self.position(row) - self.window - layer)
            mask[place, nearest:text] = 0.0
            first = self.position(row)
            while row >= 0 and (self.window is None or first - self.position(row) < self.window):
                mask[place, text + row] = 0.0
                row = self.parent(row)
        seen = mask if (mask < 0.0).any() else None
        return SeenContext(taken, self.keys[layer][:stop], self.values[layer][:stop], seen)


def _with_room(rows: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    """Rows, and room for more behind them."""
    wide = rows.new_zeros((len(rows) + room, *rows.shape[1:]), dtype=dtype)  # what is masked must be a number all the same
    wide[: len(rows)] = rows
    return wide


# --- Rows of drafts whose keys and values our kernels keep in blocks behind those of the texts.


@dataclass
class PartialBlockDraft(PartialDraft):
    """A draft in the making whose rows lie in blocks, in the order in which they were computed. Features are [width].

    Attributes:
        block_size: Tokens a block.
        block_table: Blocks of the text, and behind those that it fills, the draft's own.
        places: By row, how many were computed before it.
        positions: Of the rows in that order.
        seen: [room, room] which row sees which, in that order.
    """

    block_size: int = 0
    block_table: list[int] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    seen: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.uint8))

    def begin(self, kv: KVView, added: AddedLayers, free: Iterator[int]) -> bool:
        """Take blocks of the draft's own from those that are free; False where there are too few."""
        room, size = len(self.unread) + self.growth.budget, added.block_size
        whole = self.held // size
        own = list(islice(free, -(-(self.held + room) // size) - whole))
        if whole * size + len(own) * size < self.held + room:
            return False
        self.block_size, self.block_table = size, [*kv.block_table[:whole], *own]
        self.seen = np.zeros((room, room), np.uint8)
        added.begin_block(own[0], kv, self.held)
        return True

    def take(self, rows: Sequence[int]) -> None:
        """Rows are computed behind all earlier ones."""
        for row in rows:
            place = self.places[row] = len(self.places)
            parent = self.parent(row)
            if parent >= 0:
                self.seen[place] = self.seen[self.places[parent]]
            self.seen[place, place] = 1
            self.positions.append(self.position(row))

    @property
    def is_chain(self) -> bool:
        """Whether every row follows the one that was computed before it."""
        return self.positions[-1] == self.held + len(self.positions) - 1

    def slot(self, place: int) -> int:
        """Where the row that was computed after so many others lies."""
        block, offset = divmod(self.held + place, self.block_size)
        return self.block_table[block] * self.block_size + offset


def pass_through(work: Sequence[tuple[PartialBlockDraft, list[int]]], *, wanted: bool) -> PassRows:
    """Rows of drafts as the kernels read them.

    Args:
        work: Drafts, and which of their rows are computed now.
        wanted: Whether logits of them are.
    """
    for drafting, rows in work:
        drafting.take(rows)
    parts = [_PartOfPass.of(drafting, len(rows)) for drafting, rows in work]
    first = list(accumulate((len(part.places) for part in parts), initial=0))
    return PassRows(
        tokens=[drafting.token(row) for drafting, rows in work for row in rows],
        positions=[part.drafting.positions[place] for part in parts for place in part.places],
        slots=[part.drafting.slot(place) for part in parts for place in part.places],
        long_rows=[0] * first[-1],
        first=first,
        start=[part.start for part in parts],
        tables=[block for part in parts for block in part.drafting.block_table],
        table_at=_begins(len(part.drafting.block_table) for part in parts),
        ancestry_at=[
            -1 if part.matrix is None else at for part, at in zip(parts, _begins(part.size for part in parts), strict=True)
        ],
        logit_rows=list(range(first[-1])) if wanted else [],
        ancestry=np.concatenate([np.empty(0, np.uint8), *(part.matrix for part in parts if part.matrix is not None)]),
        block_size=parts[0].drafting.block_size,
        known=list(accumulate((part.known for part in parts), initial=0)),
        tree_positions=[position for part in parts for position in part.tree_positions],
    )


@dataclass(frozen=True)
class _PartOfPass:
    """The rows of one draft in a pass.

    Attributes:
        drafting: The draft.
        places: Of the rows among all of the draft's.
        known: Rows of a tree that were computed before; 0 for a chain, whose earlier rows count as text.
        matrix: Which row of the tree sees which; None for a chain.
    """

    drafting: PartialBlockDraft
    places: range
    known: int
    matrix: np.ndarray | None

    @staticmethod
    def of(drafting: PartialBlockDraft, count: int) -> _PartOfPass:
        """The last rows of a draft."""
        size = len(drafting.places)
        places = range(size - count, size)
        if drafting.is_chain:
            return _PartOfPass(drafting, places, 0, None)
        return _PartOfPass(drafting, places, size - count, drafting.seen[:size, :size].ravel())

    @property
    def size(self) -> int:
        """Of the matrix."""
        return 0 if self.matrix is None else len(self.matrix)

    @property
    def start(self) -> int:
        """Tokens and rows of a chain that all rows see."""
        return self.drafting.held + (self.places.start if self.matrix is None else 0)

    @property
    def tree_positions(self) -> list[int]:
        """Positions of the known rows, and of these."""
        return self.drafting.positions[self.places.start - self.known :]


def _begins(sizes: Iterable[int]) -> list[int]:
    """Where parts of these sizes begin, one behind another."""
    return list(accumulate(sizes, initial=0))[:-1]

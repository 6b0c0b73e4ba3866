"""Rows of drafts whose keys and values our kernels keep in blocks behind those of the texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

import numpy as np

from outrider.cache.added_layers import AddedLayers
from outrider.cache.state import KVView
from outrider.kernels.decoder import PassRows
from outrider.propose.methods.feature_rows import GrowingRows


@dataclass
class BlockRows(GrowingRows):
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


def pass_through(work: Sequence[tuple[BlockRows, list[int]]], *, wanted: bool) -> PassRows:
    """Rows of drafts as the kernels read them.

    Args:
        work: Drafts, and which of their rows are computed now.
        wanted: Whether logits of them are.
    """
    for drafting, rows in work:
        drafting.take(rows)
    parts = [_Part.of(drafting, len(rows)) for drafting, rows in work]
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
class _Part:
    """The rows of one draft in a pass.

    Attributes:
        drafting: The draft.
        places: Of the rows among all of the draft's.
        known: Rows of a tree that were computed before; 0 for a chain, whose earlier rows count as text.
        matrix: Which row of the tree sees which; None for a chain.
    """

    drafting: BlockRows
    places: range
    known: int
    matrix: np.ndarray | None

    @staticmethod
    def of(drafting: BlockRows, count: int) -> _Part:
        """The last rows of a draft."""
        size = len(drafting.places)
        places = range(size - count, size)
        if drafting.is_chain:
            return _Part(drafting, places, 0, None)
        return _Part(drafting, places, size - count, drafting.seen[:size, :size].ravel())

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

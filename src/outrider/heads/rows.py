"""Rows that a head computes: those of a text that the target has computed, and those of a draft in the making."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.cache.memory import AddedLayers
from outrider.cache.state import KVView
from outrider.kernels.decoder import PassRows


class TextRows(NamedTuple):
    """Rows of a pass that belong to a text, one behind another, which a head is to read."""

    kv: KVView  # the target's, of the text
    start: int  # position of the first
    token_ids: list[int]
    hidden: Mapping[int, Tensor]  # the target's hidden states [n, hidden_size] by layer

    @property
    def span(self) -> range:
        """Their positions."""
        return range(self.start, self.start + len(self.token_ids))

    @staticmethod
    def joined(pieces: Sequence[TextRows]) -> TextRows:
        """Rows that follow one another, as one."""
        if len(pieces) == 1:
            return pieces[0]
        token_ids = [token for piece in pieces for token in piece.token_ids]
        hidden = {layer: torch.cat([piece.hidden[layer] for piece in pieces]) for layer in pieces[0].hidden}
        return pieces[0]._replace(token_ids=token_ids, hidden=hidden)


@dataclass
class DraftRows:
    """A head's rows for a draft in the making, in the order in which they are computed: tokens of the text that it has not
    read, then nodes. Their keys and values lie in tensors of the draft's own, or in blocks behind those of the text."""

    held: int  # tokens of the text that the head holds
    features: dict[int, Tensor]  # by row: what the token behind it reads; -1 stands for the text
    seen: np.ndarray  # [room, room] which row sees which
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # the row before each; -1 for the text
    positions: list[int] = field(default_factory=list)
    #: By layer: keys and values [slots, num_kv_heads, dim] of the text but for tokens that no row sees, then of the rows.
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    block_size: int = 0
    block_table: list[int] = field(default_factory=list)  # blocks of the text, and behind those that it fills, its own

    @staticmethod
    def of(held: int, feature: Tensor, room: int) -> DraftRows:
        """No rows yet, and room for so many."""
        return DraftRows(held, {-1: feature}, np.zeros((room, room), np.uint8))

    def lies_in_blocks(self, kv: KVView, added: AddedLayers, free: Iterator[int]) -> bool:
        """Take blocks of its own from those that are free; False where there are too few."""
        end, size = self.held + len(self.seen), added.block_size
        whole = self.held // size
        own = list(islice(free, -(-end // size) - whole))
        if (whole + len(own)) * size < end:
            return False
        self.block_size, self.block_table = size, [*kv.block_table[:whole], *own]
        added.begin_block(own[0], kv, self.held)
        return True

    def take(self, tokens: Sequence[int], parents: Sequence[int]) -> range:
        """Rows are computed behind all earlier ones; returns which."""
        first = len(self.tokens)
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), first):
            if parent >= 0:
                self.seen[row] = self.seen[parent]
            self.seen[row, row] = 1
            self.tokens.append(token)
            self.parents.append(parent)
            self.positions.append(self.held if parent < 0 else self.positions[parent] + 1)
        return range(first, len(self.tokens))

    def depth(self, row: int) -> int:
        """Returns how far behind the first token that is not held its token stands."""
        return self.positions[row] - self.held

    @property
    def is_chain(self) -> bool:
        """Tells if every row follows the one that was computed before it."""
        return self.positions[-1] == self.held + len(self.positions) - 1

    def slot(self, row: int) -> int:
        """Returns where a row lies in its blocks."""
        block, offset = divmod(self.held + row, self.block_size)
        return self.block_table[block] * self.block_size + offset


#: Rows of a draft that are to be computed: their tokens, and the row before each.
Work = tuple[DraftRows, Sequence[int], Sequence[int]]


# --- Rows of drafts as our kernels read them.


def pass_rows(parts: Sequence[tuple[DraftRows, range]], *, wanted: bool) -> PassRows:
    """The last rows of drafts, which lie in blocks; `wanted` says whether logits of them are."""
    drafts = [draft for draft, _ in parts]
    first = list(accumulate((len(rows) for _, rows in parts), initial=0))
    known = [0 if draft.is_chain else rows.start for draft, rows in parts]  # earlier rows of a chain count as text
    trees = [np.empty(0, np.uint8) if d.is_chain else d.seen[: rows.stop, : rows.stop].ravel() for d, rows in parts]
    at = zip(drafts, _begins(map(len, trees)), strict=True)
    return PassRows(
        tokens=[draft.tokens[row] for draft, rows in parts for row in rows],
        positions=[draft.positions[row] for draft, rows in parts for row in rows],
        slots=[draft.slot(row) for draft, rows in parts for row in rows],
        long_rows=[0] * first[-1],
        first=first,
        start=[draft.held + (rows.start if draft.is_chain else 0) for draft, rows in parts],
        tables=[block for draft in drafts for block in draft.block_table],
        table_at=_begins(len(draft.block_table) for draft in drafts),
        ancestry_at=[-1 if draft.is_chain else begin for draft, begin in at],
        logit_rows=list(range(first[-1])) if wanted else [],
        ancestry=np.concatenate([np.empty(0, np.uint8), *trees]),
        block_size=drafts[0].block_size,
        known=list(accumulate(known, initial=0)),
        tree_positions=[
            p for (draft, rows), n in zip(parts, known, strict=True) for p in draft.positions[rows.start - n :]
        ],
    )


def _begins(sizes: Iterable[int]) -> list[int]:
    """Returns where parts of these sizes begin, one behind another."""
    return list(accumulate(sizes, initial=0))[:-1]

"""Rows of a head that reads features: those of a text that the target has computed, and those of a draft in the making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.cache.state import KVView
from outrider.model.lone_layer import SeenRows
from outrider.propose.base import ObservedRows, ProposeRequest, ProposerSequence, RowStatus, rows_at
from outrider.propose.trees.growth import Growth


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
class GrowingRows:
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
class DraftRows(GrowingRows):
    """The same for a head whose layers are modules. Features are [num_layers, width].

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

    def write(self, layer: int, rows: list[int], taken: slice, keys: Tensor, values: Tensor) -> SeenRows:
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
        return SeenRows(taken, self.keys[layer][:stop], self.values[layer][:stop], seen)


def _with_room(rows: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    """Rows, and room for more behind them."""
    wide = rows.new_zeros((len(rows) + room, *rows.shape[1:]), dtype=dtype)  # what is masked must be a number all the same
    wide[: len(rows)] = rows
    return wide

"""Rows of a head that reads features: those of a text that the target has computed, and those of a draft in the making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.cache.state import KVView
from outrider.model.lone_layer import SeenRows
from outrider.propose.base import ObservedRows, ProposerSequence, RowStatus
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
    def of(seen: ObservedRows) -> TextRows:
        """The rows that stand."""
        return TextRows(seen, seen.where(RowStatus.TEXT, RowStatus.ACCEPTED))

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
        return self.seen.aux_hidden_states[layer][self.places]


@dataclass
class DraftRows:
    """A draft in the making and the head's rows for it: the last token of the text, the path, then the nodes.

    Attributes:
        growth: The draft.
        held: Tokens of the text that the head holds.
        window: How many tokens back rows look; None for all.
        keys, values: By layer: [slots, num_kv_heads, dim] of the text but for tokens that no row sees, then of the rows.
        features: By row: [num_layers, width] what the token behind it reads; -1 stands for the text.
        num_rows: Rows that have been written.
    """

    growth: Growth
    held: int
    window: int | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    features: dict[int, Tensor] = field(default_factory=dict)
    num_rows: int = 0

    def begin(self, text: Sequence[tuple[Tensor, Tensor]], features: Tensor, dtype: torch.dtype) -> None:
        """Take what each layer holds of the text, and what the token behind it reads."""
        room = self._root + 1 + self.growth.budget
        self.keys = [_with_room(keys[layer + 1 :], room, dtype) for layer, (keys, _) in enumerate(text)]
        self.values = [_with_room(values[layer + 1 :], room, dtype) for layer, (_, values) in enumerate(text)]
        self.features = {-1: features}

    @property
    def _root(self) -> int:
        return len(self.growth.request.path)

    def row(self, node: int) -> int:
        """The row of a node; -1 is the token that the draft follows."""
        return self._root + 1 + node

    def token(self, row: int) -> int:
        """Its token."""
        request = self.growth.request
        if row > self._root:
            return self.growth.nodes[row - self._root - 1].token_id
        return request.path[row - 1] if row else request.sequence.token_ids[-1]

    def parent(self, row: int) -> int:
        """The row before it; -1 for the text."""
        return row - 1 if row <= self._root else self.row(self.growth.nodes[row - self._root - 1].parent)

    def depth(self, row: int) -> int:
        """How far behind the text's last token its token stands."""
        return row if row <= self._root else self._root + self.growth.nodes[row - self._root - 1].depth

    def position(self, row: int) -> int:
        """Where its token stands in the text."""
        return self.held + self.depth(row)

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

"""The ragged batch made explicit: which rows one flattened pass holds and where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import Slots
from outrider.cache.running import RunningText
from outrider.cache.state import KVView, SequenceState, SourceState


@dataclass(frozen=True)
class Segment:
    """The rows of one sequence."""

    token_ids: Sequence[int]  # tokens to compute, in row order
    start: int  # tokens of this sequence whose KV is already in the pool; the first row's position
    block_table: Sequence[int]  # blocks that hold positions 0 to start + len(token_ids) - 1
    # Row index of each row's parent in topological order, -1 for a row that continues the context; None for a plain chain.
    # A row sees the context, its ancestors and itself; its position is its depth past the context.
    parents: tuple[int, ...] | None = None
    logits_from: int = 0  # first row whose logits are wanted; len(token_ids) for none
    logits_until: int | None = None  # one behind the last such row; None for all rows to the end
    long_rope: bool = False  # whether its text uses the long factors of a "longrope" model
    # What layers with a running state keep of the text; None for a text of which nothing is kept.
    running: RunningText | None = None
    certain: int = 0  # leading tokens of the text that nothing will take back, rows of this pass among them
    # Positions behind certain rows where the pass leaves the running states to the prefix cache.
    places: tuple[int, ...] = ()
    source: SourceState | None = None  # what its layers keep of the text's source; None for a model without an encoder

    @classmethod
    def of(
        cls,
        state: SequenceState | KVView,
        token_ids: Sequence[int],
        start: int,
        parents: tuple[int, ...] | None = None,
        logits_from: int = 0,
        logits_until: int | None = None,
        certain: int | None = None,
    ) -> Self:
        """Rows of the text that `state` is of; the other arguments are the attributes. What is computed is certain, if
        nothing else is said."""
        certain = state.num_computed if certain is None else certain
        return cls(
            token_ids=token_ids,
            start=start,
            block_table=state.block_table,
            parents=parents,
            logits_from=logits_from,
            logits_until=logits_until,
            long_rope=state.long_rope,
            running=state.running,
            certain=certain,
            places=state.places(start, min(certain, start + len(token_ids))),
            source=state.source,
        )

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def logits_end(self) -> int:
        """One behind the last row whose logits are wanted."""
        return self.num_rows if self.logits_until is None else self.logits_until

    @property
    def context_len(self) -> int:
        """Slots the last row may look at: the context and every row of this pass."""
        return self.start + self.num_rows

    @property
    def text_len(self) -> int:
        """Tokens of the longest text that a row ends: in a tree it has fewer than there are slots."""
        return int(self.positions.max()) + 1

    def row_slots(self, block_size: int) -> np.ndarray:
        """Pool slots [num_rows] of the rows themselves."""
        places = np.arange(self.start, self.context_len)
        blocks = np.asarray(self.block_table, np.int64)
        return blocks[places // block_size] * block_size + places % block_size

    @property
    def row_parents(self) -> Sequence[int]:
        """The row before each one, -1 for the text before the pass."""
        return range(-1, self.num_rows - 1) if self.parents is None else self.parents

    @cached_property
    def positions(self) -> np.ndarray:  # [num_rows]
        if self.parents is None:
            return np.arange(self.start, self.context_len)
        depth: list[int] = []
        for parent in self.parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        return np.asarray(depth) + self.start

    @cached_property
    def ancestry(self) -> np.ndarray:  # [num_rows, num_rows] bool: row sees column
        if self.parents is None:
            return np.tri(self.num_rows, dtype=bool)
        seen = np.eye(self.num_rows, dtype=bool)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                seen[row] |= seen[parent]
        return seen


class RaggedBatch:
    """Segments laid end to end, with the index arrays a pass needs. No row is padding.

    Arrays are made when a backend asks for them, on the host, and tensors of them on the device.

    Attributes:
        segments: In row order.
        block_size: Tokens a block.
        token_ids: [num_rows] on the device, in place of those of the segments, which the host does not know yet; or None.
        num_rows: Of all segments.
        row_spans: (first, end) row of each segment.
        logits_spans: (first, end) of each segment within logits_rows.
    """

    def __init__(
        self, segments: Sequence[Segment], block_size: int, device: torch.device, token_ids: Tensor | None = None
    ) -> None:
        self.segments = list(segments)
        self.token_ids = token_ids
        self.block_size = block_size
        self.device = device
        self.row_spans = list(pairwise(accumulate((s.num_rows for s in self.segments), initial=0)))
        self.num_rows = self.row_spans[-1][1] if self.row_spans else 0
        self.logits_spans = list(pairwise(accumulate((s.logits_end - s.logits_from for s in self.segments), initial=0)))

    @cached_property
    def tokens(self) -> np.ndarray:  # [num_rows] int64
        return np.concatenate([np.asarray(s.token_ids, np.int64) for s in self.segments])

    @cached_property
    def positions(self) -> np.ndarray:  # [num_rows] int64
        return np.concatenate([s.positions for s in self.segments])

    @cached_property
    def row_slots(self) -> np.ndarray:
        """[num_rows] int64, pool slot that each row's KV goes to."""
        return np.concatenate([s.row_slots(self.block_size) for s in self.segments])

    @cached_property
    def wanted(self) -> np.ndarray:
        """[num_logits] int64, rows whose logits are wanted."""
        spans = zip(self.segments, self.row_spans, strict=True)
        return np.concatenate([np.arange(first + s.logits_from, first + s.logits_end) for s, (first, _) in spans])

    @cached_property
    def input_ids(self) -> Tensor:  # [1, num_rows]
        return (self._tensor(self.tokens) if self.token_ids is None else self.token_ids)[None]

    @cached_property
    def position_ids(self) -> Tensor:  # [1, num_rows]
        return self._tensor(self.positions)[None]

    @cached_property
    def slot_mapping(self) -> Tensor:  # [num_rows]
        return self._tensor(self.row_slots)

    @cached_property
    def logits_rows(self) -> Tensor:  # [num_logits]
        return self._tensor(self.wanted)

    @cached_property
    def long_rows(self) -> Tensor:
        """[num_rows] bool, rows of texts that use long rotary factors."""
        return torch.from_numpy(np.repeat([s.long_rope for s in self.segments], [s.num_rows for s in self.segments])).to(
            self.device
        )

    @cached_property
    def context_slots(self) -> list[Slots]:
        """For each segment, where its context (and its own rows) lie."""
        return [self.as_slots(slots_of(s.block_table, s.context_len, self.block_size)) for s in self.segments]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def as_slots(self, slots: np.ndarray) -> Slots:
        """Slots as the pool reads them."""
        first, last = int(slots[0]), int(slots[-1])
        consecutive = last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all())
        return slice(first, last + 1) if consecutive else self._tensor(slots)


def slots_of(block_table: Sequence[int], num_tokens: int, block_size: int) -> np.ndarray:
    """Pool slots [num_tokens] of a sequence's first tokens."""
    blocks = np.asarray(block_table, np.int64)[: -(-num_tokens // block_size)]
    return (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:num_tokens]

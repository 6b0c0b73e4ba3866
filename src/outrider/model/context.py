"""What the attention function must know about the pass it runs in, and who may see whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import KVPool
from outrider.model.batch import RaggedBatch, Segment


@dataclass(frozen=True)
class LayerReach:
    """How far back a layer's attention looks.

    Attributes:
        window: Sliding window in tokens, the row itself included; None for no window.
        chunk: Chunked attention: rows see only positions of their own chunk of so many tokens; None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None


@dataclass
class ForwardContext:
    """One pass: its rows, its KV memory and its masks, built once per reach and shared by all layers.

    Attributes:
        batch: The rows.
        pool: Where their KV goes and their context comes from.
        reaches: How far each layer looks, by layer index.
    """

    batch: RaggedBatch
    pool: KVPool
    reaches: list[LayerReach]
    _masks: dict[tuple[int, LayerReach, torch.dtype], Tensor | None] = field(default_factory=dict)
    _slots: dict[tuple[int, LayerReach], list[Tensor]] = field(default_factory=dict)

    def mask(self, index: int, layer: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [num_rows, context_len] of segment `index` in `layer`; None where every row sees everything."""
        reach = self.reaches[layer]
        key = (index, reach, dtype)
        if key not in self._masks:
            seen = visible(self.batch.segments[index], reach)
            self._masks[key] = None if seen.all() else additive(seen, dtype, self.batch.device)
        return self._masks[key]

    def slots_by_row(self, index: int, layer: int) -> list[Tensor]:
        """For each row of segment `index` in `layer`, the pool slots it may look at, in the order of their positions."""
        reach = self.reaches[layer]
        if (index, reach) not in self._slots:
            slots = self.batch.context_slots[index]
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop, device=self.batch.device)
            seen = torch.from_numpy(visible(self.batch.segments[index], reach)).to(self.batch.device)
            # Ancestors come before their descendants, so the order of slots is that of positions along any one path.
            self._slots[index, reach] = [slots[row] for row in seen]
        return self._slots[index, reach]


def visible(segment: Segment, reach: LayerReach) -> np.ndarray:
    """Which context slots each row may look at: [num_rows, context_len] bool."""
    rows = segment.positions[:, None]
    columns = np.concatenate([np.arange(segment.start), segment.positions])[None]
    seen = np.concatenate([np.ones((segment.num_rows, segment.start), bool), segment.ancestry], axis=1)
    if reach.window is not None:
        seen &= rows - columns < reach.window
    if reach.chunk is not None:
        seen &= rows // reach.chunk == columns // reach.chunk
    return seen


def additive(seen: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where seen, minus infinity where not, in `dtype`."""
    mask = torch.zeros(seen.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(~seen), float("-inf")).to(device)


_current: ContextVar[ForwardContext | None] = ContextVar("outrider_forward_context", default=None)


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the one attention functions see. A variable, because not every family forwards keyword arguments."""
    assert _current.get() is None, "forward passes do not nest"
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def ongoing_context() -> ForwardContext | None:
    """The pass in progress, if one of ours is."""
    return _current.get()


def current_context() -> ForwardContext:
    """The pass in progress."""
    context = _current.get()
    assert context is not None, "attention called outside a forward pass"
    return context

"""The context of a pass for attention functions: which row may see which other rows, and the sources of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import KVPool, LayerReach, Slots
from outrider.cache.state import SourceState
from outrider.kernels.attention import RowAttention
from outrider.model.batch import RaggedBatch, Segment, slots_of
from outrider.model.running import RunningPass

# --- SourcePass: the sources of the texts in one pass.


#: Hidden states [num_tokens, width] that an encoder leaves of a source.
Encode = Callable[[SourceState], Tensor]


class SourcePass:
    """Encodes the sources that come new into a pass, writes their keys and values, and says where those of each text lie.

    A source is encoded alone and whole, so its bits depend on no other one and nothing is padded. Its keys and values are
    products of single rows, so those of all new sources are computed together.

    Args:
        batch: The rows; every segment has a source.
    """

    def __init__(
        self, batch: RaggedBatch, pool: KVPool, encode: Encode, num_layers: int, width: int, dtype: torch.dtype
    ) -> None:
        self._batch, self._pool, self.num_layers = batch, pool, num_layers
        sources = [segment.source for segment in batch.segments]
        self._sources = [source for source in sources if source is not None]
        assert len(self._sources) == len(batch.segments), "a text of a model with an encoder has a source"
        self._new = list({id(source): source for source in self._sources if not source.is_computed}.values())
        for source in self._new:
            if source.encoded is None:
                source.encoded = encode(source)
        #: Tells our attention that a layer attends to the source: transformers hands it on as the layer's keys.
        self.stand_in = torch.zeros(1, 1, 1, 1, dtype=dtype, device=batch.device)
        states = self.encoded_apart
        #: [1, num_rows, width] of all new sources; one row of zeros, which nobody reads, where there is none.
        self.encoded = torch.cat(states)[None] if states else torch.zeros(1, 1, width, dtype=dtype, device=batch.device)
        self._written: set[int] = set()
        self._slots = [batch.as_slots(self._slots_of(source)) for source in self._sources]

    @property
    def sources(self) -> list[SourceState]:
        """The source of each segment."""
        return self._sources

    @property
    def encoded_apart(self) -> list[Tensor]:
        """Returns what the encoder has left of each new source, [num_tokens, width]."""
        return [source.encoded for source in self._new if source.encoded is not None]

    @property
    def has_new(self) -> bool:
        """Tells whether layers are to compute keys and values."""
        return bool(self._new)

    def slots(self, index: int) -> Slots:
        """Returns where the source of segment `index` lies."""
        return self._slots[index]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store what a layer has computed of all new sources, [num_rows, num_kv_heads, head_dim] both."""
        slots = [torch.from_numpy(self._slots_of(source)) for source in self._new]
        self._pool.write(layer, keys, values, torch.cat(slots).to(self._batch.device))
        self._written.add(layer)

    def keep(self) -> None:
        """The pass has succeeded: what it has written stands."""
        for source in self._new:
            source.wrote(self._written, self.num_layers)

    def _slots_of(self, source: SourceState) -> np.ndarray:
        return slots_of(source.block_table, len(source.token_ids), self._batch.block_size)


# --- The context of a pass for attention functions: which row may see which other rows.


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class SeenPart:
    """The part of a sequence's context that its rows look at in a layer."""

    slots: Slots  # where it lies in the pool. It ends with the rows themselves.
    # Whether every row sees all that comes before it and nothing else of it, and no slot comes before the rows.
    causal: bool
    # [num_rows, num_slots] additive, or [num_heads, num_rows, num_slots] with a bias for each head; None where every row
    # sees everything, and all of it alike.
    mask: Tensor | None


@dataclass
class ForwardContext:
    """One pass: its rows, its KV memory and its masks, built once per reach and shared by all layers."""

    batch: RaggedBatch  # the rows
    pool: KVPool  # where their KV goes and their context comes from
    reaches: list[LayerReach]  # how far each layer looks, by layer index
    kernel: RowAttention | None = None  # what attends in the pass where our kernels do
    running: RunningPass | None = None  # the running states, where the model has layers with such
    sources: SourcePass | None = None  # the sources of its texts, where the model has an encoder
    # What a layer adds to products of queries and keys by their distance, [num_heads, num_distances]; the last one holds
    # for all greater distances. By layer index; none for layers that add nothing.
    biases: Mapping[int, Tensor] = field(default_factory=dict)
    source_kernel: RowAttention | None = None  # what attends to the sources where our kernels do
    head_panels: np.ndarray | None = None  # the tokens that have logits, as the kernels take them; None for all
    _parts: dict[tuple[int, LayerReach, torch.dtype, int], SeenPart] = field(default_factory=dict)
    _row_parts: dict[tuple[int, LayerReach, int], list[SeenPart]] = field(default_factory=dict)

    def part(self, index: int, layer: int, dtype: torch.dtype) -> SeenPart:
        """Returns what the rows of segment `index` look at in `layer`, with a mask in `dtype`."""
        reach, bias = self.reaches[layer], self.biases.get(layer)
        key = (index, reach, dtype, id(bias))
        if key not in self._parts:
            part = self._seen_part(index, reach, dtype)
            self._parts[key] = part if bias is None else self._biased(index, part, bias)
        return self._parts[key]

    def source_part(self, index: int) -> SeenPart:
        """Returns what the rows of segment `index` look at in layers that attend to its source: all of it."""
        assert self.sources is not None, "the model has an encoder"
        return SeenPart(self.sources.slots(index), causal=False, mask=None)

    def _biased(self, index: int, part: SeenPart, bias: Tensor) -> SeenPart:
        """Returns the same part, whose mask adds what belongs to the distance of each row from each slot."""
        segment, device = self.batch.segments[index], self.batch.device
        own = torch.from_numpy(segment.positions).to(device)
        length = part.slots.stop - part.slots.start if isinstance(part.slots, slice) else len(part.slots)
        past = length - segment.num_rows
        positions = torch.cat([torch.arange(segment.start - past, segment.start, device=device), own])
        distances = (own[:, None] - positions).clamp(0, bias.shape[1] - 1)  # rows see nothing behind themselves
        added = bias[:, distances]
        return replace(part, causal=False, mask=added if part.mask is None else added + part.mask)

    def _seen_part(self, index: int, reach: LayerReach, dtype: torch.dtype) -> SeenPart:
        segment, slots = self.batch.segments[index], self.batch.context_slots[index]
        first = first_seen(segment, reach)
        left = slice(slots.start + first, slots.stop) if isinstance(slots, slice) else slots[first:]
        if segment.num_rows == 1:
            return SeenPart(left, causal=False, mask=None)
        mask = additive(visible(segment, reach, first, self.batch.device), dtype)
        longest = min((size for size in (reach.window, reach.chunk) if size is not None), default=segment.num_rows)
        causal = segment.parents is None and segment.start == 0 and segment.num_rows <= longest
        return SeenPart(left, causal, mask)

    def parts_by_row(self, index: int, layer: int) -> list[SeenPart]:
        """For each row of segment `index` in `layer`, what it looks at, in the order of positions."""
        reach, bias = self.reaches[layer], self.biases.get(layer)
        key = (index, reach, id(bias))
        if key not in self._row_parts:
            slots = self.batch.context_slots[index]
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop, device=self.batch.device)
            seen = visible(self.batch.segments[index], reach, device=self.batch.device)
            # Ancestors come before their descendants, so the order of slots is that of positions along any one path.
            self._row_parts[key] = [_row_part(slots[row], bias) for row in seen]
        return self._row_parts[key]


def _row_part(slots: Tensor, bias: Tensor | None) -> SeenPart:
    """Returns what one row looks at: these slots, of which the last one is its own and each other one is a step farther
    away."""
    if bias is None:
        return SeenPart(slots, causal=False, mask=None)
    distances = torch.arange(len(slots) - 1, -1, -1, device=slots.device).clamp_max(bias.shape[1] - 1)
    return SeenPart(slots, causal=False, mask=bias[:, None, distances])


def first_seen(segment: Segment, reach: LayerReach) -> int:
    """The first position that a row of the segment sees. No row sees more of the past than the first one."""
    first = 0 if reach.window is None else segment.start - reach.window + 1
    if reach.chunk is not None:
        first = max(first, segment.start // reach.chunk * reach.chunk)
    return max(first, 0)


def visible(segment: Segment, reach: LayerReach, first: int = 0, device: torch.device = _CPU) -> Tensor:
    """Which context slots behind the first `first` ones each row may look at: [num_rows, context_len - first] bool.

    Rows differ only in what they see of one another and at the edge of a window or chunk. So this is made on the device,
    and no more than the matrix of a tree is carried there.
    """
    past, num_rows = segment.start - first, segment.num_rows
    seen = torch.ones(num_rows, past + num_rows, dtype=torch.bool, device=device)
    seen[:, past:] = seen[:, past:].tril() if segment.parents is None else torch.from_numpy(segment.ancestry).to(device)
    if reach == LayerReach():
        return seen
    own = torch.from_numpy(segment.positions).to(device)
    rows, columns = own[:, None], torch.cat([torch.arange(first, segment.start, device=device), own])[None]
    if reach.window is not None:
        seen &= rows - columns < reach.window
    if reach.chunk is not None:
        seen &= rows // reach.chunk == columns // reach.chunk
    return seen


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, minus infinity where not, in `dtype`."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


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

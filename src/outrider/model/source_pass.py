"""SourcePass: the sources of the texts in one pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import KVPool, Slots
from outrider.cache.source import SourceState
from outrider.model.batch import RaggedBatch, slots_of

#: Hidden states [num_tokens, width] that an encoder leaves of a source.
Encode = Callable[[SourceState], Tensor]


class SourcePass:
    """Encodes the sources that come new into a pass, writes their keys and values, and says where those of each text lie.

    A source is encoded alone and whole, so its bits depend on no other one and nothing is padded. Its keys and values are
    products of single rows, so those of all new sources are computed together.

    Args:
        batch: The rows; every segment has a source.
        pool: Where keys and values lie.
        encode: The encoder.
        num_layers: Layers that attend to a source.
        width: Of the hidden states that an encoder leaves.
        dtype: Of the model.
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
        """What the encoder has left of each new source, [num_tokens, width]."""
        return [source.encoded for source in self._new if source.encoded is not None]

    @property
    def has_new(self) -> bool:
        """Whether layers are to compute keys and values."""
        return bool(self._new)

    def slots(self, index: int) -> Slots:
        """Where the source of segment `index` lies."""
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

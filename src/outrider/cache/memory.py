"""StateMemory: the memory of one model, in which the states of its texts lie."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from weakref import WeakSet

import torch

from outrider.cache.added_layers import AddedLayers, AddedShape, Recompute
from outrider.cache.blocks import BlockManager
from outrider.cache.pool import KVPool
from outrider.cache.source import SourceState
from outrider.cache.state import SequenceState


class StateMemory:
    """Blocks and the tensors behind them.

    Args:
        blocks: The blocks.
        long_rope_after: Tokens after which the model uses other rotary factors for the whole text; None for never.
        trial_source: The source of texts that try something out and bring none; None for a model without an encoder.

    Attributes:
        pool: Keys and values of all slots.
        added: Layers that proposers keep beside the model's own, as long as somebody holds them.
    """

    def __init__(
        self, blocks: BlockManager, long_rope_after: int | None = None, trial_source: Sequence[int] | None = None
    ) -> None:
        self.blocks = blocks
        self.trial_source = trial_source
        self.long_rope_after = long_rope_after
        self.pool = KVPool(blocks.num_blocks * blocks.block_size)
        self.added: WeakSet[AddedLayers] = WeakSet()
        self._numbers = count(1)

    def state(self, namespace: str | None = None, source: Sequence[int] | None = None) -> SequenceState:
        """A state that holds nothing yet, for a text of this namespace, behind a source where the model has an encoder."""
        return SequenceState(self, namespace, None if source is None else SourceState(self.blocks, source, namespace))

    def room_for(self, num_tokens: int, source: Sequence[int] | None = None) -> SequenceState:
        """A state with room for a text of so many tokens, of which nothing is computed; there is memory for it. Without a
        source it is one to try things out."""
        state = self.state(None, self.trial_source if source is None else source)
        state.open([0] * num_tokens, share=False)
        reserved = state.reserve(num_tokens)
        assert reserved, "the caller has made the memory large enough"
        return state

    def add_layers(
        self, shape: AddedShape, dtype: torch.dtype, device: torch.device, recompute: Recompute, aux_layers: Sequence[int]
    ) -> AddedLayers:
        """Layers of a proposer in the blocks of this memory; the arguments are those of `AddedLayers`."""
        size, number = self.blocks.block_size, next(self._numbers)
        layers = AddedLayers(number, shape, size, self.blocks.num_blocks, dtype, device, recompute, aux_layers)
        self.added.add(layers)
        return layers

    def make_copies(self, states: Collection[SequenceState]) -> None:
        """Make the copies of blocks that reservations of these states have left, all of them together."""
        pairs = [pair for state in states for pair in state.copies]
        if not pairs:
            return  # as in almost every step
        size = self.blocks.block_size
        self.move([(source * size + i, target * size + i) for source, target in pairs for i in range(size)])
        for added in self.added:
            added.copy_blocks(*zip(*pairs, strict=True))
        for state in states:
            state.copies.clear()

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copy slots, (source, destination) each; all sources are read before any destination is written."""
        sources, destinations = [source for source, _ in slots], [destination for _, destination in slots]
        self.pool.move(sources, destinations)
        for layers in self.added:
            layers.move(sources, destinations)

    def check_integrity(self, states: Collection[SequenceState]) -> None:
        """Raise AssertionError unless the books agree with the states that are in use."""
        tables = {id(table): table for state in states for table in state.block_tables}  # samples share their source's
        self.blocks.check_integrity(tables.values())

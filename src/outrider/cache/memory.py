"""The memory of one model, in which the states of its texts lie, and the layers that proposers add to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakSet

import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.cache.pool import KVPool
from outrider.cache.state import KVView, SequenceState, SourceState
from outrider.errors import ContradictionError, InvalidParameterError

# --- StateMemory: the memory of one model, in which the states of its texts lie.


class StateMemory:
    """Blocks and the tensors behind them.

    Args:
        long_rope_after: Tokens after which the model uses other rotary factors for the whole text; None for never.
        trial_source: The source of texts that try something out and bring none; None for a model without an encoder.
        owners: The layers whose keys and values other layers read, by these.

    Attributes:
        pool: Keys and values of all slots.
        added: Layers that proposers keep beside the model's own, as long as somebody holds them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        long_rope_after: int | None = None,
        trial_source: Sequence[int] | None = None,
        owners: Mapping[int, int] | None = None,
    ) -> None:
        self.blocks = blocks
        self.trial_source = trial_source
        self.long_rope_after = long_rope_after
        self.pool = KVPool(blocks.num_blocks * blocks.block_size, owners)
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


# --- AddedLayers: layers of a proposer that keep keys and values beside the target's own, in the same blocks.


#: From the tokens [n] of a text and the hidden states [n, hidden_size] of the target, by layer, to keys and values
#: [n, num_heads, dim] of each added layer. The proofs compare what is kept with what this computes.
Recompute = Callable[[Sequence[int], Mapping[int, Tensor]], list[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class AddedShape:
    """Holds what added layers keep."""

    num_layers: int  # how many there are
    num_heads: int  # key-value heads of each
    head_dim: int  # width of a head's keys, and of its values where nothing else is said
    feature_size: int = 0  # width of what is kept beside each full block, for whoever goes on behind it; 0 for nothing
    value_dim: int | None = None  # width of a head's values; None for that of its keys
    # Whether there are blocks for rows of drafts, too, behind those of the texts and as many. They count as nothing, since
    # memory is taken as it is used and few drafts grow at a time.
    draft_blocks: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Returns the widths of a head's keys and of its values."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def numbers_per_token(self) -> int:
        """Keys and values of a token in all layers."""
        return self.num_layers * self.num_heads * sum(self.widths)

    def nbytes(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that so many blocks take."""
        return num_blocks * (block_size * self.numbers_per_token + self.feature_size) * dtype.itemsize


class AddedLayers:
    """Keys and values that a proposer keeps of the texts of the target, one slot a token.

    They share the target's blocks: what is forked, copied, moved, shared with later texts or given back is so for these
    layers too. So a proposer must keep up with the target: it writes the rows of a block in `observe` of the step that
    fills the block at the latest, for what lies further back may belong to other texts by then. Behind the text, in the
    room for a draft, it may write at any time.

    The slot of token i may hold what token i and the target's feature of token i - 1 give. The feature of a block's last
    token is kept with the block, so that a text that begins with a block of another one can go on behind it.

    Attributes:
        block_size: Tokens a block.
        memory: Keys and values [num_slots, num_heads, dim] of each layer.
        draft_blocks: Blocks behind those of the texts, for rows of drafts while these grow.
    """

    def __init__(
        self,
        number: int,
        shape: AddedShape,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        recompute: Recompute,
        aux_layers: Sequence[int],
    ) -> None:
        self.number = number
        self.shape = shape
        self.recompute = recompute
        self.aux_layers = tuple(aux_layers)
        self.block_size = block_size
        self.draft_blocks = range(num_blocks, 2 * num_blocks if shape.draft_blocks else num_blocks)
        self._pool = KVPool((num_blocks + len(self.draft_blocks)) * block_size)
        keys, values = (torch.empty(0, shape.num_heads, dim, dtype=dtype, device=device) for dim in shape.widths)
        self.memory = [self._pool.memory(layer, keys, values) for layer in range(shape.num_layers)]
        self._features = torch.empty(num_blocks, shape.feature_size, dtype=dtype, device=device)

    def num_filled(self, kv: KVView) -> int:
        """Leading tokens of a text that the layers hold."""
        return kv.num_filled(self.number)

    def write(self, kv: KVView, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store rows of a text.

        Args:
            keys: [num_rows, num_heads, head_dim]
            values: [num_rows, num_heads, value_dim]
        """
        self._check_layer(layer)
        for name, rows, dim in zip(("keys", "values"), (keys, values), self.shape.widths, strict=True):
            wanted = (len(keys), self.shape.num_heads, dim)
            if tuple(rows.shape) != wanted:
                raise InvalidParameterError(name, list(rows.shape), "rows of another shape", f"Use {list(wanted)}.")
        slots = torch.tensor(self.writable_slots(kv, start, len(keys)), dtype=torch.long, device=keys.device)
        self._pool.write(layer, keys, values, slots)

    def writable_slots(self, kv: KVView, start: int, count: int) -> list[int]:
        """Returns where so many rows of a text lie from position `start` on, for whoever writes them there."""
        first, end = kv.writable
        if not first <= start <= start + count <= end:
            problem = f"{count} rows there are outside the slots from {first} to {end} that may be written now"
            remedy = "Write rows of the block that the last pass went on in, and those of a draft."
            raise ContradictionError("start", start, problem, remedy)
        return kv.slots(start, start + count)

    def begin_block(self, block: int, kv: KVView, stop: int) -> None:
        """Begin a block of a draft with the rows of a text that share its last block before `stop`."""
        count, size = stop % self.block_size, self.block_size
        if not count:
            return
        source, target = kv.block_table[stop // size] * size, block * size
        for pair in self.memory:
            for store in pair:
                store[target : target + count] = store[source : source + count]

    def read(self, kv: KVView, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys [stop, num_heads, head_dim] and values [stop, num_heads, value_dim] of the first slots of a text."""
        self._check_layer(layer)
        if not 0 <= stop <= kv.capacity:
            raise ContradictionError("stop", stop, f"the text has {kv.capacity} slots", "Read no further.")
        return self._pool.read(layer, torch.tensor(kv.slots(0, stop), dtype=torch.long, device=self._features.device))

    def fill(self, kv: KVView, stop: int, features: Tensor | None = None) -> None:
        """Say that the layers hold the first `stop` tokens of a text now.

        Args:
            features: [n, feature_size] of the last n tokens before `stop`, of all that are new at least; None where no
                features are kept.
        """
        filled = self.num_filled(kv)
        if not filled <= stop <= kv.end:
            problem = f"{filled} tokens were held, and the target has computed {kv.end}"
            raise ContradictionError("stop", stop, problem, f"Use {filled} to {kv.end}.")
        ends = range((filled // self.block_size + 1) * self.block_size, stop + 1, self.block_size)
        if self.shape.feature_size and ends:
            count = 0 if features is None else len(features)
            if features is None or count < stop - filled or features.shape[1] != self.shape.feature_size:
                remedy = f"Give [{stop - filled}, {self.shape.feature_size}] at least."
                raise ContradictionError("features", count, "the features of new tokens are missing", remedy)
            blocks = [kv.block_table[end // self.block_size - 1] for end in ends]
            self._features[blocks] = features[[end - stop - 1 for end in ends]].to(self._features)
        kv.fill(self.number, stop)

    def feature_of_last(self, kv: KVView) -> Tensor | None:
        """The feature [feature_size] of the last token that the layers hold, where a block ends with it; None elsewhere."""
        filled = self.num_filled(kv)
        if not self.shape.feature_size or not filled or filled % self.block_size:
            return None
        return self._features[kv.block_table[filled // self.block_size - 1]].clone()

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy slots onto others in every layer; the memory calls this whenever it does so."""
        self._pool.move(sources, destinations)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy what is kept beside blocks onto others; the memory calls this when it copies their slots."""
        self._features[list(destinations)] = self._features[list(sources)]

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.shape.num_layers:
            problem, remedy = f"{self.shape.num_layers} were added", f"Use 0 to {self.shape.num_layers - 1}."
            raise InvalidParameterError("layer", layer, problem, remedy)

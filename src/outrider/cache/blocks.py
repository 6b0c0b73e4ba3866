"""Block tables, reference counts, the prefix cache, and running states at the ends of its blocks; no tensors."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence, Set

from outrider.cache.running import RunningText

# --- Block tables, reference counts and the prefix cache; plain Python, no tensors.
#
# A sequence's KV lives in fixed-size blocks named by its block table, as in PagedAttention (Kwon et al. 2023). A full
# block of committed tokens may be *published* under the exact tokens that led to it; a later sequence that starts with
# the same tokens then shares the block instead of computing it. Keys are compared token by token, never by a hash
# alone.


PrefixKey = tuple[Hashable, tuple[int, ...]]


class BlockManager:
    """Owns the blocks of one KV pool.

    Args:
        states: Running states at the ends of published blocks; None for a model that has none. With them, a text begins
            behind a block with a state or at its first token.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, states: KeptStates | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.states = states
        self._next_uid = 1
        self.reset()

    def reset(self) -> None:
        """Begin anew with all blocks free and nothing published; tables that were handed out are void."""
        self._ref_count = [0] * self.num_blocks
        self._key: list[PrefixKey | None] = [None] * self.num_blocks
        self._uid = [0] * self.num_blocks  # names a published block's content to its children; never used twice
        self._free: deque[int] = deque(range(self.num_blocks))  # unpublished, unreferenced
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, unreferenced; oldest first
        self._published: dict[PrefixKey, int] = {}
        self._held: list[set[int]] = [set() for _ in range(self.num_blocks)]  # added layers of which a block is full
        self._unfound: dict[int, PrefixKey] = {}  # full blocks whose twins are published
        if self.states is not None:
            self.states.clear()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those that only the prefix cache holds included."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed to hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each; the caller has checked `num_free`."""
        assert count <= self.num_free, "allocate() beyond num_free"
        return [self._take() for _ in range(count)]

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend `table` until it holds `num_tokens`; False, and no change, where memory is short."""
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > self.num_free:
            return False
        if missing > 0:
            table.extend(self.allocate(missing))
        return True

    def fork(self, table: Sequence[int]) -> list[int]:
        """A second table over the same blocks; whoever writes first copies (see `make_writable`)."""
        for block in table:
            self._ref_count[block] += 1
        return list(table)

    def free(self, table: list[int]) -> None:
        """Drop one reference to each block and empty the table; tails go first, so that heads stay cached longest."""
        for block in reversed(table):
            assert self._ref_count[block] > 0, "block freed twice"
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                if self._key[block] is None:
                    self._free.appendleft(block)
                else:
                    self._idle[block] = None
        table.clear()

    def shared_from(self, table: Sequence[int], start: int, stop: int) -> list[int]:
        """Indices into `table` of blocks that hold tokens [start, stop) and that someone else also references."""
        first, last = start // self.block_size, self.blocks_for(stop)
        return [i for i in range(first, min(last, len(table))) if self._ref_count[table[i]] > 1]

    def make_writable(self, table: list[int], start: int, stop: int) -> list[tuple[int, int]]:
        """Give `table` its own blocks for tokens [start, stop).

        Returns:
            (source, destination) blocks whose contents the caller must copy. The caller has checked `num_free`.
        """
        copies = []
        for i in self.shared_from(table, start, stop):
            fresh = self._take()
            copies.append((table[i], fresh))
            self._ref_count[table[i]] -= 1
            table[i] = fresh
        return copies

    def match(self, token_ids: Sequence[int], namespace: Hashable = None, needs: Set[int] = frozenset()) -> list[int]:
        """Take a reference on the longest published prefix whose blocks hold the added layers that are needed, at least one
        token short of `token_ids`; returns its blocks."""
        table: list[int] = []
        parent: Hashable = (namespace,)
        for index in range((len(token_ids) - 1) // self.block_size if self.prefix_caching else 0):
            block = self._published.get((parent, self._tokens_of(token_ids, index)))
            if block is None or not needs <= self._held[block]:
                break
            table.append(block)
            parent = self._uid[block]
        while self.states is not None and table and table[-1] not in self.states:
            table.pop()
        for block in table:
            self._idle.pop(block, None)
            self._ref_count[block] += 1
        return table

    def keep_states(self, block: int, text: RunningText) -> None:
        """Keep what a text holds at the end of one of its settled blocks, with the block that others find."""
        twin_of = self._unfound.get(block)
        found = block if twin_of is None else self._published.get(twin_of)
        if self.states is not None and found is not None and self._key[found] is not None:
            self.states.add(found, text)

    def hold(self, blocks: Iterable[int], number: int) -> None:
        """Note that these blocks are full of keys and values of an added layer too. One with a layer that its published
        twin lacks takes the place of it, since whoever computed it had no use for the twin."""
        for block in blocks:
            self._held[block].add(number)
            key = self._unfound.get(block)
            twin = None if key is None else self._published.get(key)
            if key is not None and (twin is None or not self._held[block] <= self._held[twin]):
                if twin is not None:
                    if self.states is not None:
                        self.states.move(twin, block)
                    self._withdraw(twin)
                self._show(block, key)

    def publish(self, token_ids: Sequence[int], table: Sequence[int], first: int, namespace: Hashable = None) -> int:
        """Make the full blocks of `token_ids` from index `first` on findable.

        Returns:
            The number of leading blocks that are settled, to pass as `first` next time.
        """
        full = min(len(token_ids) // self.block_size, len(table))
        if not self.prefix_caching:
            return full
        for index in range(first, full):
            block = table[index]
            if self._key[block] is not None:
                continue
            parent = (namespace,) if index == 0 else self._uid[table[index - 1]]
            assert parent, "blocks are published in order"
            key = (parent, self._tokens_of(token_ids, index))
            if key in self._published:  # a twin computed the same block first: this one stays private, its children do not
                self._uid[block] = self._uid[self._published[key]]
                self._unfound[block] = key
                continue
            self._uid[block] = self._next_uid
            self._next_uid += 1
            self._show(block, key)
        return full

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the books agree with the tables that are in use."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        assert counted == self._ref_count, "reference counts disagree with the tables"
        unreferenced = [b for b in range(self.num_blocks) if counted[b] == 0]
        assert sorted([*self._free, *self._idle]) == unreferenced, "free blocks lost or doubled"
        assert all(self._key[b] is None for b in self._free), "a published block on the plain free list"
        assert all(self._key[b] is not None for b in self._idle), "an unpublished block among the idle ones"
        assert all(self._key[b] == key for key, b in self._published.items()), "prefix index out of step"
        if self.states is not None:
            assert all(self._key[b] is not None for b in self.states.blocks), "a state of a block that is not published"
            assert len(self.states) <= self.states.capacity, "more states than there may be"

    def _show(self, block: int, key: PrefixKey) -> None:
        """Let a block be found."""
        self._key[block] = key
        self._published[key] = block
        self._unfound.pop(block, None)

    def _withdraw(self, block: int) -> None:
        """Let a published block be found no more."""
        key = self._key[block]
        assert key is not None
        del self._published[key]
        self._key[block] = None
        if self.states is not None:
            self.states.drop(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def _tokens_of(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _take(self) -> int:
        if not self._free:
            self._withdraw(next(iter(self._idle)))  # the oldest
        block = self._free.popleft()
        self._unfound.pop(block, None)
        self._uid[block] = 0
        self._held[block].clear()
        self._ref_count[block] = 1
        return block


# --- KeptStates: running states at the ends of published blocks, so that a text that begins alike can go on there. No
# torch.
#
# A block holds keys and values of single tokens, and no running state. So the states at the ends of some blocks are
# kept beside them: of the last block of what a text began with, and every few hundred tokens. There are never more of
# them than was asked for, and the one that no text has gone on from for the longest time is given up first.


#: Tokens between two states of a long text.
STATE_SPACING = 256


class KeptStates:
    """The states that blocks carry.

    Args:
        spacing: Tokens between two states of a long text; a whole number of blocks.
    """

    def __init__(self, capacity: int, spacing: int) -> None:
        self.capacity = capacity
        self._spacing = spacing
        self._states: OrderedDict[int, RunningText] = OrderedDict()  # by block; least recently used first

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, block: int) -> bool:
        return block in self._states

    @property
    def blocks(self) -> list[int]:
        """Blocks that carry a state."""
        return list(self._states)

    def places(self, start: int, stop: int, end_of_prompt: int) -> tuple[int, ...]:
        """Positions behind `start`, up to `stop`, whose states are to be kept."""
        if self.capacity == 0:
            return ()
        found = set(range((start // self._spacing + 1) * self._spacing, stop + 1, self._spacing))
        if start < end_of_prompt <= stop:
            found.add(end_of_prompt)
        return tuple(sorted(found))

    def make_room(self, count: int) -> int:
        """Give up states until `count` more fit; returns how many more there may be."""
        while self._states and len(self) + count > self.capacity:
            self._states.popitem(last=False)
        return min(count, self.capacity - len(self))

    def add(self, block: int, text: RunningText) -> None:
        """Keep what a text holds at the end of a block."""
        if block not in self._states and not self.make_room(1):
            return
        self._states[block] = text
        self._states.move_to_end(block)

    def begin_at(self, block: int) -> RunningText:
        """The states of a text that goes on behind a block."""
        self._states.move_to_end(block)
        return self._states[block].fork()

    def move(self, block: int, other: int) -> None:
        """Another block takes the place of this one."""
        if block in self._states:
            self.add(other, self._states.pop(block))

    def drop(self, block: int) -> None:
        """The block cannot be found any more."""
        self._states.pop(block, None)

    def clear(self) -> None:
        """Forget all."""
        self._states.clear()

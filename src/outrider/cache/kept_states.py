"""KeptStates: running states at the ends of published blocks, so that a text that begins alike can go on there. No torch.

A block holds keys and values of single tokens, and no running state. So the states at the ends of some blocks are kept
beside them: of the last block of what a text began with, and every few hundred tokens. There are never more of them than
was asked for, and the one that no text has gone on from for the longest time is given up first.
"""

from __future__ import annotations

from collections import OrderedDict

from outrider.cache.running import RunningText

#: Tokens between two states of a long text.
STATE_SPACING = 256


class KeptStates:
    """The states that blocks carry.

    Args:
        capacity: Most states that there may be.
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

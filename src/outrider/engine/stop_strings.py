"""Matches all stop strings of a request at once, complete ones and beginnings.

An automaton of Aho and Corasick (1975). A node is a beginning of some stop string, node 0 the empty one; the node of a text
is the longest of its tails that is such a beginning. A character costs a step or two, however many strings there are.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple
from weakref import WeakValueDictionary


class StopHit(NamedTuple):
    """A stop string found in a text.

    Attributes:
        start: Where it begins, counted from the first character of the piece that completed it; it may be below 0.
        length: Its characters.
    """

    start: int
    length: int


class StopStrings:
    """The automaton of some stop strings.

    Args:
        stop: Non-empty strings.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._ending = [0]  # length of the longest stop string that the node's text ends with
        for string in stop:
            self._ending[self._grow(string)] = len(string)
        self._fallback = [0] * len(self)  # the longest shorter tail of the node's text that is a node, too
        self._held_back = [0] * len(self)  # length of the longest tail that has children
        self._link()

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self._children)

    def scan(self, node: int, piece: str) -> tuple[int, StopHit | None]:
        """Go on from a text's node by the piece that follows it.

        Returns:
            The node of the longer text, and the stop string that this piece completes: the one that begins first, and the
            shortest of those that begin together. Strings that the text held before do not count.
        """
        hit: StopHit | None = None
        for place, character in enumerate(piece):
            node = self._step(node, character)
            length = self._ending[node]
            start = place + 1 - length
            if length and (hit is None or start < hit.start):
                hit = StopHit(start, length)
        return node, hit

    def held_back(self, node: int) -> int:
        """Length of the longest tail of a node's text that a stop string might go on from."""
        return self._held_back[node]

    def _grow(self, string: str) -> int:
        """The node of `string`, after adding what is missing on the way there."""
        node = 0
        for character in string:
            children = self._children[node]
            if character not in children:
                children[character] = len(self)
                self._depth.append(self._depth[node] + 1)
                self._ending.append(0)
                self._children.append({})
            node = children[character]
        return node

    def _link(self) -> None:
        waiting = deque([0])
        while waiting:  # shorter texts first: what is known of a tail is known before
            node = waiting.popleft()
            tail = self._fallback[node]
            self._ending[node] = self._ending[node] or self._ending[tail]
            self._held_back[node] = self._depth[node] if self._children[node] else self._held_back[tail]
            for character, child in self._children[node].items():
                self._fallback[child] = self._step(tail, character) if node else 0
                waiting.append(child)

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(character, 0)


_AUTOMATA: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()


def stop_strings(stop: tuple[str, ...]) -> StopStrings:
    """The automaton of `stop`, one for all the texts that live at the same time."""
    found = _AUTOMATA.get(stop)
    if found is None:
        found = _AUTOMATA[stop] = StopStrings(stop)
    return found

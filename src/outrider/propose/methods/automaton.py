"""A suffix automaton over a growing set of texts, with counts and continuations. No torch.

An online suffix automaton (Blumer et al. 1985): one state for all substrings that end at the same places, a transition for
each token that followed them. Appending a token takes constant time on average. The suffix link of the state of the whole
text is the longest suffix that occurred before: what a lookup proposer asks for costs nothing.
"""

from __future__ import annotations

import sys

ROOT = 0
#: Suffixes of the text, longest first, whose count a new token raises. Shorter ones are rarely looked up.
_COUNTED = 24
_STATE_BYTES = sys.getsizeof({0: 0}) + 3 * (sys.getsizeof(1 << 20) + 8)


class SuffixAutomaton:
    """Substrings of all texts begun so far.

    Attributes:
        followers: For each state, the state that each next token leads to.
        links: For each state, the state of its longest suffix that occurs elsewhere too; -1 for the root.
        lengths: Length of each state's longest substring.
        counts: How often each state's substrings occurred; 0 for the root.
        last: State of the whole current text.
    """

    def __init__(self) -> None:
        self.followers: list[dict[int, int]] = [{}]
        self.links = [-1]
        self.lengths = [0]
        self.counts = [0]
        self.last = ROOT

    @property
    def num_bytes(self) -> int:
        """Memory it takes, estimated from what a state with one transition does."""
        return len(self.links) * _STATE_BYTES

    def begin(self) -> None:
        """Start another text."""
        self.last = ROOT

    def append(self, token: int) -> None:
        """One more token of the current text."""
        known = self.followers[self.last].get(token)
        if known is not None:  # only at the start of another text: this one has no substring that long yet
            solid = self.lengths[known] == self.lengths[self.last] + 1
            self.last = known if solid else self._split(self.last, token, known)
        else:
            self.last = self._add(self.last, token)
        state = self.last
        for _ in range(_COUNTED):
            if state == ROOT:
                break
            self.counts[state] += 1
            state = self.links[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """From a match of `length` tokens in `state` to the longest match after one more token."""
        followers, links, lengths = self.followers, self.links, self.lengths
        while state != ROOT and length <= lengths[links[state]]:  # states split since the match was found
            state = links[state]
        while state != ROOT and token not in followers[state]:
            state = links[state]
            length = lengths[state]
        found = followers[state].get(token)
        return (ROOT, 0) if found is None else (found, length + 1)

    def _add(self, state: int, token: int) -> int:
        """A state for the text that ends in `state`, and `token`."""
        added = self._state({}, self.lengths[state] + 1, 0)
        while state >= 0 and token not in self.followers[state]:
            self.followers[state][token] = added
            state = self.links[state]
        if state < 0:
            self.links[added] = ROOT
        else:
            known = self.followers[state][token]
            solid = self.lengths[known] == self.lengths[state] + 1
            self.links[added] = known if solid else self._split(state, token, known)
        return added

    def _split(self, state: int, token: int, known: int) -> int:
        """Part the shorter substrings of `known`, which from now on end at more places, into a state of their own."""
        clone = self._state(dict(self.followers[known]), self.lengths[state] + 1, self.counts[known])
        self.links[clone] = self.links[known]
        self.links[known] = clone
        while state >= 0 and self.followers[state].get(token) == known:
            self.followers[state][token] = clone
            state = self.links[state]
        return clone

    def _state(self, followers: dict[int, int], length: int, count: int) -> int:
        self.followers.append(followers)
        self.links.append(ROOT)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.links) - 1

"""Suffix lookup (Oliaro et al. 2024) over a suffix automaton: drafts what followed the longest matching suffix."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Annotated, ClassVar
from weakref import WeakValueDictionary

from pydantic import Field

from outrider.config import Elsewhere
from outrider.draft import EMPTY, Draft, Law
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest, ProposerSequence
from outrider.propose.settings import Method, ProposerContext

# --- A suffix automaton over a growing set of texts, with counts and continuations. No torch.
#
# An online suffix automaton (Blumer et al. 1985): one state for all substrings that end at the same places, a
# transition for each token that followed them. Appending a token takes constant time on average. The suffix link of the
# state of the whole text is the longest suffix that occurred before: what a lookup proposer asks for costs nothing.


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


# --- Suffix lookup (Oliaro et al. 2024): drafts what followed earlier occurrences of the longest matching suffix.
#
# Where prompt lookup copies what followed once, this counts what followed each time, in this text, in the references of
# its request (Yang et al. 2023) and, if asked, in earlier texts of the same namespace. The longer the match, the further it
# drafts.


#: Shorter contexts tried beside the longest match: they have been seen more often.
_CONTEXTS = 3
#: Tokens before the place where drafts begin that are followed in references: no longer match is needed.
_LEAD = 32
#: Tokens that are read in a step, of texts and of what they may quote, all together: the step waits for them, some ten
#: microseconds for each. A text is drafted for when it is read to its end.
_READ_AT_ONCE = 4096
#: A node is worth its row where the target follows the draft that far at least so often.
_LEAST_CHANCE = 0.1
#: What its shortest match is called in llama.cpp's commands.
_MATCH = ("--spec-ngram-mod-n-match", "--spec-ngram-map-k-size-n", "--spec-ngram-map-k4v-size-n")


class Suffix(Method):
    """Drafts what followed the longest matching suffix, most often first; needs no model.

    Attributes:
        min_match: Shortest match that it drafts from.
        factor: Most draft tokens for each token of the match.
        branches: Whether it drafts branches where texts went on in several ways.
        shared: Whether it also learns from finished requests of the same namespace.
        cache_mib: Memory for these, all namespaces together.
    """

    name: ClassVar[str] = "suffix"
    default_num_draft_tokens: ClassVar[int] = 16
    takes_tree: ClassVar[bool] = False
    grows_from_probabilities: ClassVar[bool] = False
    instead_of_tree: ClassVar[str] = "Use Suffix(branches=True)."
    branches_freely: ClassVar[bool] = True

    min_match: Annotated[int, Elsewhere(options=_MATCH)] = Field(2, ge=1, description="Use 1 or more.")
    factor: float = Field(2.0, gt=0.0, le=64.0, description="Use a value above 0, up to 64.")
    branches: bool = False
    shared: bool = False
    cache_mib: int = Field(64, ge=1, description="Use 1 or more.")

    def build(self, context: ProposerContext) -> Proposer:
        shared = SharedTexts(self.cache_mib * 2**20) if self.shared else None
        return SuffixProposer(self.min_match, self.factor, branches=self.branches, shared=shared)


@dataclass
class _Guess:
    """Holds what one context says comes next."""

    law: Law  # how its tokens were chosen
    tokens: list[int] = field(default_factory=list)  # the tree
    parents: list[int] = field(default_factory=list)  # the tree
    expected: float = 0.0  # tokens of it that are expected to stand


@dataclass
class _AutomatonReader:
    """Says how far a sequence has been followed in an automaton of other texts."""

    automaton: SuffixAutomaton
    state: int = ROOT
    length: int = 0
    num_read: int = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Follow the sequence, of which these are all tokens, to its end."""
        for token in tokens[self.num_read :]:
            self.state, self.length = self.automaton.step(self.state, self.length, token)
        self.num_read = len(tokens)


class _References:
    """The texts that the outputs of a request may quote, in an automaton that reads them in parts."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.automaton = SuffixAutomaton()
        self._texts, self._text, self._token = texts, 0, 0

    @property
    def is_read(self) -> bool:
        """True if the automaton has all of it. Before, a text that is followed in it would not find what comes later."""
        return self._text == len(self._texts)

    def read(self, most: int) -> int:
        """Read so many further tokens at most; returns how many these were."""
        left = most
        while left and not self.is_read:
            text = self._texts[self._text]
            part = text[self._token : self._token + left]
            if self._token == 0:
                self.automaton.begin()
            for token in part:
                self.automaton.append(token)
            left, self._token = left - len(part), self._token + len(part)
            if self._token == len(text):
                self._text, self._token = self._text + 1, 0
        return most - left


@dataclass
class _Lookup:
    """Holds what is kept for one sequence."""

    own: SuffixAutomaton
    references: _References
    quoted: _AutomatonReader  # of the references
    num_read: int = 0
    readers: list[_AutomatonReader] = field(default_factory=list)  # of earlier texts


class SharedTexts:
    """Finished texts by namespace, within a limit of bytes; what was longest unused is dropped first, a volume at a
    time."""

    #: A volume is closed at this share of the limit, so that forgetting never takes everything.
    _SHARE = 4

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._shelves: dict[str | None, list[SuffixAutomaton]] = {}  # least recently used first

    @property
    def num_bytes(self) -> int:
        return sum(volume.num_bytes for shelf in self._shelves.values() for volume in shelf)

    def of(self, namespace: str | None) -> list[SuffixAutomaton]:
        """Volumes of a namespace, and of no other, oldest first; being looked at keeps them."""
        shelf = self._shelves.pop(namespace, None)
        if shelf is None:
            return []
        self._shelves[namespace] = shelf
        return shelf

    def add(self, namespace: str | None, tokens: Sequence[int]) -> None:
        """Learn a finished text, as far as a volume holds it."""
        limit = self.max_bytes // self._SHARE
        shelf = self._shelves.setdefault(namespace, [])
        if not shelf or shelf[-1].num_bytes >= limit:
            shelf.append(SuffixAutomaton())
        shelf[-1].begin()
        for token in tokens:
            if shelf[-1].num_bytes >= limit:
                break
            shelf[-1].append(token)
        while self.num_bytes > self.max_bytes:
            self._forget_one()

    def _forget_one(self) -> None:
        namespace, shelf = next(iter(self._shelves.items()))
        del shelf[0]
        if not shelf:
            del self._shelves[namespace]


class SuffixProposer(Proposer):
    """Chains or trees of what followed the longest matching suffix, most often first.

    Args:
        factor: Most draft tokens for each token of the match.
        shared: Earlier texts to look in beside the sequence's own; None for none.
    """

    def __init__(self, min_match: int, factor: float, *, branches: bool = False, shared: SharedTexts | None = None) -> None:
        self._min_match = min_match
        self._factor = factor
        self._branches = branches
        self.shared = shared
        self._lookups: dict[int, _Lookup] = {}
        #: The samples of a request share what they quote.
        self._references: WeakValueDictionary[tuple[str | None, object], _References] = WeakValueDictionary()

    def begin(self, sequence: ProposerSequence) -> None:
        known = (sequence.namespace, sequence.references)
        references = self._references.get(known) or _References(sequence.references)
        self._references[known] = references
        start = max(0, len(sequence.known_token_ids) - _LEAD)
        quoted = _AutomatonReader(references.automaton, num_read=start)
        self._lookups[sequence.seq_id] = _Lookup(SuffixAutomaton(), references, quoted)

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        left = _READ_AT_ONCE
        for sequence in sorted((request.sequence for request in requests), key=self._num_unread):
            left -= self._read(sequence, left)
        return [self._draft(request) for request in requests]

    def finish(self, sequence: ProposerSequence) -> None:
        if self._lookups.pop(sequence.seq_id, None) is not None and self.shared is not None:
            self.shared.add(sequence.namespace, sequence.known_token_ids)

    def check_rest(self) -> None:
        assert not self._lookups, f"{len(self._lookups)} texts are still looked up"

    def snapshot(self) -> object | None:
        return None if self.shared is None else deepcopy(self.shared)

    def restore(self, state: object) -> None:
        assert isinstance(state, SharedTexts)
        self.shared = deepcopy(state)

    def _num_unread(self, sequence: ProposerSequence) -> int:
        return len(sequence.known_token_ids) - self._lookups[sequence.seq_id].num_read

    def _read(self, sequence: ProposerSequence, most: int) -> int:
        """Read so many further tokens of a text and of what it may quote; returns how many these were."""
        lookup = self._lookups[sequence.seq_id]
        part = sequence.known_token_ids[lookup.num_read : lookup.num_read + most]
        for token in part:
            lookup.own.append(token)
        lookup.num_read += len(part)
        return len(part) + lookup.references.read(most - len(part))

    def _draft(self, request: ProposeRequest) -> Draft:
        if self._num_unread(request.sequence):
            return EMPTY
        best = max(self._guesses(request), key=lambda guess: guess.expected, default=None)
        if best is None or not best.tokens:
            return EMPTY
        laws = (best.law,) * len(best.tokens)
        return Draft(tuple(best.tokens), tuple(best.parents), laws)

    def _guesses(self, request: ProposeRequest) -> Iterator[_Guess]:
        """One guess for each place where the text's end was found."""
        lookup = self._lookups[request.sequence.seq_id]
        own, tokens = lookup.own, request.sequence.known_token_ids
        match = max(own.links[own.last], ROOT)
        state, length = _along(own, match, own.lengths[match], request.path)
        yield from self._contexts(own, state, length, request, Law.DETERMINISTIC)
        quoted = [lookup.quoted] if lookup.references.is_read else []
        for reader in (*quoted, *self._readers(lookup, request.sequence)):
            reader.read(tokens)
            state, length = _along(reader.automaton, reader.state, reader.length, request.path)
            yield from self._contexts(reader.automaton, state, length, request, Law.OPAQUE)

    def _readers(self, lookup: _Lookup, sequence: ProposerSequence) -> list[_AutomatonReader]:
        """The namespace's earlier texts."""
        if self.shared is None:
            return []
        volumes = self.shared.of(sequence.namespace)
        if [reader.automaton for reader in lookup.readers] != volumes:  # by identity: automata are equal to nothing else
            known = {id(reader.automaton): reader for reader in lookup.readers}
            lookup.readers = [known.get(id(volume)) or _AutomatonReader(volume) for volume in volumes]
        return lookup.readers

    def _contexts(
        self, automaton: SuffixAutomaton, state: int, length: int, request: ProposeRequest, law: Law
    ) -> Iterator[_Guess]:
        """Guesses from a match and from its shorter suffixes."""
        for _ in range(_CONTEXTS):
            if state <= ROOT or length < self._min_match:
                return
            size = min(request.budget, max(1, int(length * self._factor)))
            depth = min(size, request.max_depth)
            if self._branches:
                yield _tree(automaton, state, size, depth, law)
            else:
                yield _chain(automaton, state, depth, law)
            state = automaton.links[state]
            length = automaton.lengths[state]


def _along(automaton: SuffixAutomaton, state: int, length: int, tokens: Sequence[int]) -> tuple[int, int]:
    """From a match of `length` tokens in `state` to the longest match after more tokens."""
    for token in tokens:
        state, length = automaton.step(state, length, token)
    return state, length


def _tree(automaton: SuffixAutomaton, state: int, size: int, depth: int, law: Law) -> _Guess:
    """The most likely nodes, best first; a parent is always likelier than its child."""
    guess = _Guess(law)
    heap = [(-chance, token, -1, below, 1) for token, below, chance in _followers(automaton, state, 1.0)]
    heap.sort()
    while heap and len(guess.tokens) < size:
        chance, token, parent, below, level = heappop(heap)
        guess.expected -= chance
        guess.tokens.append(token)
        guess.parents.append(parent)
        if level < depth:
            node = len(guess.tokens) - 1
            for following, state_below, odds in _followers(automaton, below, -chance):
                heappush(heap, (-odds, following, node, state_below, level + 1))
    return guess


def _chain(automaton: SuffixAutomaton, state: int, depth: int, law: Law) -> _Guess:
    """Returns what followed most often, token by token."""
    guess, chance = _Guess(law), 1.0
    while len(guess.tokens) < depth:
        ways = _followers(automaton, state, chance)
        if not ways:
            break
        token, state, chance = max(ways, key=lambda way: way[2])
        guess.parents.append(len(guess.tokens) - 1)
        guess.tokens.append(token)
        guess.expected += chance
    return guess


def _followers(automaton: SuffixAutomaton, state: int, chance: float) -> list[tuple[int, int, float]]:
    """(token, state, chance) of what may come after a context that is itself reached with `chance`.

    What was never seen to follow weighs 1 / (1 + length of the context) of an occurrence: the longer the match, the surer.
    """
    counts, followers = automaton.counts, automaton.followers[state]
    unseen = 1.0 / (1 + automaton.lengths[state])
    if len(followers) == 1:
        ((token, below),) = followers.items()
        seen = counts[below]
        odds = chance * seen / (seen + unseen)
        return [(token, below, odds)] if odds >= _LEAST_CHANCE else []
    share = chance / (sum([counts[below] for below in followers.values()]) + unseen)
    return [(t, below, odds) for t, below in followers.items() if (odds := counts[below] * share) >= _LEAST_CHANCE]

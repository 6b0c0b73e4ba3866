"""Turns tokens into text as they come: whole characters only, and nothing behind a stop string."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from tokenizers.decoders import DecodeStream

# --- Turns tokens into text as they come; incomplete characters and incomplete stop strings are held back.


#: What is kept beside a token, such as where it came from.
Source = TypeVar("Source")


class TextStream(Generic[Source]):
    """The growing text of one sequence; without a tokenizer it stays empty.

    It ends with the first of the strings `stop`, which is cut from it. The special tokens `shown` stand in it.
    """

    def __init__(self, tokenizer: Any | None, stop: tuple[str, ...], shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer: Any = tokenizer
        self._stop = stop_strings(stop)
        self._node = 0  # the automaton's, of the text so far
        self._pieces = None if tokenizer is None else TextPieces(tokenizer, shown)
        self._token_ids: list[int] = []
        self._marks: list[tuple[int, Source]] = []  # (end of text, source) of each token
        self._released = 0  # characters handed out
        self._open_mark = 0  # first token whose text is not all handed out
        self._was_cut = False
        self._finished = False
        self.text = ""

    def push(self, token_id: int, source: Source, *, watch: bool) -> str | None:
        """Add a token and its source; returns the stop string that it completed, after cutting the text before it. Stop
        strings count where `watch` says so."""
        before, found = len(self.text), None
        piece = "" if self._pieces is None else self._pieces.add(token_id)
        self._token_ids.append(token_id)
        self.text += piece
        # Only what this piece completes: a string that stood there before, unwatched, no longer counts.
        self._node, hit = self._stop.scan(self._node, piece)
        if watch and hit is not None:
            start = before + hit.start
            found = self.text[start : start + hit.length]
            self.text, self._node, self._was_cut = self.text[:start], 0, True
        self._marks.append((len(self.text), source))
        return found

    def finish(self) -> None:
        """No more tokens: what was held back is text now; a character that never became whole shows as U+FFFD."""
        if self._pieces is not None and not self._finished and self._marks and not self._was_cut:
            whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
            self.text = whole if whole.startswith(self.text) else self.text + self._pieces.rest()
            self._marks[-1] = (len(self.text), self._marks[-1][1])
        self._finished = True

    def texts(self) -> list[str]:
        """The text that each token added, "" where a later one completes its character. Together they are the text."""
        ends = [0, *(min(end, len(self.text)) for end, _ in self._marks)]
        return [self.text[start:end] for start, end in pairwise(ends)]

    def release(self) -> list[tuple[str, Source]]:
        """Text that is certain and was not released before, cut by the source of its tokens."""
        end = len(self.text) if self._finished else len(self.text) - self._stop.held_back(self._node)
        spans = []
        while self._released < end:
            mark, source = self._marks[self._open_mark]
            if mark > self._released:
                cut = min(mark, end)
                spans.append((self.text[self._released : cut], source))
                self._released = cut
            if mark <= self._released:
                self._open_mark += 1
        return spans


# --- The text that each next token adds, in whole characters.


class TextPieces:
    """Decodes tokens one by one. Behind each of the special tokens that are shown the text begins anew.

    A vocabulary with byte tokens may take text back: bytes that were a character are none any more if the run of byte
    tokens that they stand in turns out to be no UTF-8. What was handed out stays then, and the tokens behind it are decoded
    on their own.
    """

    def __init__(self, tokenizer: Any, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []  # tokens behind the last piece

    def add(self, token_id: int) -> str:
        """The text that this token adds; "" while a character is incomplete."""
        found: str | None
        if token_id in self._shown:
            piece = f"{self.rest()}{self._tokenizer.decode([token_id], skip_special_tokens=False)}"
            self._stream, self._waiting = DecodeStream(skip_special_tokens=True), []
            return piece
        self._waiting.append(token_id)
        try:
            found = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        except Exception:  # the stream's only fault: what it has handed out is no longer the beginning of the text
            found = self.rest()
            self._stream = DecodeStream(ids=self._waiting, skip_special_tokens=True)
        if found:
            self._waiting = []
        return found or ""

    def rest(self) -> str:
        """The text of the tokens behind the last piece; a character that never became whole shows as U+FFFD."""
        text: str = self._tokenizer.decode(self._waiting, skip_special_tokens=True)
        return text


# --- Matches all stop strings of a request at once, complete ones and beginnings.
#
# An automaton of Aho and Corasick (1975). A node is a beginning of some stop string, node 0 the empty one; the node of
# a text is the longest of its tails that is such a beginning. A character costs a step or two, however many strings
# there are.


class StopHit(NamedTuple):
    """A stop string found in a text."""

    start: int  # where it begins, counted from the first character of the piece that completed it; it may be below 0
    length: int  # its characters


class StopStrings:
    """The automaton of some stop strings, none of them empty."""

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
        """Go on from a text's node by the piece that follows it. Returns the node of the longer text, and the stop string
        that this piece completes: the one that begins first, and the shortest of those that begin together. Strings that
        the text held before do not count."""
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

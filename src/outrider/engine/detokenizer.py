"""Turns tokens into text as they come; incomplete characters and incomplete stop strings are held back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Generic, TypeVar

from outrider.engine.stop_strings import stop_strings
from outrider.engine.text_pieces import TextPieces

#: What is kept beside a token, such as where it came from.
Source = TypeVar("Source")


class TextStream(Generic[Source]):
    """The growing text of one sequence.

    Args:
        tokenizer: A transformers tokenizer, or None, and then the text stays empty.
        stop: Strings that end the text and are cut from it.
    """

    def __init__(self, tokenizer: Any | None, stop: tuple[str, ...]) -> None:
        self._tokenizer: Any = tokenizer
        self._stop = stop_strings(stop)
        self._node = 0  # the automaton's, of the text so far
        self._pieces = None if tokenizer is None else TextPieces(tokenizer)
        self._token_ids: list[int] = []
        self._marks: list[tuple[int, Source]] = []  # (end of text, source) of each token
        self._released = 0  # characters handed out
        self._open_mark = 0  # first token whose text is not all handed out
        self._was_cut = False
        self._finished = False
        self.text = ""

    def push(self, token_id: int, source: Source, *, watch: bool) -> str | None:
        """Add a token; returns the stop string that it completed, after cutting the text before it.

        Args:
            token_id: The token.
            source: Where it came from.
            watch: Whether stop strings count yet.
        """
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

"""Hears calls of tools, and thoughts, while they are written."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from outrider.server.tool_forms import FORMS, Schemas, ToolForm
from outrider.server.tool_reader import NoCallError, Reader, Steps

#: A piece of what is heard: "content" with a text for the reader, "thoughts" with a text that is not for him, or "call"
#: with a call in OpenAI's form. Of a call that is told in parts, the later parts have an index and arguments alone.
Piece = tuple[Literal["content", "thoughts", "call"], Any]


@dataclass(frozen=True)
class Heard:
    """Holds what a piece of text brought, in the order in which it was written."""

    pieces: tuple[Piece, ...] = ()

    @property
    def content(self) -> str:
        """The text for the reader."""
        return "".join(told for kind, told in self.pieces if kind == "content")

    @property
    def thoughts(self) -> str:
        """The text that is not for him."""
        return "".join(told for kind, told in self.pieces if kind == "thoughts")

    @property
    def calls(self) -> tuple[dict[str, Any], ...]:
        """The calls."""
        return tuple(told for kind, told in self.pieces if kind == "call")


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same pieces, with texts of one kind that follow each other as one."""
    for kind, group in groupby(pieces, key=itemgetter(0)):
        told = [each for _, each in group]
        yield from ((kind, each) for each in (told if kind == "call" else ["".join(told)]))


@dataclass(frozen=True)
class ToolUse:
    """Says how calls are heard in the answers to a request; the attributes are those of a ToolListener."""

    form: ToolForm
    schemas: Schemas
    shown: Mapping[int, str]  # the same by token id
    only_calls: bool
    max_calls: int | None
    template: str = ""  # the chat template, which tells the variants of a form apart

    def listener(self, *, in_parts: bool = True) -> ToolListener:
        """One for a text that has yet to begin."""
        return ToolListener(
            self.form,
            only_calls=self.only_calls,
            in_parts=in_parts,
            schemas=self.schemas,
            shown=self.shown.values(),
            max_calls=self.max_calls,
        )


def special_marks(form: ToolForm, tokenizer: Any) -> dict[int, str]:
    """The marks of a form that are special tokens of a tokenizer, which texts do not show by themselves."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    marks = {*FORMS[form].opens, *FORMS[form].marks}
    return {id: token.content for id, token in added.items() if token.special and token.content in marks}


class ToolListener:
    """Reads a growing text and takes the calls out of it. What may become a call is held back; what is none is text. How
    the text is cut changes nothing. White space before the first words, and behind a call, is told when words follow.

    Args:
        shown: Special tokens of the form that are in the text. No reader sees them.
        max_calls: Further ones are passed over; None for no limit.
    """

    def __init__(
        self,
        form: ToolForm,
        *,
        only_calls: bool = False,
        in_parts: bool = False,
        schemas: Schemas | None = None,
        shown: Collection[str] = (),
        max_calls: int | None = None,
    ) -> None:
        self._form, self._schemas, self._shown = FORMS[form], schemas or {}, frozenset(shown)
        self._only_calls, self._max_calls = only_calls, max_calls
        self._in_parts = in_parts and (only_calls or not self._form.is_whole)
        self._marks = (*self._form.opens, *self._shown)
        self._mark = re.compile("|".join(map(re.escape, sorted(self._marks, key=len, reverse=True))) or "(?!)")
        self._reader = Reader("")
        self._steps: Steps[None] | None = self._form.call(self._reader, self._schemas) if self._form.at_start else None
        self._blank: str | None = ""  # white space that is held back; None where words have been told
        self._call: list[str] = []  # of one that is not told before it is whole: its name, and its arguments in parts
        self._whole: list[list[str]] = []  # calls that are told when nothing can make them text any more
        self._is_muted = False
        self.is_in_call = False  # whether what was told ends within a call
        self.is_cut_off = False  # whether the text has ended within the arguments of a call, told or not
        self._is_thinking = False
        self._between: str | None = None  # what stands before the next thought; None where there was none yet
        self._pieces: list[Piece] = []  # what is told next
        self.num_calls = 0

    @property
    def is_thinking(self) -> bool:
        """Tells whether the text so far ends within thoughts, and not within what stands between messages."""
        return self._is_thinking and self._steps is None

    def hear(self, text: str) -> Heard:
        """More of the text."""
        self._reader.text += text
        self._run()
        return self._heard()

    def finish(self) -> Heard:
        """There is no more text."""
        self._reader.ended = True
        self._run()
        if self._blank and not self.num_calls:
            self._pieces.insert(0, ("content", self._blank))
        return self._heard()

    def _heard(self) -> Heard:
        pieces, self._pieces = self._pieces, []
        return Heard(tuple(piece for piece in pieces if piece[0] != "content" or not self._only_calls))

    def _run(self) -> None:
        """Read as far as the text goes."""
        while True:
            if self._steps is None:
                before, found = self._plain()
                self._say(before)
                if found is None:
                    return
                if self._form.is_whole:  # behind its beginning nothing is a call, and the mark is only not shown
                    self._go_on(len(found[0]))
                    continue
                self._steps = self._form.call(self._reader, self._schemas)
            try:
                next(self._steps)
            except (StopIteration, NoCallError, RecursionError) as end:
                self._say(self._over(is_sound=isinstance(end, StopIteration)))
            else:
                self._take()
                return

    def _plain(self) -> tuple[str, re.Match[str] | None]:
        """The text before the next mark, and the mark if there is one. What may become a mark is left."""
        text = self._reader.text
        found = self._mark.search(text)
        known = len(text) - (0 if self._reader.ended else begun_mark(text, self._marks))
        end = known if found is None else found.start()
        self._go_on(end)
        return text[:end], found

    def _go_on(self, place: int) -> None:
        """Read from here on; what was read before is done with."""
        self._reader, ended = Reader(self._reader.text[place:]), self._reader.ended
        self._reader.ended = ended

    def _over(self, *, is_sound: bool) -> str:
        """A description has come to its end, or to what is no call; returns what is content all the same."""
        self._take()
        reader, self._steps = self._reader, None
        if self._form.is_whole and not self._only_calls and (reader.is_open or not is_sound):
            self._whole = []  # calls with something else behind them are none
            self._go_on(0)
            return ""
        self._tell_whole()
        is_cut_off = reader.ended and not is_sound and reader.at >= len(reader.text)
        if is_cut_off and reader.settled:  # within what closes calls, or goes on with them
            self._go_on(len(reader.text))
            return ""
        if reader.is_open:  # it was cut off within its arguments, and is neither a call to carry out nor a text to read
            self.is_cut_off = self.is_in_call or self._max_calls is None or self.num_calls < self._max_calls
            self._go_on(len(reader.text))
            return ""
        mark = None if is_sound or reader.settled else self._mark.match(reader.text)
        if (
            mark
            and mark[0] in self._shown
            and reader.ended
            and self._form.begun
            and self._form.begun.fullmatch(reader.text)
        ):
            self._go_on(len(reader.text))
            return ""
        self._go_on(reader.at if is_sound else reader.settled if mark is None else mark.end())
        return "" if mark is None or mark[0] in self._shown else mark[0]

    def _say(self, text: str) -> None:
        """Tells this text, or holds it back where it is white space so far."""
        if self._is_thinking:
            if text:
                self._pieces.append(("thoughts", (self._between or "") + text))
                self._between = ""
            return
        if self._blank is not None:
            text = self._blank + text
            self._blank = None if text.strip() else text
        if text and self._blank is None:
            self._pieces.append(("content", text))

    def _turn(self, *, is_thinking: bool) -> None:
        """A message begins; it has lines of its own."""
        self._is_thinking = is_thinking
        if is_thinking:
            self._between = None if self._between is None else "\n"
        else:
            self._blank = "\n" if self._blank is None else ""

    def _take(self) -> None:
        """Takes what the reader has told of calls."""
        told, self._reader.told = self._reader.told, []
        for kind, text in told:
            if kind in ("thoughts", "words"):
                self._turn(is_thinking=kind == "thoughts")
            elif self._in_parts:
                self._tell(kind, text)
            elif kind == "begin":
                self._call = [text]
            elif kind == "arguments":
                self._call.append(text)
            else:
                self._whole.append(self._call)
        if not self._form.is_whole:
            self._tell_whole()

    def _tell_whole(self) -> None:
        for name, *arguments in self._whole:
            self._tell("begin", name)
            self._tell("arguments", "".join(arguments))
            self._tell("end", "")
        self._whole = []

    def _tell(self, kind: str, text: str) -> None:
        if kind == "begin":
            self._blank = ""
            self._is_muted = self._max_calls is not None and self.num_calls >= self._max_calls
        if self._is_muted:
            return
        self.is_in_call = kind != "end"
        if not self.is_in_call:
            return
        if kind == "begin":
            function = {"name": text, "arguments": ""}
            call = {"index": self.num_calls, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
            self._pieces.append(("call", {**call, "function": function}))
            self.num_calls += 1
        elif self._pieces and (last := self._pieces[-1])[0] == "call":
            last[1]["function"]["arguments"] += text
        elif text:
            self._pieces.append(("call", {"index": self.num_calls - 1, "function": {"arguments": text}}))


def begun_mark(text: str, marks: Collection[str]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a mark."""
    longest = max(map(len, marks), default=1)
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)

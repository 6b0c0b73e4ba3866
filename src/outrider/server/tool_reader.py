"""Reads calls of tools in a text that grows: what descriptions of their forms are made of.

A description is a generator. It reads a text from a mark on, as far as the text is known, and yields where it needs more.
What it decides depends on the text alone, and never on how it was cut: what is no call raises NoCallError at the first
character that shows it, and a call begins at the character that makes it one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, Literal, NoReturn, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
#: Characters of the name of a function, or of an argument, and of a head that tells whom a message is for.
MOST = 256


class NoCallError(Exception):
    """Tells that what stands here is no call."""


class Reader:
    """A text from a mark on, as far as it is known.

    Attributes:
        text: What is known.
        at: How far it was read.
        ended: Whether there is no more of it.
        told: What was read of calls and not yet taken: a call begins with its name, has arguments, and ends. What follows
            may be thoughts from here on, or words for the reader again.
        settled: Behind the last call that has ended.
        is_open: Whether a call has begun and not ended.
    """

    def __init__(self, text: str) -> None:
        self.text, self.at, self.ended = text, 0, False
        self.told: list[tuple[Literal["begin", "arguments", "end", "thoughts", "words"], str]] = []
        self.settled, self.is_open = 0, False

    def begin(self, name: str) -> None:
        """A call begins; from here on it is one, whatever follows."""
        self.told.append(("begin", name))
        self.is_open = True

    def end(self) -> None:
        """The call is over."""
        self.told.append(("end", ""))
        self.is_open = False
        self.settle()

    def settle(self) -> None:
        """Settles what was read: it belongs to calls that are over."""
        self.settled = self.settled if self.is_open else self.at

    def call(self, name: str, arguments: Any) -> None:
        """A whole call with its arguments, as an object or as JSON."""
        self.begin(name)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.told.append(("arguments", written))
        self.end()

    def more(self) -> Steps[bool]:
        """Wait until there is something to read; False where the text ends here."""
        while self.at >= len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        return self.text[self.at] if (yield from self.more()) else ""

    def space(self) -> Steps[None]:
        """White space is passed over."""
        while (yield from self.peek()).isspace():
            self.at += 1

    def takes(self, *words: str) -> Steps[str]:
        """The longest of these words that stands here is read; "" where none does."""
        longest = max(map(len, words))
        while True:
            rest = self.text[self.at : self.at + longest]
            if self.ended or not any(word.startswith(rest) and word != rest for word in words):
                found = max((word for word in words if rest.startswith(word)), key=len, default="")
                is_begun = bool(rest) and not found and any(word.startswith(rest) for word in words)
                # Behind a call the text may end within what closes it, which is no text then.
                self.at += len(rest) if is_begun and self.settled else len(found)
                return found
            yield

    def expect(self, *words: str) -> Steps[str]:
        """One of these words is read, and must stand here; the empty word does."""
        found = yield from self.takes(*words)
        return found if found in words else no_call()

    def until(self, end: re.Pattern[str], most: int | None = None) -> Steps[tuple[str, re.Match[str]]]:
        """The text before what matches `end`, which is read too; it has up to `most` characters."""
        while (found := end.search(self.text, self.at)) is None:
            if self.ended or (most is not None and len(self.text) - self.at > 2 * most):
                no_call()
            yield
        before = self.text[self.at : found.start()]
        if most is not None and len(before) > most:
            no_call()
        self.at = found.end()
        return before, found

    def name(self) -> Steps[str]:
        """The name of a function."""
        start = self.at
        while _NAME.match((yield from self.peek())) and self.at - start <= MOST:
            self.at += 1
        if not 0 < self.at - start <= MOST:
            no_call()
        return self.text[start : self.at]

    def string(self) -> Steps[str]:
        """A text of JSON; what it says."""
        start = self.at
        yield from self.expect('"')
        while (yield from self.more()):
            found = _QUOTES.search(self.text, self.at)
            self.at = len(self.text) if found is None else found.end()
            if found is not None and found[0] == '"':
                return str(loads(self.text[start : self.at]))
            if found is not None and (yield from self.more()):
                self.at += 1  # what is escaped
        return no_call()

    def value(self) -> Steps[str]:
        """Any value of JSON, as it is written."""
        start, first = self.at, (yield from self.peek())
        if first == '"':
            yield from self.string()
        elif first in ("{", "["):
            growing = GrowingObject()
            while not growing.is_whole:
                if not (yield from self.more()):
                    no_call()
                self.at += len(growing.split(self.text[self.at :])[0])
        else:
            while _PLAIN.match((yield from self.peek())):
                self.at += 1
        loads(self.text[start : self.at])
        return self.text[start : self.at]

    def arguments(self, name: str) -> Steps[None]:
        """A call whose arguments are a JSON object, told while they are written."""
        start = self.at
        yield from self.expect("{")
        yield from self.space()
        yield from self.expect('"', "}")
        self.at = start
        self.begin(name)
        growing = GrowingObject()
        while not growing.is_whole and (yield from self.more()):
            own, _ = growing.split(self.text[self.at :])
            self.at += len(own)
            self.told.append(("arguments", own))
        if growing.is_whole:
            self.end()


_NAME = re.compile(r"[\w.\-:/]")
#: A name that stands without quotes.
BARE_NAME = re.compile(rf"{_NAME.pattern}{{1,{MOST}}}")
_QUOTES = re.compile(r'["\\]')
_PLAIN = re.compile(r"[\w.+\-]")


def no_call() -> NoReturn:
    raise NoCallError


def loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return no_call()


#: What may change where an object ends: texts begin and end, signs in them are escaped, objects and lists open and close.
_SIGNS = re.compile(r'[\\"{}\[\]]')


class GrowingObject:
    """A JSON object, or a list, of which more and more is known.

    Attributes:
        is_whole: Whether it has ended.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self._depth = 0
        self._in_text = self._is_escaped = False

    def split(self, text: str) -> tuple[str, str]:
        """Returns what of the next piece of text belongs to it, and what comes behind it."""
        if self.is_whole:
            return "", text
        place = 1 if self._is_escaped and text else 0
        self._is_escaped = self._is_escaped and not text
        while found := _SIGNS.search(text, place):
            place = found.end()
            if found[0] == "\\":
                self._is_escaped = place == len(text)
                place += 1
            elif found[0] == '"':
                self._in_text = not self._in_text
            elif not self._in_text:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    self.is_whole = True
                    return text[:place], text[place:]
        return text, ""

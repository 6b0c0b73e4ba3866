"""Follows a JSON object while it is written, to tell a client the arguments of a call as they come."""

from __future__ import annotations

import re

#: What may change where an object ends: texts begin and end, signs in them are escaped, objects and lists open and close.
_SIGNS = re.compile(r'[\\"{}\[\]]')


class GrowingObject:
    """A JSON object of which more and more is known.

    Attributes:
        is_whole: Whether it has ended.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self._depth = 0
        self._in_text = self._is_escaped = False

    def split(self, text: str) -> tuple[str, str]:
        """What of the next piece of text belongs to it, and what comes behind it."""
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

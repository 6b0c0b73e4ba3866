"""Hears thoughts that stand before an answer between two marks, as `<think>` and `</think>`, while they are written.

The chat template tells the marks of a model. Some templates write the first mark themselves, so that the text begins within
thoughts. Marks inside an answer are text: thoughts stand at its beginning or nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.server.tools import begun_mark

#: The marks before thoughts and behind them, of Qwen3, DeepSeek-R1, GLM-4.5 and others, and of Magistral.
_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
#: Tokens at the end of a prompt in which a mark and white space behind it have room.
_TAIL = 16


@dataclass(frozen=True)
class ThoughtUse:
    """Says how thoughts are heard in the answers to a request."""

    begin: str  # the mark before thoughts
    end: str  # the mark behind them
    is_begun: bool  # whether the prompt ends with the first mark
    shown: Mapping[int, str]  # marks that are special tokens, which texts do not show by themselves

    def listener(self) -> ThoughtListener:
        """One for a text that has yet to begin."""
        return ThoughtListener(self)


class ThoughtListener:
    """Takes the thoughts out of a growing text. How the text is cut changes nothing. White space around thoughts is told
    neither with them nor with the answer."""

    def __init__(self, use: ThoughtUse) -> None:
        self._use = use
        self._held = ""  # what may become a mark, or white space before one
        self._is_thinking, self._is_over, self._has_words = use.is_begun, False, False

    def hear(self, text: str, *, last: bool) -> tuple[str, str]:
        """Returns the thoughts and the text for the reader in more of the text."""
        self._held += text
        thoughts = ""
        if not self._is_thinking and not self._is_over:
            self._begin(last=last)
        if self._is_thinking:
            thoughts = self._think(last=last)
        return thoughts, self._answer() if self._is_over else ""

    def _begin(self, *, last: bool) -> None:
        """Decide whether the text begins with thoughts, once that is known."""
        words = self._held.lstrip()
        if words.startswith(self._use.begin):
            self._held, self._is_thinking = words.removeprefix(self._use.begin), True
        elif last or not self._use.begin.startswith(words):
            self._is_over = self._has_words = True  # its white space is its own

    def _think(self, *, last: bool) -> str:
        """Returns the thoughts that are known to be such."""
        before, mark, behind = self._held.partition(self._use.end)
        if mark or last:
            self._is_thinking, self._is_over, self._held = False, True, behind
            known = before.rstrip()
        else:
            known = before[: len(before) - begun_mark(before, (self._use.end,))].rstrip()
            self._held = before[len(known) :]
        if not self._has_words:
            known = known.lstrip()
        self._has_words = self._has_words or bool(known)
        if self._is_over:
            self._has_words = False  # of the answer
        return known

    def _answer(self) -> str:
        told = self._held if self._has_words else self._held.lstrip()
        self._held, self._has_words = "", self._has_words or bool(told)
        return told


def thought_use(template: str, prompt: Sequence[int], tokenizer: Any, *, is_free: bool) -> ThoughtUse | None:
    """Returns how thoughts are heard behind a prompt; None for a template that knows none."""
    found = next(((begin, end) for begin, end in _MARKS if end in template), None)
    if found is None:
        return None
    begin, end = found
    is_begun = is_free and tokenizer.decode(list(prompt[-_TAIL:])).rstrip().endswith(begin)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    shown = {id: token.content for id, token in added.items() if token.special and token.content in found}
    return ThoughtUse(begin, end, is_begun, shown)

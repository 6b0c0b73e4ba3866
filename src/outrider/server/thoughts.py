"""Hears thoughts that stand before an answer between two marks, as `<think>` and `</think>`, while they are written.

The chat template tells the marks of a model. Some templates write the first mark themselves, so that the text begins within
thoughts. Marks inside an answer are text: thoughts stand at its beginning or nowhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from outrider.conversations import reads
from outrider.server.tools import ToolUse, begun_mark

if TYPE_CHECKING:
    from outrider.engine.text import TextPieces

#: What tells thoughts apart, by the names that vLLM and llama.cpp have for it; "none" for nothing.
ThoughtForm = Literal[
    "deepseek", "deepseek_r1", "deepseek_v3", "glm45", "gpt_oss", "mistral", "none", "openai_gptoss", "qwen3"
]
#: Those of models whose messages say for whom they are, which are heard with calls.
CHANNELS: frozenset[ThoughtForm | None] = frozenset(("gpt_oss", "openai_gptoss"))
#: The marks before thoughts and behind them, of Qwen3, DeepSeek-R1, GLM-4.5 and others, and of Magistral.
_ANGLES, _BRACKETS = ("<think>", "</think>"), ("[THINK]", "[/THINK]")
#: Tokens at the end of a prompt in which a mark and white space behind it have room.
_TAIL = 16
#: White space between thoughts and a structure behind them. Models write an empty line there.
_SPACE = r"(/\n{1,2}/)?"


@dataclass(frozen=True)
class ThoughtUse:
    """Says how thoughts are heard in the answers to a request."""

    begin: str  # the mark before thoughts
    end: str  # the mark behind them
    is_begun: bool  # whether the prompt ends with the first mark
    shown: Mapping[int, str]  # marks that are special tokens, which texts do not show by themselves
    is_over: bool = False  # whether the prompt ends with the second mark: the model is not to think

    def before(self, answer: str) -> str:
        """The grammar, in Lark, of thoughts with an answer behind them, which has a grammar itself."""
        if self.is_over:
            return answer
        ids = {mark: f"<[{token}]>" for token, mark in self.shown.items()}
        inside, head = re.escape(self.end).replace("/", r"\/"), ids.get(self.begin, json.dumps(self.begin))
        if self.end in ids:
            thoughts = f"TEXT? {ids[self.end]}\nTEXT: /(?s:.+)/ & ~/(?s:.*{inside}.*)/"
        else:
            thoughts = f"text\ntext[lazy]: /(?s:.*{inside})/"
        start = f"thoughts {_SPACE} answer" if self.is_begun else f"({head} thoughts {_SPACE})? answer"
        return f"start: {start}\nthoughts: {thoughts}\n{_renamed(answer)}"

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

    @property
    def is_thinking(self) -> bool:
        """Tells whether the text so far ends within thoughts."""
        return self._is_thinking

    def hear(self, text: str, *, last: bool = False) -> tuple[str, str]:
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


class ThoughtCounter:
    """Counts the tokens of thoughts in a growing text: those that begin or end within them, so that the marks count."""

    def __init__(self, use: ThoughtUse | ToolUse, pieces: TextPieces) -> None:
        self._listener, self._pieces = use.listener(), pieces
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """More tokens of the text."""
        for token in token_ids:
            began_within = self._listener.is_thinking
            self._listener.hear(self._pieces.add(token))
            self.num_tokens += began_within or self._listener.is_thinking


def thought_use(
    template: str, prompt: Sequence[int], tokenizer: Any, *, is_free: bool, form: ThoughtForm | None = None
) -> ThoughtUse | None:
    """Returns how thoughts are heard behind a prompt; None for a template that knows none.

    Args:
        is_free: Whether the text may begin with the rest of thoughts that the prompt has begun.
        form: What tells them apart; None for what the template does.
    """
    told = next((marks for marks in (_ANGLES, _BRACKETS) if marks[1] in template), None)
    found = told if form is None else None if form in CHANNELS | {"none"} else _BRACKETS if form == "mistral" else _ANGLES
    if found is None:
        return None
    tail = tokenizer.decode(list(prompt[-_TAIL:])).rstrip()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    shown = {id: token.content for id, token in added.items() if token.special and token.content in found}
    begin, end = found
    return ThoughtUse(begin, end, is_free and tail.endswith(begin), shown, tail.endswith(end))


def behind_channels(answer: str, shown: Mapping[int, str], *, is_call: bool) -> str:
    """The grammar, in Lark, of an answer that thoughts may stand before, of a model whose messages say for whom they are.

    Args:
        answer: The grammar of what the last message says, or of a call, which has a head of its own.
        shown: The marks of messages, by token id.
    """
    ids = {mark: f"<[{token}]>" for token, mark in shown.items()}
    marks = (f"<|{name}|>" for name in ("channel", "message", "end", "start"))
    channel, message, end, start = (ids.get(mark, json.dumps(mark)) for mark in marks)
    thoughts = f'({channel} "analysis" {message} TEXT? {end} {start} "assistant")?'
    head = "" if is_call else f'{channel} "final" {message} '
    text = r"TEXT: /(?s:.+)/ & ~/(?s:.*<\|(start|channel)\|>.*)/"
    return f"start: {thoughts} {head}answer\n{text}\n{_renamed(answer)}"


def _renamed(grammar: str) -> str:
    """A grammar as a part of another."""
    return re.sub(r"\Astart:", "answer:", grammar)


def thinking_field(template: str, given: Any, *, thinks: bool) -> dict[str, Any]:
    """The field of a chat that says whether the model thinks, under the names that the chat template has for it. There is
    none where the template has none, or where a request's own variables are malformed, which is refused later."""
    variables = [name for name in ("enable_thinking", "thinking") if reads(template, name)]
    if not variables or not (given is None or isinstance(given, dict)):
        return {}
    return {"chat_template_kwargs": {**dict.fromkeys(variables, thinks), **(given or {})}}

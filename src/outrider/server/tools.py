"""Tool calls: they are constrained, parsed, and followed while they are written."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import UnsupportedParameterError
from outrider.structured.structures import followed

# --- Parses and constrains tool calls: Hermes' form, which Qwen shares, and Llama's.


#: How a model writes calls. Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call> anywhere in the text.
#: Llama: the whole text is {"name": ..., "parameters": {...}}, or several of them with ";" between them.
ToolForm = Literal["hermes", "llama"]

#: Calls that a text may have where some are required. A text would otherwise go on with calls until its length is reached.
MAX_CALLS = 16
_OPEN, CLOSE = "<tool_call>", "</tool_call>"
_LLAMA_TAG = "<|python_tag|>"
#: How a call begins, up to its arguments, where these are an object.
_BEGINS = {
    form: re.compile(rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{name}"\s*:\s*(?=\{{)')
    for form, name in (("hermes", "arguments"), ("llama", "parameters"))
}
#: White space as json.dumps writes it, and as models were shown it; otherwise a model may write spaces for ever.
_SPACES = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def tool_form(template: str | None) -> ToolForm:
    """The form in which a model with this chat template calls tools.

    Raises:
        UnsupportedParameterError: The template knows no tools, or another form.
    """
    if template is None or "tools" not in template:
        raise UnsupportedParameterError("tools", "...", "the model's chat template knows no tools", "Leave them out.")
    if _OPEN in template and '"arguments"' in template.replace("'", '"').replace("\\", ""):
        return "hermes"
    if _LLAMA_TAG in template or '"parameters"' in template.replace("\\", ""):
        return "llama"
    problem = "the model's chat template writes calls in a form that this server cannot read"
    raise UnsupportedParameterError("tools", "...", problem, "Use a model that writes Hermes', Qwen's or Llama's form.")


def calls_grammar(form: ToolForm, schemas: Mapping[str, dict[str, Any]], *, several: bool) -> str:
    """A grammar, in Lark, of a text that is nothing but calls, with arguments of the right shape.

    Args:
        form: How the model writes calls.
        schemas: What the arguments of each function look like.
        several: Whether there may be more than one call, and up to MAX_CALLS.
    """
    before, between, after, separator = {
        "hermes": (f'{_OPEN}\n{{"name": ', ', "arguments": ', f"}}\n{CLOSE}", "\n"),
        "llama": ('{"name": ', ', "parameters": ', "}", "; "),
    }[form]
    rules = [f"start: call ({json.dumps(separator)} call){{0,{MAX_CALLS - 1}}}" if several else "start: call"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(schemas))))
    for number, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(before + json.dumps(name) + between)
        rules.append(f"call_{number}: {head} arguments_{number} {json.dumps(after)}")
        rules.append(f"arguments_{number}: %json {json.dumps({**followed(schema), **_SPACES})}")
    return "\n".join(rules)


@dataclass(frozen=True)
class Heard:
    """What a piece of text brought.

    Attributes:
        content: Text for the reader.
        calls: Calls in OpenAI's form; of a call that is told in parts, the later parts have an index and arguments alone.
    """

    content: str = ""
    calls: tuple[dict[str, Any], ...] = ()


class ToolListener:
    """Reads a growing text and takes the calls out of it. What may become a call is held back; what is none is text.

    Args:
        form: How the model writes calls.
        only_calls: Whether the text is nothing but calls. Then a call that was cut off is not told.
        in_parts: Whether the arguments of a call are told while they are written. In Llama's form this needs a text that is
            nothing but calls, since only the end of another text tells whether it is one.
    """

    def __init__(self, form: ToolForm, *, only_calls: bool = False, in_parts: bool = False) -> None:
        self._form = form
        self._only_calls = only_calls
        self._in_parts = in_parts and (form == "hermes" or only_calls)
        self._arguments: GrowingObject | None = None  # of the call that is told in parts
        self._is_text = False  # nothing in the rest of it is a call
        self._held = ""
        self.num_calls = 0

    def hear(self, text: str) -> Heard:
        """More of the text."""
        if self._is_text:
            return Heard(text)
        self._held += text
        if self._form == "hermes":
            return self._hear_hermes()
        return Heard(calls=tuple(self._hear_llama_parts())) if self._in_parts else self._hear_llama()

    def finish(self) -> Heard:
        """There is no more text."""
        held, self._held = self._held, ""
        if self._arguments is not None:
            return Heard()  # what there is of its arguments was told
        if self._form == "llama":
            calls = _llama_calls(held, cut_off=self._only_calls)
        else:  # the text may end where the call does
            call = _call(held.removeprefix(_OPEN), "arguments") if held.startswith(_OPEN) else None
            calls = [] if call is None else [call]
        return Heard(calls=self._numbered(calls)) if calls or self._only_calls else Heard(held)

    def _hear_hermes(self) -> Heard:
        content, calls = "", list[dict[str, Any]]()
        while True:
            if self._arguments is not None:
                calls += self._more_arguments(CLOSE)
                if self._arguments is not None:
                    break
            before, found, rest = self._held.partition(_OPEN)
            if not found:
                kept = _begun(self._held, _OPEN)
                content += self._held[: len(self._held) - kept]
                self._held = self._held[len(self._held) - kept :]
                break
            inside, closed, after = rest.partition(CLOSE)
            content += before
            self._held = found + rest
            if not closed:
                if begun := self._begun_call(rest):
                    calls.append(begun)
                    continue
                break
            call = _call(inside, "arguments")
            if call is None:
                content += found + inside + closed
            else:
                calls += self._numbered([call])
            self._held = after
        if self.num_calls:
            content = "" if not content.strip() else content  # white space between calls is no answer
        return Heard(content, tuple(calls))

    def _hear_llama_parts(self) -> Iterator[dict[str, Any]]:
        while True:
            if self._arguments is not None:
                yield from self._more_arguments("}")
            if self._arguments is not None:
                return
            begun = self._begun_call(self._held.lstrip("; \n\t").removeprefix(_LLAMA_TAG))
            if begun is None:
                return
            yield begun

    def _begun_call(self, text: str) -> dict[str, Any] | None:
        """The first part of a call that a text begins with; None where the text does not go as far as its arguments."""
        found = _BEGINS[self._form].match(text) if self._in_parts else None
        try:
            name = None if found is None else json.loads(found[1])
        except ValueError:  # an escape that JSON does not have; so this is no call
            name = None
        if found is None or name is None:
            return None
        self._arguments = GrowingObject()
        arguments, self._held = self._arguments.split(text[found.end() :])
        (call,) = self._numbered([{"function": {"name": name, "arguments": arguments}}])
        return call

    def _more_arguments(self, close: str) -> Iterator[dict[str, Any]]:
        """The next part of the call that is told in parts. It is over behind its arguments, where `close` stands."""
        assert self._arguments is not None
        arguments, self._held = self._arguments.split(self._held)
        if arguments:
            yield {"index": self.num_calls - 1, "function": {"arguments": arguments}}
        _, closed, after = self._held.partition(close)
        if self._arguments.is_whole and closed:
            self._arguments, self._held = None, after

    def _hear_llama(self) -> Heard:
        start = self._held.lstrip()
        if not start or start[0] == "{" or start.startswith(_LLAMA_TAG) or _LLAMA_TAG.startswith(start):
            return Heard()
        content, self._held, self._is_text = self._held, "", True
        return Heard(content)

    def _numbered(self, calls: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        found = []
        for call in calls:
            found.append({"index": self.num_calls, "id": f"call_{secrets.token_hex(12)}", "type": "function", **call})
            self.num_calls += 1
        return tuple(found)


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def _call(text: str, arguments: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _function(found, arguments)


def _function(found: Any, arguments: str) -> dict[str, Any] | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    given = found.get(arguments, {})
    written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {"function": {"name": found["name"], "arguments": written}}


def _llama_calls(text: str, *, cut_off: bool) -> list[dict[str, Any]]:
    """The calls that make up a whole text; none where anything in it is no call, but for a last one that may be cut off."""
    found = [_function(call, "parameters") for call in _json_objects(text.strip().removeprefix(_LLAMA_TAG))]
    if cut_off and found and found[-1] is None:
        found.pop()
    return [] if None in found else [call for call in found if call is not None]


def _json_objects(text: str) -> Iterator[Any]:
    """JSON values one behind the other, with ";" between them; None for what is no JSON."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        if text[place] in "; \n\t":
            place += 1
            continue
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            yield None
            return
        yield value


# --- Follows a JSON object while it is written, to tell a client the arguments of a call as they come.


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

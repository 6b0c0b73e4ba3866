"""Conversations as chat templates know them: one form for the server, for LLM.chat, and for data of trainings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

from outrider.errors import InvalidPromptError

Conversation = Sequence[Mapping[str, Any]]

_MESSAGES_REMEDY = "Give a list of {'role': ..., 'content': ...}, or for several conversations a list of such lists."
_TOOL_REMEDY = 'Give {"type": "function", "function": {"name": ..., "parameters": {...}}} for each.'
#: What of a message no template is given: parts of answers that clients send back, and marks for the caches of others.
_IDLE = frozenset({"refusal", "annotations", "audio", "function_call", "provider_specific_fields", "cache_control"})
#: What servers call the thoughts behind an answer, and what templates call them.
_THOUGHTS = ("reasoning_content", "reasoning")
_NAMES_OF_THOUGHTS = (*_THOUGHTS, "thinking")
#: What else of a message is known; a template gets it, whether it reads it or not.
_KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "thinking_blocks", *_THOUGHTS})
#: What is known of parts of contents, and of calls.
_INNER = {"content": frozenset({"type", "text"}), "tool_calls": frozenset({"id", "type", "function", "index"})}
#: Unread fields that are told, and characters of their names.
_MOST_SHOWN = 50
_DEVELOPER = re.compile("""['"]developer['"]""")


def split_conversations(messages: Any) -> tuple[list[Any], bool]:
    """The conversations one by one, and whether it is a single one that stands in no list. None of them is checked yet."""
    several = _is_list(messages) and any(_is_list(item) for item in messages)
    if several and not all(_is_list(item) for item in messages):
        raise InvalidPromptError("messages", messages, "messages and conversations in one list", _MESSAGES_REMEDY)
    return (list(messages), False) if several else ([messages], True)


def template_of(tokenizer: Any, *, tools: bool = False) -> str:
    """The source of a tokenizer's chat template; empty where it has none. A tokenizer may have one more for tools."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        found = (found.get("tool_use") if tools else None) or found.get("default")
    return found if isinstance(found, str) else ""


def reads(template: str, name: str) -> bool:
    """Tells whether a chat template reads a field of this name."""
    return name in _words(template)


@lru_cache(maxsize=8)
def _words(template: str) -> frozenset[str]:
    """The words of a chat template. They are found once, since whoever asks may have named many fields."""
    return frozenset(re.findall(r"\w+", template))


def unread_fields(messages: Conversation, template: str) -> tuple[str, ...]:
    """The first fields of messages, by name, that nobody reads: unknown here, and to the template."""
    found: set[str] = set()
    for message in messages:
        found |= {f"messages.{name}" for name in message.keys() - _KNOWN - _IDLE if not reads(template, name)}
        for name, known in _INNER.items():
            parts = message.get(name)
            for part in parts if isinstance(parts, list) else ():
                found |= {f"messages.{name}.{inner}" for inner in part.keys() - known - _IDLE}
    return shown_names(found)


def shown_names(names: Collection[str]) -> tuple[str, ...]:
    """The first of these names, which anybody may have chosen, as a header can tell them."""
    return tuple(re.sub(r"[^\w.]", "?", name[:_MOST_SHOWN], flags=re.ASCII) for name in sorted(names)[:_MOST_SHOWN])


def read_conversation(messages: Any, template: str) -> list[dict[str, Any]]:
    """The messages of one conversation, as templates know them: contents are texts, arguments of calls are objects, empty
    fields are left out, thoughts have the names that the template reads, and whoever is called developer is called system
    where the template does not know him."""
    if not _is_list(messages) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidPromptError("messages", messages, "not a list of messages", _MESSAGES_REMEDY)
    if not messages:
        raise InvalidPromptError("messages", messages, "it is empty", _MESSAGES_REMEDY)
    return [_read_message(message, f"messages.{place}", template) for place, message in enumerate(messages)]


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Descriptions of functions as templates know them, in OpenAI's order; None where there are none."""
    if tools is not None and not _is_list(tools):
        raise InvalidPromptError("tools", tools, "not a list of functions", _TOOL_REMEDY)
    return [_read_tool(tool, place) for place, tool in enumerate(tools)] if tools else None


def with_written_arguments(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the same with arguments of calls as JSON, for templates that join them with text, as DeepSeek's do."""
    found = deepcopy(conversation)
    for function in (call["function"] for message in found for call in message.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found


def check_developer(conversation: list[dict[str, Any]], asked: Conversation, write: Callable[[Any], Any]) -> None:
    """Refuse what a template would leave out of the prompt: what the developer says."""
    places = [place for place, message in enumerate(asked) if message.get("role") == "developer"]
    if not places:
        return
    marks = {place: f"mark-{place}-of-{len(asked)}" for place in places}
    text = write([{**each, "content": marks.get(place, each["content"])} for place, each in enumerate(conversation)])
    for place in places:
        if isinstance(text, str) and marks[place] not in text:
            problem = "the model's chat template leaves out a developer's message at this place"
            remedy = "Put it at the beginning, or into the message of the user."
            raise InvalidPromptError(f"messages.{place}.role", "developer", problem, remedy)


def _read_message(message: Mapping[str, Any], where: str, template: str) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None and name not in _IDLE}
    role = given.pop("role", None)
    if role == "developer" and not _DEVELOPER.search(template):
        role = "system"
    found: dict[str, Any] = {"content": _text(given.pop("content", ""), where)}
    found = found if role is None else {"role": role, **found}
    blocks, calls = given.pop("thinking_blocks", None), given.pop("tool_calls", None)
    thoughts = next((text for name in _THOUGHTS if (text := given.pop(name, None))), None) or _thoughts_in(blocks)
    if thoughts:
        found |= {name: thoughts for name in _NAMES_OF_THOUGHTS if reads(template, name)}
    if blocks and reads(template, "thinking_blocks"):
        found["thinking_blocks"] = blocks
    found |= given
    if calls:
        found["tool_calls"] = [_read_call(call, f"{where}.tool_calls.{place}") for place, call in enumerate(calls)]
    return found


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    remedy = 'Use a text, or parts like {"type": "text", "text": "..."}.'
    if not _is_list(content):
        raise InvalidPromptError(f"{where}.content", content, "neither a text nor a list of parts", remedy)
    for place, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise InvalidPromptError(f"{where}.content.{place}", part, "it is no text", remedy)
    return "\n".join(part["text"] for part in content)


def _thoughts_in(blocks: Any) -> str:
    """The texts in Anthropic's blocks of thoughts, which LiteLLM sends beside their text or without it."""
    texts = [block.get("thinking") for block in blocks if isinstance(block, Mapping)] if _is_list(blocks) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        remedy = 'Use {"type": "function", "function": {"name": ..., "arguments": "{...}"}}.'
        raise InvalidPromptError(where, call, "it is no call of a function", remedy)
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    named = {} if call.get("id") is None else {"id": call["id"]}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(given: Any, where: str) -> dict[str, Any]:
    """The object that arguments are; what a call without arguments has may be empty."""
    found = given
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError) as error:
            problem = "nested too deeply" if isinstance(error, RecursionError) else "no JSON"
            raise InvalidPromptError(where, given, f"the arguments are {problem}", "Give a JSON object as text.") from None
    if not isinstance(found, Mapping):
        raise InvalidPromptError(where, given, "the arguments are JSON, but no object", "Give a JSON object as text.")
    return dict(found)


def _read_tool(tool: Any, place: int) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidPromptError(f"tools.{place}", tool, "it describes no function", _TOOL_REMEDY)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: function[name] for name in names if function.get(name) is not None}}


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)

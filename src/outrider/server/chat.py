"""Converts the messages of a chat request to the input of a chat template."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from outrider.conversations import template_of, unread_fields
from outrider.errors import (
    ContradictionError,
    InputError,
    InvalidParameterError,
    InvalidPromptError,
    UnsupportedParameterError,
)
from outrider.params import StructuredOutputs
from outrider.prompts import PromptEncoder
from outrider.server.schemas import ChatRequest, CommonRequest, FunctionShape, Message, Tool
from outrider.server.thoughts import CHANNELS, ThoughtForm
from outrider.server.tool_forms import FORMS, ToolForm, tells_thoughts, tool_form
from outrider.server.tool_grammars import calls_grammar
from outrider.server.tool_reader import BARE_NAME, MOST
from outrider.server.tool_values import kinds_of, resolved
from outrider.server.tools import ToolUse, special_marks

#: Keywords of a schema that allow no property.
_SAY_NOTHING = frozenset({"type", "properties", "required", "title", "description", "$schema", "$id", "$comment"})
Compile = Callable[[StructuredOutputs], object]


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as they are read everywhere (`outrider.conversations`)."""
    if not messages:
        remedy = 'Use a list of messages like {"role": "user", "content": "..."}.'
        raise InvalidPromptError("messages", messages, "there is no message", remedy)
    return [message.model_dump(exclude_none=True) for message in messages]


def ignored_fields(asked: CommonRequest, prompts: PromptEncoder) -> tuple[str, ...]:
    """The fields of a request that are passed over: its own, and those of its messages that the template does not read."""
    if not isinstance(asked, ChatRequest) or not asked.messages:
        return asked.ignored
    template = template_of(prompts.tokenizer, tools=bool(asked.tools))
    return (*asked.ignored, *unread_fields(conversation(asked.messages), template))


#: Characters of a system prompt from which on it matters what of it is cached, and the longest that is remembered.
_LONG, _LONGEST = 2_000, 200_000
#: System prompts that are remembered: a client may have agents within agents, each with its own.
_REMEMBERED = 8


class SystemPrompts:
    """The latest long system prompts of a tenant, which tell where one changes from request to request."""

    def __init__(self) -> None:
        self._latest: deque[str] = deque(maxlen=_REMEMBERED)
        self._told = False

    def change(self, asked: CommonRequest) -> dict[str, int] | None:
        """Tells once where a system prompt differs from an earlier one that begins and ends like it: the line, and the
        characters behind it, which no prefix cache serves. None where there is nothing to tell."""
        first = asked.messages[0] if isinstance(asked, ChatRequest) and asked.messages else None
        if self._told or first is None or first.role not in ("system", "developer"):
            return None
        [given] = conversation([first])
        content = given.get("content") or ""
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        if not _LONG <= len(text) <= _LONGEST or text in self._latest:
            return None
        for other in self._latest:
            same, behind = _common(text, other), _common(text[::-1], other[::-1])
            if behind >= _LONG / 2 and same + behind >= 0.9 * max(len(text), len(other)):
                self._told = True
                return {"line": text.count("\n", 0, same) + 1, "characters_behind": len(text) - same}
        self._latest.append(text)
        return None


def _common(one: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # compares slices, since a loop over characters is slow
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def encode(asked: ChatRequest, prompts: PromptEncoder) -> tuple[int, ...]:
    """The token ids of a chat request, with the turn handed to the model."""
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()] if wanted_tools(asked) else None
    settings = asked.chat_template_kwargs or {}
    taken = signature(_template_of(prompts).apply_chat_template).parameters.keys()
    for name in sorted(settings.keys() & (taken | {"self", "conversations", "messages", "chat_template"})):
        raise InvalidParameterError("chat_template_kwargs", name, "it is no variable of a template", "Leave it out.")
    if asked.reasoning_effort is not None:
        settings = {
            "reasoning_effort": asked.reasoning_effort,
            **settings,
        }  # a template that does not know it passes it over
    return prompts.encode_conversation(conversation(asked.messages), tools=tools, **settings)[1]


#: Characters of the latest messages that an answer may quote as JSON. They are encoded with each request.
_QUOTED = 32_768


def quotable(asked: ChatRequest, tools: ToolUse | None) -> tuple[str, ...]:
    """What users and tools said, the latest first, as it reads within JSON.

    The arguments of a call and an answer with a structure quote it so: where an agent writes a file that it has read, each
    of its line ends is written with a backslash, and other tokens stand beside it than in the prompt.
    """
    if (tools is None or FORMS[tools.form].is_raw or not tools.schemas) and answer_schema(asked) is None:
        return ()
    found, room = [], _QUOTED
    for message in reversed(conversation(asked.messages)):
        text = message.get("content") or ""
        text = (text if isinstance(text, str) else "\n".join(part.get("text", "") for part in text))[:room]
        quoted = json.dumps(text, ensure_ascii=False)[1:-1][:room]
        if message["role"] in ("user", "tool") and quoted != text:
            found.append(quoted)
            room -= len(quoted)
    return tuple(found)


def wanted_tools(asked: ChatRequest) -> bool:
    """Tells whether the model is to know of the tools."""
    if asked.tool_choice is not None and not asked.tools and asked.tool_choice != "none":
        raise ContradictionError("tool_choice", asked.tool_choice, "there are no tools", "Give tools, or leave it out.")
    return bool(asked.tools) and asked.tool_choice != "none"


def tool_use(
    asked: ChatRequest, prompts: PromptEncoder, parser: ToolForm | None = None, thoughts: ThoughtForm | None = None
) -> ToolUse | None:
    """Returns how calls of tools are heard in the answer, and thoughts in channels; None where there are neither.

    Args:
        parser: The form in which the model writes calls; None for what the chat template teaches.
        thoughts: What tells thoughts apart; None for what the template does.
    """
    tokenizer = _template_of(prompts)
    if not wanted_tools(asked):
        told = thoughts is None and (parser == "harmony" or tells_thoughts(template_of(tokenizer)))
        marks = special_marks("harmony", tokenizer) if told or thoughts in CHANNELS else {}
        return ToolUse("harmony", {}, marks, only_calls=False, max_calls=0) if marks else None
    template = template_of(tokenizer, tools=True)
    form = parser or tool_form(template)
    _check_names(form, template, asked.tools or ())
    _check_schemas(asked.tools or ())
    schemas = {tool.function.name: tool.function.parameters or {} for tool in asked.tools or ()}
    most = 1 if asked.parallel_tool_calls is False else None
    return ToolUse(form, schemas, special_marks(form, tokenizer), forces_calls(asked), most, template or "")


def _check_names(form: ToolForm, template: str, tools: Sequence[Tool]) -> None:
    """Raise InvalidParameterError for a name that two unlike tools have, and UnsupportedParameterError for one that a call
    in this form could not have, so that nobody would hear it."""
    named: dict[str, FunctionShape] = {}
    for place, function in enumerate(tool.function for tool in tools):
        if named.setdefault(function.name, function) != function:
            problem, remedy = "another tool has this name", "Give each tool a name of its own."
            raise InvalidParameterError(f"tools.{place}.function.name", function.name, problem, remedy)
    if form in ("hermes", "llama") or (form == "mistral" and "[ARGS]" not in template):  # as a text of JSON
        return
    for place, name in enumerate(tool.function.name for tool in tools):
        if not BARE_NAME.fullmatch(name):
            problem = "the model writes names of functions without quotes, and this one has signs that would end it"
            remedy = f"Use up to {MOST} letters, digits and signs of _ - . : /."
            raise UnsupportedParameterError(f"tools.{place}.function.name", name, problem, remedy)


def _check_schemas(tools: Sequence[Tool]) -> None:
    """Raise InvalidParameterError for a schema that no object fits: the arguments of a call are one in every form."""
    for place, schema in enumerate(tool.function.parameters or {} for tool in tools):
        if "object" not in (kinds_of(schema, schema) or {"object"}) or "$ref" in (resolved(schema, schema) or {}):
            remedy = 'Use a schema like {"type": "object", "properties": {...}}.'
            problem = "the arguments of a call are an object"
            raise InvalidParameterError(f"tools.{place}.function.parameters", schema, problem, remedy)


def forces_calls(asked: ChatRequest) -> bool:
    """Tells whether the answer has to be nothing but calls."""
    return wanted_tools(asked) and asked.tool_choice not in (None, "auto")


def forced_calls(asked: ChatRequest, tools: ToolUse | None) -> str | None:
    """The grammar of the calls that the answer has to be; None where the model decides whether it calls a tool."""
    if tools is None or not tools.only_calls:
        return None
    several = asked.tool_choice == "required" and tools.max_calls is None
    schemas = {name: schema for name, (_, schema) in _choices(asked).items()}
    return calls_grammar(tools.form, schemas, several=several, special=tools.shown, template=tools.template)


#: Where the schema of an answer stands in a request.
_SCHEMA_OF_ANSWER = "response_format.json_schema.schema"


def blamed(asked: ChatRequest, error: InputError, compile_structure: Compile) -> InputError:
    """Returns what a request is told where the grammar of its answer is refused, in the request's own words: of its calls,
    which tool it is about."""
    if not forces_calls(asked):
        schema = answer_schema(asked)
        try:
            compile_structure(StructuredOutputs(json_schema=schema))
        except (InvalidParameterError, UnsupportedParameterError) as found:
            error = found
        return type(error)(_SCHEMA_OF_ANSWER, schema, error.problem, error.remedy)
    choices = _choices(asked)
    for name, (place, schema) in choices.items():
        try:
            compile_structure(StructuredOutputs(json_schema=schema))
        except (InvalidParameterError, UnsupportedParameterError) as found:
            field = f"tools.{place}.function.parameters"
            return type(found)(field, schema, f"the schema of the tool {name!r}: {found.problem}", found.remedy)
    names, remedy = ", ".join(choices), "Give fewer tools, or smaller schemas."
    return InvalidParameterError("tools", names, f"their schemas together are refused: {error.problem}", remedy)


def answer_schema(asked: CommonRequest) -> dict[str, Any] | None:
    """The schema of the answer in `response_format`; None where it asks for none."""
    given = asked.response_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "object"}
    if given.json_schema is None or given.json_schema.schema_ is None:
        remedy = 'Give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
        raise InvalidParameterError("response_format.json_schema", None, "there is no schema", remedy)
    return given.json_schema.schema_


def _choices(asked: ChatRequest) -> dict[str, tuple[int, dict[str, Any]]]:
    """The tools that may be called: the place of each, and the schema of its arguments."""
    found = {tool.function.name: (place, _arguments_of(tool)) for place, tool in enumerate(asked.tools or ())}
    if asked.tool_choice == "required":
        return found
    name = _named(asked.tool_choice)
    if name not in found:
        remedy = f"Use auto, none, required, or one of the tools: {', '.join(sorted(found))}."
        raise InvalidParameterError("tool_choice", asked.tool_choice, "no such choice", remedy)
    return {name: found[name]}


def _arguments_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments. One that names none takes none, or a model would write any object, without end;
    `{"type": "object"}` alone is any object. One that allows other values beside objects allows objects here."""
    schema = tool.function.parameters or {"properties": {}}
    if "$ref" not in schema and isinstance(schema.get("type"), list | None):
        schema = {**schema, "type": "object"}
    if schema.get("properties") == {} and not schema.keys() - _SAY_NOTHING:
        return {**schema, "additionalProperties": False}
    return schema


def _named(choice: Any) -> str | None:
    """The function that {"type": "function", "function": {"name": ...}} names."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def check_template(prompts: PromptEncoder) -> None:
    """Raise InvalidParameterError where the model cannot converse."""
    _template_of(prompts)


def _template_of(prompts: PromptEncoder) -> Any:
    """The tokenizer, which has a chat template."""
    if getattr(prompts.tokenizer, "chat_template", None) is None:
        remedy = "Use /v1/completions, or start the server with --chat-template FILE."
        raise InvalidParameterError("messages", "...", "the model of this server has no chat template", remedy)
    return prompts.tokenizer

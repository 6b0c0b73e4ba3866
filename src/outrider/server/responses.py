"""Requests of OpenAI's Responses API, read and said again as requests for chats: the server knows no others inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from outrider.config import Refusal
from outrider.conversations import reads, shown_names
from outrider.errors import ContradictionError, InvalidParameterError, InvalidPromptError, UnsupportedParameterError
from outrider.server.schemas import IGNORED, SAME, ChatRequest, Turn
from outrider.server.shapes import Shape
from outrider.server.thoughts import thinking_field
from outrider.server.wire import is_json

# --- Shapes of requests.


_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
#: Kinds of items, and what each has to have.
_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_ITEM_REMEDY = "Use items of the types message, function_call, function_call_output and reasoning."
_NOTHING_KEPT, _NO_OTHERS = "this server keeps no conversations", "this server has no tools of its own, and reads text only"
#: Fields of chats that have no other name in this API, and so may stand in its requests too.
_OF_CHATS = frozenset(
    {
        *(SAME.keys() - {"n", "max_tokens", "logprobs", "top_logprobs"}),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("speculation", "prediction", "priority", "store", "chat_template_kwargs", "user", "safety_identifier"),
    }
)
#: Fields that change no text, which clients send by habit.
_HABITS = IGNORED | {"stream_options", "max_tool_calls", "client_metadata", "prompt_cache_options"}


class Part(Turn):
    """A piece of a message, of thoughts, or of what a tool has answered."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: object) -> object:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(given, dict) and isinstance(kind, str):
            if kind not in (*_TEXTS, "refusal"):
                remedy = "Use parts of the types input_text and output_text."
                raise UnsupportedParameterError("type", kind, "this server reads text only", remedy)
            name = "refusal" if kind == "refusal" else "text"
            if given.get(name) is None:
                raise InvalidParameterError(name, None, f"a part of the type {kind} has to have it", "Give it.")
        return given


class Item(Turn):
    """A piece of the conversation: a message, a call of a tool, what it answered, or thoughts."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: object) -> object:
        kind = given.get("type") if isinstance(given, dict) else None
        kind = "message" if kind is None else kind
        if isinstance(given, dict) and isinstance(kind, str):
            if kind not in _ITEMS:
                problem = (
                    _NOTHING_KEPT
                    if kind == "item_reference"
                    else "this server has no tools of its own, and reads text only"
                )
                raise UnsupportedParameterError("type", kind, problem, _ITEM_REMEDY)
            missing = next((name for name in _ITEMS[kind] if given.get(name) is None), None)
            if missing is not None:
                raise InvalidParameterError(missing, None, f"an item of the type {kind} has to have it", "Give it.")
        return given


class FunctionTool(Turn):
    """A function that the model may call."""

    type: str
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, given: object) -> object:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in cls._kinds():
            problem = "this server has no tools of its own, and knows none but functions of the client"
            raise UnsupportedParameterError("type", kind, problem, f"Use tools of the type {' or '.join(cls._kinds())}.")
        return given

    @classmethod
    def _kinds(cls) -> tuple[str, ...]:
        return ("function",)


class ResponseTool(FunctionTool):
    """The same, or several functions that have a namespace of their own, as Codex has them."""

    tools: list[FunctionTool] | None = None

    @classmethod
    def _kinds(cls) -> tuple[str, ...]:
        return ("function", "namespace")

    @model_validator(mode="after")
    def _holds_functions(self) -> Self:
        remedy = "Use a list of tools of the type function in a namespace."
        if self.type == "namespace" and not self.tools:
            raise InvalidParameterError("tools", self.tools, "a namespace has to have some", remedy)
        if self.type == "function" and self.tools:
            names = [tool.name for tool in self.tools]
            raise InvalidParameterError("tools", names, "a function has none", remedy)
        return self


class TextFormat(Turn):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = None
    strict: bool | None = None

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, alias_generator=lambda name: name.rstrip("_"))

    @model_validator(mode="before")
    @classmethod
    def _has_a_schema(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("type") == "json_schema" and given.get("schema") is None:
            remedy = 'Give {"type": "json_schema", "name": ..., "schema": {...}}.'
            raise InvalidParameterError("schema", None, "a format of the type json_schema has to have it", remedy)
        return given


class TextShape(Turn):
    """The wishes for the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningShape(Turn):
    """The wishes for thoughts."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Shape):
    """The body of /v1/responses. Fields that are not known are passed over, since clients send many of them."""

    model_config = Turn.model_config
    refused: ClassVar[dict[str, Refusal]] = {
        "previous_response_id": Refusal(_NOTHING_KEPT, "Give the whole conversation in input."),
        "conversation": Refusal(_NOTHING_KEPT, "Give the whole conversation in input."),
        "background": Refusal("whoever asks waits for the answer", neutral=(False,)),
        "prompt": Refusal("this server keeps no prompts", "Use instructions and input."),
        "max_tokens": Refusal("it is a field of chats", "Use max_output_tokens."),
        "messages": Refusal("it is a field of chats", "Use input, or /v1/chat/completions."),
        "response_format": Refusal("it is a field of chats", "Use text with a format."),
        "reasoning_effort": Refusal("it is a field of chats", "Use reasoning with an effort."),
    }

    model: str | None = None
    input: str | list[Item] = Field(description="Use a text, or a list of items.")
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    parallel_tool_calls: bool | None = None
    tools: list[ResponseTool] | None = Field(
        None, description='Use a list like [{"type": "function", "name": ..., "parameters": {...}}].'
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='Use "auto", "none", "required", or {"type": "function", "name": ...}.'
    )
    text: TextShape | None = None
    reasoning: ReasoningShape | None = None
    truncation: str | None = None


# --- Says a request again as one for a chat.


#: What parts of a request are called in chats, for errors.
_NAMED = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema", "reasoning_effort": "reasoning.effort",
}  # fmt: skip


def as_chat(asked: ResponsesRequest, template: str) -> ChatRequest:
    """The request for a chat that says the same."""
    extra, ignored = asked.model_extra or {}, set[str]()
    fields: dict[str, Any] = {name: value for name, value in extra.items() if name in _OF_CHATS}
    fields |= {name: getattr(asked, name) for name in ("model", "stream", "temperature", "top_p", "parallel_tool_calls")}
    calls: dict[str, str] = {}
    fields |= {"messages": _conversation(asked, calls), "max_tokens": asked.max_output_tokens}
    fields |= {"stream_options": {"include_usage": True} if asked.stream else None}
    if asked.top_logprobs is not None or "message.output_text.logprobs" in (asked.include or ()):
        fields |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    fields |= _tools(asked) | _format(asked, ignored) | _thinking(asked, template, ignored)
    ignored |= {name for name, value in extra.items() if value is not None and name not in _OF_CHATS | _HABITS}
    if asked.truncation not in (None, "disabled"):
        ignored.add("truncation")
    return ChatRequest.said_again(fields, shown_names(ignored), {**_names(asked), **calls})


def _names(asked: ResponsesRequest) -> dict[str, str]:
    places = enumerate(where for where, _, _ in functions_of(asked.tools or ()))
    tools = {f"tools.{number}.function.{name}": f"{where}.{name}" for number, where in places for name in _FUNCTION}
    return {**_NAMED, **tools}


_FUNCTION = ("name", "description", "parameters", "strict")


def functions_of(tools: Iterable[ResponseTool]) -> Iterator[tuple[str, str, FunctionTool]]:
    """The functions in tools: where each stands, what it is called in chats, and itself."""
    for place, tool in enumerate(tools):
        if tool.type == "function":
            yield f"tools.{place}", tool.name, tool
        for inner, function in enumerate(tool.tools or ()):
            yield f"tools.{place}.tools.{inner}", full_name(function.name, tool.name), function


def full_name(name: Any, namespace: Any) -> Any:
    """What a function is called in chats, which know no namespaces."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def _conversation(asked: ResponsesRequest, names: dict[str, str]) -> list[dict[str, Any]]:
    """The messages of the chat. What the model thought, said and called before somebody else speaks is one turn. `names`
    takes where the arguments of calls stand in the request, by their places in the chat."""
    found: list[dict[str, Any]] = []
    if asked.instructions:
        found.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*found, {"role": "user", "content": asked.input}]
    called: dict[str, str] = {}  # the names of functions by the ids of calls
    num_before = len(found)
    for place, item in enumerate(asked.input):
        _add(found, item, called)
        if item.type == "function_call":
            call = f"messages.{len(found) - 1}.tool_calls.{len(found[-1]['tool_calls']) - 1}"
            names[f"{call}.function.arguments"] = f"input.{place}.arguments"
    if len(found) == num_before or found[-1]["role"] == "assistant":
        remedy = "Let it end with a message of the user, or with an output of a tool."
        if not asked.input:
            raise InvalidPromptError("input", [], "there is no item", remedy)
        where, last = f"input.{len(asked.input) - 1}", asked.input[-1]
        field, value = ("role", last.role) if last.role else ("type", last.type)
        raise InvalidPromptError(f"{where}.{field}", value, "the conversation ends with the model's own turn", remedy)
    return found


def _add(found: list[dict[str, Any]], item: Item, called: dict[str, str]) -> None:
    """Add an item to the messages."""
    if item.type == "function_call_output":
        told = {"tool_call_id": item.call_id, "name": called.get(item.call_id or "")}
        found.append({"role": "tool", "content": _text(item.output), **told})
    elif item.type == "function_call":
        called[str(item.call_id)] = name = str(full_name(item.name, (item.model_extra or {}).get("namespace")))
        function = {"name": name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        _own(found).setdefault("tool_calls", []).append(call)
    elif item.type == "reasoning":
        thoughts = _text(item.content) or _text(item.summary)
        turn = _own(found) if thoughts else {}
        turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), thoughts)))
    elif item.role == "assistant":
        turn = _own(found)
        turn["content"] = (turn["content"] or "") + _text(item.content)
    else:
        found.append({"role": item.role, "content": _text(item.content)})


def _own(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's turn, if the last one is its own, or else one behind it."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": None})
    return found[-1]


def _text(content: str | list[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or part.refusal or "" for part in content)


def _tools(asked: ResponsesRequest) -> dict[str, Any]:
    """The fields of a chat that are about tools."""
    found_tools = functions_of(asked.tools or ())
    functions = [{**{each: getattr(tool, each) for each in _FUNCTION}, "name": name} for _, name, tool in found_tools]
    found: dict[str, Any] = {"tools": [{"type": "function", "function": function} for function in functions] or None}
    choice = asked.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            problem, remedy = "no such choice", 'Use "auto", "none", "required", or {"type": "function", "name": ...}.'
            raise UnsupportedParameterError("tool_choice.type", choice.get("type"), problem, remedy)
        named, names = full_name(choice.get("name"), choice.get("namespace")), [each["name"] for each in functions]
        if functions and named not in names:
            remedy = f'Use {{"type": "function", "name": ...}} with one of the tools: {", ".join(sorted(names))}.'
            raise InvalidParameterError("tool_choice.name", choice.get("name"), "there is no such tool", remedy)
        choice = {"type": "function", "function": {"name": named}}
    if choice in ("auto", "none") and not functions:
        choice = None
    if choice is not None and not functions:
        raise ContradictionError("tool_choice", asked.tool_choice, "there are no tools", "Give tools, or leave it out.")
    return {**found, "tool_choice": choice}


def _format(asked: ResponsesRequest, ignored: set[str]) -> dict[str, Any]:
    """The fields of a chat that say what the text must look like."""
    if asked.text is None:
        return {}
    if asked.text.verbosity is not None:
        ignored.add("text.verbosity")
    given = asked.text.format
    shapes = {"text": asked.text, "text.format": given}
    for place, shape in shapes.items():
        extra = {} if shape is None else shape.model_extra or {}
        ignored |= {f"{place}.{name}" for name, value in extra.items() if value is not None}
    if given is None or given.type == "text":
        return {}
    if given.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    inner = {
        "name": given.name or "answer",
        "schema": given.schema_,
        "description": given.description,
        "strict": given.strict,
    }
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def _thinking(asked: ResponsesRequest, template: str, ignored: set[str]) -> dict[str, Any]:
    """The fields of a chat that say how much the model thinks, as far as its template can be told."""
    wish = asked.reasoning
    if wish is None:
        return {}
    ignored |= {f"reasoning.{name}" for name, value in (wish.model_extra or {}).items() if value is not None}
    if wish.summary is not None:
        ignored.add("reasoning.summary")
    if wish.effort is None:
        return {}
    if reads(template, "reasoning_effort"):
        return {"reasoning_effort": wish.effort}
    given = (asked.model_extra or {}).get("chat_template_kwargs")
    found = thinking_field(template, given, thinks=wish.effort not in ("none", "minimal"))
    if not found:
        ignored.add("reasoning.effort")
    return found


def told_back(asked: ResponsesRequest) -> Iterator[tuple[str, Any]]:
    """The fields of an answer that say again what was asked."""
    extra = asked.model_extra or {}
    wish = None if asked.text is None else asked.text.format
    given = None if wish is None else wish.model_dump(by_alias=True, exclude_none=True)
    effort, summary = (None, None) if asked.reasoning is None else (asked.reasoning.effort, asked.reasoning.summary)
    yield "instructions", asked.instructions
    yield "max_output_tokens", asked.max_output_tokens
    yield "metadata", extra.get("metadata") or {}
    yield "parallel_tool_calls", asked.parallel_tool_calls is not False
    yield "previous_response_id", None
    yield "reasoning", {"effort": effort, "summary": summary}
    yield "store", bool(extra.get("store"))
    yield "text", {"format": given or {"type": "text"}}
    yield "tool_choice", "auto" if asked.tool_choice is None else asked.tool_choice
    yield "tools", list(filter(is_json, (tool.model_dump(exclude_none=True) for tool in asked.tools or ())))
    yield "truncation", "disabled"

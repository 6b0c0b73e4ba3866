"""Requests of Anthropic's Messages API, read and said again as requests for chats: the server knows no others inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, model_validator

from outrider.config import Refusal
from outrider.conversations import reads, shown_names
from outrider.errors import ContradictionError, InvalidParameterError, UnsupportedParameterError
from outrider.server.schemas import SAME, ChatRequest, Turn
from outrider.server.shapes import Shape
from outrider.server.thoughts import thinking_field

# --- Shapes of requests.


class _Kind(NamedTuple):
    """A kind of block: who brings it, and what it has to have."""

    roles: tuple[str, ...]
    fields: tuple[str, ...]


_BLOCKS = {
    "text": _Kind(("system", "user", "assistant"), ("text",)),
    "tool_result": _Kind(("user",), ("tool_use_id",)),
    "tool_use": _Kind(("assistant",), ("id", "name", "input")),
    "thinking": _Kind(("assistant",), ("thinking",)),
    "redacted_thinking": _Kind(("assistant",), ()),
}
_BLOCK_REMEDY = "Use blocks of the types text, tool_use, tool_result and thinking."
#: What of blocks and tools is passed over without a word: marks for caches, since the prefix cache needs none, what answers
#: have and comes back with them, and a wish for what is so anyway.
_IDLE = frozenset({"cache_control", "citations", "caller", "eager_input_streaming"})
#: A line that Claude Code's system prompt begins with. It is for Anthropic's own servers, and changes from request to
#: request, so that nothing behind it would be found in a cache.
_BILLING = "x-anthropic-billing-header:"
#: Fields of chats that hold a structure.
_STRUCTURES = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
#: Fields of chats that have no other name in this API, and so may stand in its requests too.
_OF_CHATS = frozenset(
    {
        *(SAME.keys() - {"n", "temperature", "top_p", "top_k", "stop"}),  # which it has itself, or leaves out
        *_STRUCTURES,
        *("speculation", "prediction", "priority", "store", "chat_template_kwargs"),
    }
)


class Block(Turn):
    """A piece of a message."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: object) -> object:
        if not isinstance(given, dict) or not isinstance(given.get("type"), str):
            return given
        kind = _BLOCKS.get(given["type"])
        if kind is None:
            raise UnsupportedParameterError("type", given["type"], "this server reads text only", _BLOCK_REMEDY)
        missing = next((name for name in kind.fields if given.get(name) is None), None)
        if missing is not None:
            problem = f"a block of the type {given['type']} has to have it"
            raise InvalidParameterError(missing, None, problem, "Give it.")
        if given["type"] == "tool_result":
            _check_kinds(given.get("content"), lambda kind: kind == "text", "the result of a tool is text here")
        return given


class MessageTurn(Turn):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @model_validator(mode="before")
    @classmethod
    def _fits(cls, given: object) -> object:
        role = given.get("role") if isinstance(given, dict) else None
        if isinstance(given, dict) and role in ("user", "assistant", "system"):
            problem = f"no block of a message with the role {role}"
            _check_kinds(given.get("content"), lambda kind: kind not in _BLOCKS or role in _BLOCKS[kind].roles, problem)
        return given


class ToolShape(Turn):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, given: object) -> object:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "custom":
            problem = "this server has no tools of its own, and knows none but those of the client"
            raise UnsupportedParameterError("type", kind, problem, "Describe it with name, description and input_schema.")
        if isinstance(given, dict) and given.get("input_schema") is None:
            remedy = 'Use a schema like {"type": "object", "properties": {...}}.'
            raise InvalidParameterError("input_schema", None, "a tool has to have it", remedy)
        return given


class ToolChoiceShape(Turn):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingShape(Turn):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]


class FormatShape(Turn):
    """What the answer must look like."""

    type: Literal["json_schema"]
    schema_: dict[str, Any]

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, alias_generator=lambda name: name.rstrip("_"))


class OutputShape(Turn):
    """How the answer is written."""

    effort: str | None = None
    format: FormatShape | None = None


class CountRequest(Shape):
    """The body of /v1/messages/count_tokens. Fields that are not known are passed over, since clients send many of them."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)
    refused: ClassVar[dict[str, Refusal]] = {
        "container": Refusal("this server runs no code"),
        "mcp_servers": Refusal("this server calls no other servers", neutral=([],)),
        "response_format": Refusal("it is a field of chats", "Use output_config with a format."),
        "reasoning_effort": Refusal("it is a field of chats", "Use output_config with an effort."),
        **dict.fromkeys(
            ("max_completion_tokens", "max_output_tokens"), Refusal("it is a field of other APIs", "Use max_tokens.")
        ),
    }

    model: str | None = None
    messages: list[MessageTurn] = Field(description='Use a list of messages like {"role": "user", "content": "..."}.')
    system: str | list[Block] | None = Field(None, description="Use a text, or a list of blocks of the type text.")
    tools: list[ToolShape] | None = Field(
        None, description='Use a list like [{"name": ..., "description": ..., "input_schema": {...}}].'
    )
    tool_choice: ToolChoiceShape | None = Field(
        None, description='Use {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": ...} or {"type": "none"}.'
    )
    thinking: ThinkingShape | None = Field(None, description='Use {"type": "enabled"} or {"type": "disabled"}.')
    output_config: OutputShape | None = None

    @model_validator(mode="before")
    @classmethod
    def _written(cls, given: object) -> object:
        if isinstance(given, dict):
            _check_kinds(given.get("system"), lambda kind: kind == "text", "a system prompt is text here", "system")
        return given


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    max_tokens: int = Field(description="Use a whole number from 1.")
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def _check_kinds(blocks: object, allowed: Any, problem: str, field: str = "content") -> None:
    """Raise UnsupportedParameterError where one of these blocks is of a kind that is not allowed here."""
    for place, block in enumerate(blocks if isinstance(blocks, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and not allowed(kind):
            remedy = "Use blocks of the type text." if kind not in _BLOCKS else "Leave it out."
            raise UnsupportedParameterError(f"{field}.{place}.type", kind, problem, remedy)


# --- Says a request again as one for a chat.


def as_chat(asked: CountRequest, template: str) -> ChatRequest:
    """The request for a chat that says the same."""
    if not asked.messages or asked.messages[-1].role == "assistant":
        problem = "the conversation ends with the model's own turn" if asked.messages else "there is no message"
        where, value = (f"messages.{len(asked.messages) - 1}.role", "assistant") if asked.messages else ("messages", [])
        raise UnsupportedParameterError(where, value, problem, "Let it end with a message of the user.")
    extra = asked.model_extra or {}
    fields: dict[str, Any] = {"model": asked.model, "messages": _conversation(asked)}
    fields |= {name: value for name, value in extra.items() if name in _OF_CHATS}
    fields |= _tools(asked)
    if isinstance(asked, MessagesRequest):
        fields |= {name: getattr(asked, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        fields["stop"] = asked.stop_sequences
        fields["stream_options"] = {"include_usage": True} if asked.stream else None
    ignored = _unknown(asked)
    fields |= _thinking(asked, template, extra.get("chat_template_kwargs"), ignored)
    fields |= _output(asked, template, ignored)
    choice = asked.tool_choice
    structures = any(fields.get(name) is not None for name in ("response_format", *_STRUCTURES))
    if structures and choice is not None and choice.type in ("any", "tool"):
        problem = "the text cannot be a call and have a structure of its own"
        raise ContradictionError("tool_choice.type", choice.type, problem, "Leave one of them out.")
    named = {"stop": "stop_sequences", "response_format": "output_config.format"}
    named |= {"response_format.json_schema.schema": "output_config.format.schema"}
    for place in range(len(asked.tools or ())):
        named |= {f"tools.{place}.function.{inner}": f"tools.{place}.{name}" for inner, name in _OF_TOOLS.items()}
    return ChatRequest.said_again(fields, shown_names(ignored), named)


#: What a tool has here, by its name in chats.
_OF_TOOLS = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}


def _conversation(asked: CountRequest) -> list[dict[str, Any]]:
    """The messages of the chat. Turns of the user that follow each other are one, and so are those of the model."""
    found: list[dict[str, Any]] = []
    if system := list(_without_billing(asked.system)):
        found.append({"role": "system", "content": system})
    called: dict[str, str] = {}  # the names of functions by the ids of calls
    for turn in asked.messages:
        if turn.role == "system":
            found.append({"role": "system", "content": _texts(turn.content)})
        elif turn.role == "assistant":
            _assistant(found, turn.content, called)
        else:
            _user(found, turn.content, called)
    return found


def _without_billing(system: str | list[Block] | None) -> Iterator[dict[str, Any]]:
    """The parts of a system prompt, without the line of Claude Code's billing."""
    for part in _texts(system):
        if not part["text"].startswith(_BILLING):
            yield part
        elif behind := part["text"].partition("\n")[2]:
            yield {**part, "text": behind}


def _texts(content: str | list[Block] | None) -> list[dict[str, Any]]:
    """The parts of a text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [{"type": "text", "text": block.text} for block in content or () if block.type == "text"]


def _turn(found: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message, where it is of this role, or one behind it."""
    if not found or found[-1]["role"] != role:
        found.append({"role": role, "content": []})
    last: dict[str, Any] = found[-1]
    return last


def _user(found: list[dict[str, Any]], content: str | list[Block], called: dict[str, str]) -> None:
    for block in content if isinstance(content, list) else ():
        if block.type == "tool_result":
            told = {"tool_call_id": block.tool_use_id, "name": called.get(block.tool_use_id or "")}
            found.append({"role": "tool", "content": _result(block), **told})
        else:
            _turn(found, "user")["content"] += _texts([block])
    if not isinstance(content, list) or not content:
        _turn(found, "user")["content"] += _texts(content)


def _result(block: Block) -> list[dict[str, Any]]:
    """What a tool has answered. Chats know no errors of tools, so the text says that it is one."""
    parts = _texts(block.content)
    if block.is_error and not (parts and parts[0]["text"].lstrip()[:5].lower() == "error"):
        first = parts[0]["text"] if parts else ""
        parts[:1] = [{"type": "text", "text": f"Error: {first}" if first else "Error"}]
    return parts


def _assistant(found: list[dict[str, Any]], content: str | list[Block], called: dict[str, str]) -> None:
    turn = _turn(found, "assistant")
    turn["content"] += _texts(content)
    for block in content if isinstance(content, list) else ():
        if block.type == "tool_use":
            called[str(block.id)] = str(block.name)
            function = {"name": block.name, "arguments": block.input}
            turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking" and block.thinking:
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = block.thinking if before is None else f"{before}\n{block.thinking}"


def _tools(asked: CountRequest) -> dict[str, Any]:
    """The fields of a chat that are about tools."""
    choice, tools = asked.tool_choice, asked.tools or []
    functions = [{inner: getattr(tool, name) for inner, name in _OF_TOOLS.items()} for tool in tools]
    found: dict[str, Any] = {"tools": [{"type": "function", "function": function} for function in functions] or None}
    if choice is None:
        return found
    if not tools and choice.type in ("any", "tool"):
        raise ContradictionError("tool_choice.type", choice.type, "there are no tools", "Give tools, or leave it out.")
    if choice.type == "tool" and choice.name not in (names := [tool.name for tool in tools]):
        remedy = f"Use one of the tools: {', '.join(sorted(names))}."
        raise InvalidParameterError("tool_choice.name", choice.name, "there is no such tool", remedy)
    named = {"type": "function", "function": {"name": choice.name}}
    chosen: Any = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return {**found, "tool_choice": chosen if tools else None, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(asked: CountRequest, template: str, given: Any, ignored: set[str]) -> dict[str, Any]:
    """The variables of the chat template that say whether the model thinks, under the names that it has for them."""
    wish = asked.thinking
    if wish is None:
        return {}
    found = {} if wish.type == "between_tools" else thinking_field(template, given, thinks=wish.type != "disabled")
    if not found:
        ignored.add("thinking")
        return {}
    ignored |= {f"thinking.{name}" for name, value in (wish.model_extra or {}).items() if value is not None}
    return found


def _output(asked: CountRequest, template: str, ignored: set[str]) -> dict[str, Any]:
    """The fields of a chat that say how the answer is written."""
    given = asked.output_config
    found: dict[str, Any] = {}
    if given is None:
        return found
    if given.format is not None:
        schema = {"name": "answer", "schema": given.format.schema_}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    if given.effort is not None and reads(template, "reasoning_effort"):
        found["reasoning_effort"] = given.effort
    elif given.effort is not None:
        ignored.add("output_config.effort")
    return found


def _unknown(asked: CountRequest) -> set[str]:
    """The fields that nobody reads, by name."""
    found = {name for name in _extras(asked) if name not in _OF_CHATS}
    found |= {f"tools.{name}" for tool in asked.tools or () for name in _extras(tool)}
    output = asked.output_config
    shapes = {"tool_choice": asked.tool_choice, "output_config": output, "output_config.format": output and output.format}
    found |= {f"{place}.{name}" for place, shape in shapes.items() if shape is not None for name in _extras(shape)}
    contents = [asked.system, *(turn.content for turn in asked.messages)]
    found |= {f"messages.content.{name}" for content in contents for block in _all(content) for name in _extras(block)}
    return found | {f"messages.{name}" for turn in asked.messages for name in _extras(turn)}


def _all(content: str | list[Block] | None) -> Iterator[Block]:
    """The blocks of a content, with those inside them."""
    for block in content if isinstance(content, list) else ():
        yield block
        yield from _all(block.content)


def _extras(shape: Shape) -> Iterable[str]:
    return (name for name, value in (shape.model_extra or {}).items() if value is not None and name not in _IDLE)

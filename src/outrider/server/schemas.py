"""What requests may hold: the fields of OpenAI's API, and beside them those of vLLM and our own."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from outrider.errors import InvalidParameterError, UnsupportedParameterError
from outrider.server.errors import ApiError
from outrider.validation import unknown_setting

_HERE = "this server writes text only"
_SEARCH = "it searches over whole texts instead of drawing from the model's probabilities"
_OLD_TOOLS = "its newer name is tools"
_AT_START = "the server's own is used, which it is started with"
_NOTHING = "this server keeps nothing of a request"

#: Fields of OpenAI and vLLM that are not supported: values that ask for nothing, and why others are refused.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), _SEARCH),
    "use_beam_search": ((False,), _SEARCH),
    "length_penalty": ((1.0,), _SEARCH),
    "early_stopping": ((False,), _SEARCH),
    "skip_special_tokens": ((True,), "texts never show special tokens"),
    "spaces_between_special_tokens": ((True,), "texts never show special tokens"),
    "include_stop_str_in_output": ((False,), "a stop string is never part of the text"),
    "truncate_prompt_tokens": ((), "prompts are taken whole"),
    "logits_processors": (([],), "a request cannot bring code"),
    "cache_salt": ((), "each API key has a prefix cache of its own"),
    "kv_transfer_params": ((), "there is one server"),
    "guided_decoding_backend": ((), "there is one library for structures"),
    "guided_whitespace_pattern": ((), "the schema says it"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "store": ((False,), _NOTHING),
    "metadata": (({},), _NOTHING),
    "service_tier": (("auto", "default"), "there is one tier"),
}
_REFUSED_IN_CHAT: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), _HERE),
    "modalities": ((["text"],), _HERE),
    "functions": ((), _OLD_TOOLS),
    "function_call": (("none",), _OLD_TOOLS),
    "reasoning_effort": ((), "use chat_template_kwargs for what the chat template knows"),
    "verbosity": ((), "it is a setting of OpenAI's own models"),
    "web_search_options": ((), "this server searches nothing"),
    "moderation": ((), "it is a service of OpenAI"),
    "prompt_cache_key": ((), "each API key has a prefix cache of its own"),
    "prompt_cache_retention": ((), "each API key has a prefix cache of its own"),
    "echo": ((False,), "a conversation is not repeated"),
    "add_generation_prompt": ((True,), "the model's turn always comes next"),
    "continue_final_message": ((False,), "the model's turn always comes next"),
    "chat_template": ((), _AT_START),
    "documents": ((), "put them into the messages"),
    "mm_processor_kwargs": ((), _HERE),
}


def _fail_fast(schema: Any) -> None:
    """Change a schema of pydantic so that all lists in it end at their first fault."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Shape(BaseModel):
    """An object of a request. A field that is null counts as not given."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    @classmethod
    def read(cls, body: bytes) -> Self:
        """The object that a body holds.

        Raises:
            ApiError: It is no JSON object.
            InvalidParameterError: A field is unknown, or has a value of another type.
            UnsupportedParameterError: A field is known elsewhere and asks for something that this server does not do.
        """
        values = _object(body)
        for name in [name for name in values if name in cls.refused]:
            neutral, reason = cls.refused[name]
            value = values.pop(name)
            if value is not None and value not in neutral:
                raise UnsupportedParameterError(name, value, reason, "Leave it out.")
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return cls.model_validate(given)
        except (ValueError, RecursionError) as error:
            raise _first_problem(cls, error) from None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A list is read up to its first fault. A million faults would take seconds, and one is told."""
        found = handler(source)
        _fail_fast(found)
        return found


def _object(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON ({reason})", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is JSON, but no object", code="invalid_json")
    return values


#: What pydantic writes into the path of an error where a field may have values of several kinds.
_KINDS = ("list", "dict", "str", "int", "float")


def _first_problem(kind: type[Shape], error: Exception) -> Exception:
    if not isinstance(error, ValidationError):
        return ApiError(400, f"the body cannot be read ({error})", code="invalid_json")
    detail = error.errors()[0]
    path = [str(part) for part in detail["loc"] if str(part).partition("[")[0] not in _KINDS]
    if detail["type"] == "extra_forbidden" and len(path) == 1:
        return unknown_setting("A request", path[0], detail["input"], kind.model_fields)
    if detail["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON ({detail['msg']})", code="invalid_json")
    field = ".".join(path)
    problem = detail["msg"][0].lower() + detail["msg"][1:]
    return InvalidParameterError(field, detail["input"], problem, "See docs/serving.md for what it may be.")


class StreamOptions(Shape):
    """How a stream ends."""

    include_usage: bool = False


class PredictionShape(Shape):
    """What the caller expects to be written."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]


class TextPart(Shape):
    """A piece of a text."""

    type: Literal["text"]
    text: str


class JsonSchemaShape(Shape):
    """A schema with its name, as in OpenAI's response_format."""

    name: str
    schema_: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=lambda name: name.rstrip("_"))


class ResponseFormat(Shape):
    """What the output must look like, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaShape | None = None


class StructureShape(Shape):
    """The same in the words of vLLM's structured_outputs."""

    json_: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=lambda name: name.rstrip("_"))


class Asked(Shape):
    """What completions and chat completions have in common."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
    prediction: PredictionShape | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructureShape | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # ours
    speculation: str | dict[str, Any] | None = None
    trace: bool | None = None

    @property
    def predicted(self) -> str | None:
        """The text that is expected."""
        content = None if self.prediction is None else self.prediction.content
        return "".join(part.text for part in content) if isinstance(content, list) else content

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that tells the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Asked):
    """The body of /v1/completions."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **_REFUSED,
        "suffix": (("",), "the model writes on at the end only"),
    }

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One by one."""
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            return list(self.prompt)
        return [self.prompt]  # type: ignore[list-item]


class FunctionCall(Shape):
    """A call that the model made in an earlier turn."""

    name: str
    arguments: str


class ToolCall(Shape):
    """The same with its id."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Shape):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionShape(Shape):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Shape):
    """The same as OpenAI wraps it."""

    type: Literal["function"]
    function: FunctionShape


class ChatRequest(Asked):
    """The body of /v1/chat/completions."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {**_REFUSED, **_REFUSED_IN_CHAT}

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None


class TokenizeRequest(Shape):
    """The body of /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Shape):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]

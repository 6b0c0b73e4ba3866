"""The fields of requests: OpenAI's, vLLM's and our own, and those that are refused with a reason."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BeforeValidator, ConfigDict, Field, create_model

from outrider.config import Asked, Elsewhere, Refusal, declared
from outrider.errors import UnsupportedParameterError
from outrider.params import SamplingParams
from outrider.server.shapes import Shape

# --- Fields of other servers' requests that are refused, with the reason and the alternative.


_OF_CHATS = "it is a field of chats"
_HERE = "this server writes text only"
_SEARCH = SamplingParams.refused["best_of"].reason
_OTHER_LAW = "it draws from other probabilities than those of the model and of the settings that are known here"


#: Fields of OpenAI that change no text. Clients send them by habit, and they are passed over with a warning.
IGNORED = frozenset(
    {
        *("metadata", "service_tier", "session_id"),  # this server names nothing that it keeps, and has one tier
        *("prompt_cache_key", "prompt_cache_retention"),  # each API key has a prefix cache of its own
        "verbosity",  # of OpenAI's own models
    }
)
#: Fields of OpenAI, vLLM and llama.cpp's server that are not supported.
_REFUSED: dict[str, Refusal] = {
    "best_of": Refusal(_SEARCH, "Use n, and choose among the texts yourself.", (1,)),
    "use_beam_search": Refusal(_SEARCH, neutral=(False,)),
    "length_penalty": Refusal(_SEARCH, neutral=(1.0,)),
    "early_stopping": Refusal(_SEARCH, neutral=(False,)),
    "skip_special_tokens": Refusal(
        "texts never show special tokens", "Use return_token_ids, which gives every token.", (True,)
    ),
    "spaces_between_special_tokens": Refusal("texts never show special tokens", neutral=(True,)),
    "include_stop_str_in_output": Refusal(
        "a stop string is never part of the text", "Add it to the text where finish_reason is stop.", (False,)
    ),
    **dict.fromkeys(
        ("truncate_prompt_tokens", "truncation_side"),
        Refusal("prompts are taken whole", "Shorten the prompt; /tokenize counts its tokens."),
    ),
    "prompt_embeds": Refusal("a prompt is a text or token ids", "Use prompt."),
    "logits_processors": Refusal("a request cannot bring code", "Use logit_bias, bad_words or a structure.", ([],)),
    "logprobs_mode": Refusal(
        "log probabilities are those of the model itself, before any setting", neutral=("raw_logprobs",)
    ),
    "logprob_token_ids": Refusal("the most likely tokens are told", "Use logprobs, or top_logprobs in a chat."),
    "return_tokens_as_token_ids": Refusal("tokens are told as text", "Use return_token_ids.", (False,)),
    "return_token_offsets": Refusal("offsets are not told", neutral=(False,)),
    "cache_salt": Refusal("each API key has a prefix cache of its own"),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), Refusal("there is one server")),
    "routed_experts_prompt_start": Refusal("the experts of tokens are not told", neutral=(0,)),
    "guided_decoding": Refusal(
        "it is a class of vLLM's Python API", "Use structured_outputs with json, regex, choice, grammar or json_object."
    ),
    "guided_decoding_backend": Refusal("there is one library for structures"),
    "guided_whitespace_pattern": Refusal(
        "the schema says it", 'Put {"x-guidance": {"whitespace_pattern": ...}} into the schema.'
    ),
    "structural_tag": Refusal("structures hold for the whole text", "Use structured_outputs with a grammar."),
    "request_id": Refusal("requests are named by a header", "Send the header x-request-id."),
    "vllm_xargs": Refusal("it is for extensions of vLLM", neutral=({},)),
    "watermarking": Refusal(_OTHER_LAW, neutral=(False,)),
    "repetition_detection": Refusal("a text ends at a stop, at its length or at its end", "Use repetition_penalty."),
    "thinking_token_budget": Refusal("thoughts are text like all other", "Use max_tokens.", (-1,)),
    "stream_interval": Refusal("pieces are sent as they are written", neutral=(1,)),
    **{
        names.llama_cpp: Refusal("it is llama.cpp's name", f"Use {ours}.")
        for ours, names in declared(SamplingParams, Elsewhere)
        if names.llama_cpp
    },
    "n_probs": Refusal("it is llama.cpp's name", "Use logprobs, or top_logprobs in a chat."),
    "cache_prompt": Refusal("beginnings that were computed before are always used", neutral=(True,)),
    "grammar": Refusal("it is llama.cpp's name", "Use guided_grammar."),
    "json_schema": Refusal("it is llama.cpp's name", "Use guided_json, or response_format."),
    "typical_p": Refusal(_OTHER_LAW, "Use top_p or min_p.", (1.0,)),
    "mirostat": Refusal(_OTHER_LAW, "Use top_p or min_p.", (0,)),
}
#: What requests for completions may not have, and requests for chats.
IN_COMPLETIONS: dict[str, Refusal] = {
    **_REFUSED,
    "suffix": Refusal("the model writes on at the end only", neutral=("",)),
    "prompt_logprobs": Refusal("this server tells them as OpenAI does", "Use echo=true with logprobs."),
    "max_completion_tokens": Refusal(_OF_CHATS, "Use max_tokens."),
    "top_logprobs": Refusal(_OF_CHATS, "Use logprobs with a number."),
    **dict.fromkeys(
        ("messages", "tools", "tool_choice", "chat_template_kwargs"), Refusal(_OF_CHATS, "Use /v1/chat/completions.")
    ),
}
IN_CHATS: dict[str, Refusal] = {
    **_REFUSED,
    "prompt": Refusal("a chat has messages", "Use messages, or /v1/completions."),
    "prompt_logprobs": Refusal("a chat does not tell them", "Use /v1/completions with echo=true and logprobs."),
    "audio": Refusal(_HERE),
    "modalities": Refusal(_HERE, neutral=(["text"],)),
    "functions": Refusal("its newer name is tools", "Use tools.", ([],)),
    "function_call": Refusal("its newer name is tool_choice", "Use tool_choice.", ("none",)),
    "include_reasoning": Refusal("thoughts are told as the model writes them", neutral=(True,)),
    "web_search_options": Refusal("this server searches nothing"),
    "moderation": Refusal("it is a service of OpenAI"),
    "echo": Refusal("a conversation is not repeated", neutral=(False,)),
    "add_generation_prompt": Refusal("the model's turn always comes next", neutral=(True,)),
    "continue_final_message": Refusal(
        "the model's turn always comes next", "Use /v1/completions with the text so far.", (False,)
    ),
    "chat_template": Refusal(
        "the server's own is used, which it is started with", "Start the server with --chat-template FILE."
    ),
    "documents": Refusal("a chat has messages", "Put them into the messages."),
    "mm_processor_kwargs": Refusal(_HERE),
    "media_io_kwargs": Refusal(_HERE),
    "return_prompt_text": Refusal("the prompt is not told", "Use /tokenize with messages, and /detokenize.", (False,)),
}


# --- Shapes of requests: the fields of OpenAI's API, with those of vLLM and our own.


#: Most likely tokens that a request may ask for at each position, as in vLLM.
MAX_LOGPROBS = 20
_NUM_LOGPROBS = f"Use 0 to {MAX_LOGPROBS}."


def _text_only(content: object) -> object:
    """The content of a message, unless a part of it is an image, a sound or a file."""
    for place, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            remedy = 'Use parts like {"type": "text", "text": "..."} only.'
            raise UnsupportedParameterError(f"{place}.type", kind, "this server reads text only", remedy)
    return content


class StreamOptions(Shape):
    """What a stream tells of its usage: in a last chunk, and (vLLM's field) so far in each chunk before it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class PredictionShape(Shape):
    """What the caller expects to be written."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]


class Turn(Shape):
    """An object of a conversation, which clients give fields of their own. They go to the chat template."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)


class TextPart(Turn):
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


#: Parameters that requests give by the same names, with what they are there.
SAME = dict(declared(SamplingParams, Asked))
_Request = TypeVar("_Request", bound=type[Shape])


def _with_parameters(kind: _Request) -> _Request:
    """Adds the fields that are parameters to an object of requests."""
    added: dict[str, Any] = {
        name: (asked.kind | None, Field(None, description=asked.description)) for name, asked in SAME.items()
    }
    found = create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **added)
    return cast(_Request, found)


@_with_parameters
class CommonRequest(Shape):
    """What completions and chat completions have in common, beside parameters."""

    passed_over: ClassVar[frozenset[str]] = IGNORED

    model: str | None = None
    n: int | None = None  # a parameter as well, which is read before the others
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = Field(
        None,
        description='Use {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}, ...}}.',
    )
    prediction: PredictionShape | None = Field(
        None, description='Use {"type": "content", "content": "..."} with the text that is expected.'
    )
    user: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    # vLLM's
    priority: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructureShape | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # ours
    speculation: str | dict[str, Any] | None = Field(
        None, description='Use "off", the name of a method, or an object like {"method": "suffix", "num_draft_tokens": 8}.'
    )
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

    @property
    def includes_usage_so_far(self) -> bool:
        """Whether each chunk before that one tells it too."""
        return self.stream_options is not None and self.includes_usage and self.stream_options.continuous_usage_stats


class CompletionRequest(CommonRequest):
    """The body of /v1/completions."""

    refused: ClassVar[dict[str, Refusal]] = IN_COMPLETIONS

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="Use a text, a list of token ids, or a list of texts or of lists of token ids."
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, description=_NUM_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One by one."""
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            return list(self.prompt)
        return [self.prompt]  # type: ignore[list-item]


class FunctionCall(Turn):
    """A call that the model made in an earlier turn."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(Turn):
    """The same with its id."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Turn):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_text_only)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking_blocks: list[Any] | None = None  # Anthropic's thoughts, as LiteLLM sends them
    audio: None = None
    function_call: None = None


class FunctionShape(Shape):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Shape):
    """The same as OpenAI wraps it."""

    type: Literal["function"]
    function: FunctionShape


class ChatRequest(CommonRequest):
    """The body of /v1/chat/completions."""

    refused: ClassVar[dict[str, Refusal]] = IN_CHATS

    messages: list[Message] = Field(description='Use a list of messages like {"role": "user", "content": "..."}.')
    max_completion_tokens: int | None = None
    logprobs: bool | None = Field(None, description=f"Use true or false; top_logprobs says how many, up to {MAX_LOGPROBS}.")
    top_logprobs: int | None = Field(None, description=_NUM_LOGPROBS)
    tools: list[Tool] | None = Field(
        None, description='Use a list like [{"type": "function", "function": {"name": ..., "parameters": {...}}}].'
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='Use "auto", "none", "required", or {"type": "function", "function": {"name": ...}}.'
    )
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


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

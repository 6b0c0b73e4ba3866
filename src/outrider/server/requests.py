"""From a checked request to the engine's settings: its parameters, its tenant, and its limits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config import nearest
from outrider.conversations import template_of
from outrider.engine.admission import check_prompt_ids
from outrider.errors import ContradictionError, InputError, InvalidParameterError, UnsupportedParameterError
from outrider.params import SamplingParams, StructuredOutputs
from outrider.prompts import PromptEncoder, num_characters
from outrider.propose.ngram import Prediction
from outrider.propose.settings import PLAIN, SpeculationConfig
from outrider.propose.tree import MAX_ROWS
from outrider.server.chat import answer_schema, encode, forced_calls, quotable, tool_use
from outrider.server.errors import ApiError
from outrider.server.schemas import MAX_LOGPROBS, SAME, ChatRequest, CommonRequest, CompletionRequest
from outrider.server.settings import ServerSettings
from outrider.server.thoughts import ThoughtUse, behind_channels, thought_use
from outrider.server.tools import ToolUse
from outrider.structured.structures import schema_in_lark

# --- The methods that a request may name: those that the server offers by name, since a request must not load a file.


#: What a request may change. A method's own settings would make another proposer, with memory of its own.
CHANGEABLE = ("num_draft_tokens", "tree", "rule", "draft_sampling")
#: What would be right, where SpeculationConfig says it in Python.
_IN_JSON = {
    "num_draft_tokens": f'Use 1 to {MAX_ROWS}; "speculation": "off" turns drafting off.',
    "tree": f'Use children by depth, like [3, 2, 1], up to {MAX_ROWS} nodes, "best_first" or "sequoia", '
    "with a method that drafts trees.",
}


class AllowedMethods:
    """The methods of a server."""

    def __init__(self, usual: SpeculationConfig, others: Sequence[SpeculationConfig] = ()) -> None:
        self.usual, self._others = usual, tuple(others)
        self._by_name = {config.name: config for config in (usual,) if config.enabled}
        for config in others:
            if config.name in self._by_name:
                problem = "another method of this name is there already"
                raise ContradictionError("allow", config.name, problem, "Give each method once.")
            self._by_name[config.name] = config
        if usual.engine_chooses:  # what the engine may choose, a request may choose, too
            for member in usual.candidates:
                self._by_name.setdefault(member.name, _of_usual_length(member))
        self._by_name.setdefault(Prediction.name, SpeculationConfig(method=Prediction()))

    def with_usual(self, usual: SpeculationConfig) -> AllowedMethods:
        """Returns the same with other settings for requests that do not say. Raises ContradictionError as above."""
        return AllowedMethods(usual, self._others)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns what a request may name."""
        return ("off", *sorted(self._by_name))

    def of(self, asked: str | Mapping[str, Any] | None, *, predicted: bool) -> SpeculationConfig:
        """The settings that a request asks for.

        Args:
            asked: Its field `speculation`: None, "off", a method's name, or a mapping.
        """
        settings = {"method": asked} if isinstance(asked, str) else dict(asked or {})
        field = "speculation" if isinstance(asked, str) else "speculation.method"
        name = settings.pop("method", Prediction.name if predicted else self.usual.name)
        if predicted and name != Prediction.name:
            problem = "the text that the request predicts is drafted by the method prediction"
            raise ContradictionError("speculation", name, problem, "Leave one of them out.")
        for setting, value in settings.items():
            if setting not in CHANGEABLE:
                remedy = f"{nearest(setting, ('method', *CHANGEABLE))}A request may change {', '.join(CHANGEABLE)}."
                raise InvalidParameterError(f"speculation.{setting}", value, "not a setting of a request", remedy)
        config = self._named(name, field)
        return _changed(config, settings) if settings else config

    def _named(self, name: object, field: str) -> SpeculationConfig:
        if name in ("off", "none"):
            return PLAIN
        if not isinstance(name, str) or name not in self._by_name:
            remedy = f"Requests to this server may name: {', '.join(self.names)}."
            raise InvalidParameterError(field, name, "no method of this server", remedy)
        return self._by_name[name]


def _of_usual_length(member: SpeculationConfig) -> SpeculationConfig:
    """Settings with the length of a draft that suits their method alone. Where the engine chooses, they have the longest
    that it considers."""
    if member.method is None or member.tree:
        return member
    return member.replace(num_draft_tokens=min(member.num_draft_tokens, member.method.usual_length()))


def _changed(config: SpeculationConfig, settings: Mapping[str, Any]) -> SpeculationConfig:
    """The settings with some of a request's own, whose errors have the names and the forms of a request."""
    try:
        return config.replace(**settings)
    except InputError as error:
        value = settings.get(error.field, error.value)
        remedy = _IN_JSON.get(error.field, error.remedy)
        raise type(error)(f"speculation.{error.field}", value, error.problem, remedy) from None


# --- Job: a checked request with its prompts as tokens, its parameters and its tenant.


@dataclass(frozen=True)
class Prompt:
    """Holds what is completed."""

    token_ids: tuple[int, ...]  # never changed by the engine
    text: str = ""  # as it was given, or as the tokens read; empty where nobody wants it back
    first: str = ""  # how the first token reads


@dataclass(frozen=True)
class Job:
    """Holds what the engine is asked to write."""

    asked: CommonRequest
    prompts: tuple[Prompt, ...]  # one or more, and `params.n` samples of each
    params: SamplingParams
    speculation: SpeculationConfig  # who drafts
    namespace: str | None
    is_silent: bool = False  # whether no token is told: only the prompt and its log probabilities are wanted
    is_recorded: bool = False  # whether somebody else than the client wants to know of its rounds
    thoughts: ThoughtUse | None = None  # how thoughts before the answers are heard; None where there are none
    tools: ToolUse | None = None  # how calls of tools, and thoughts, are heard in the texts; None where there are none
    references: tuple[str, ...] = ()  # texts that the answers may quote in this form, which the prompts do not have

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, all prompts together."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_sequences(self) -> int:
        """Texts that are written."""
        return len(self.prompts) * self.params.n

    def options(self) -> dict[str, Any]:
        """Returns what AsyncLLM takes beside a prompt and parameters."""
        return {
            "speculation": self.speculation,
            "namespace": self.namespace,
            "trace": bool(self.asked.trace) or self.is_recorded,
            "prediction": self.asked.predicted,
            "references": self.references,
            "priority": self.asked.priority or 0,
            "shown_tokens": tuple(token for use in (self.tools, self.thoughts) if use is not None for token in use.shown),
        }


@dataclass(frozen=True)
class JobMaker:
    """Makes jobs of requests, in any thread."""

    prompts: PromptEncoder
    defaults: SamplingParams  # the model's own parameters
    longest: int  # tokens that a text may have, prompt and output together
    allowed: AllowedMethods  # the methods of the server
    settings: ServerSettings
    vocab_size: int  # token ids that the model knows
    #: What every text begins with, where an encoder reads the prompt; None where it begins with the prompt.
    text_start: tuple[int, ...] | None = None

    def make(self, asked: CommonRequest, namespace: str | None) -> Job:
        """A request with all that can be known of it before the engine sees it."""
        self.check_size(asked)
        found = self._prompts(asked)
        begun = max(len(prompt.token_ids) for prompt in found) if self.text_start is None else len(self.text_start)
        room = self.longest - begun
        params = sampling(asked, self.defaults, room, self.settings)
        tools, thoughts = None, None
        references: tuple[str, ...] = ()
        if isinstance(asked, ChatRequest):
            tokenizer, form = self.prompts.tokenizer, self.settings.reasoning_parser
            tools = tool_use(asked, self.prompts, self.settings.tool_parser, form)
            if tools is None or tools.form != "harmony":  # which has channels of its own
                template, is_free = template_of(tokenizer, tools=bool(asked.tools)), not _guided(asked)
                thoughts = thought_use(template, found[0].token_ids, tokenizer, is_free=is_free, form=form)
            params = self._with_structure(asked, tools, thoughts, params)
            references = quotable(asked, tools)
        speculation = self.allowed.of(asked.speculation, predicted=asked.predicted is not None)
        return Job(
            asked,
            found,
            params,
            speculation,
            namespace,
            is_silent=asked.max_tokens == 0,
            thoughts=thoughts,
            tools=tools,
            references=references,
        )

    def _with_structure(
        self, asked: ChatRequest, tools: ToolUse | None, thoughts: ThoughtUse | None, params: SamplingParams
    ) -> SamplingParams:
        """The parameters with which the answer has the calls of tools that the request requires, or the structure, behind
        thoughts where there may be some."""
        calls, schema = forced_calls(asked, tools), answer_schema(asked)
        if calls is not None:
            if params.structured_outputs is not None:
                problem = "the text cannot be a call and have a structure of its own"
                raise ContradictionError("tool_choice", asked.tool_choice, problem, "Leave one of them out.")
            check_size("tools", calls, self.settings)
        hears_channels = tools is not None and tools.form == "harmony" and self.settings.reasoning_parser != "none"
        if calls is None and (schema is None or (thoughts is None and not hears_channels)):
            return params
        grammar = calls or f"start: {schema_in_lark(schema or {})}"
        if thoughts is not None:
            grammar = thoughts.before(grammar)
        elif tools is not None and hears_channels:
            grammar = behind_channels(grammar, tools.shown, is_call=calls is not None)
        return params.replace(structured_outputs=StructuredOutputs(grammar=grammar))

    def check_size(self, asked: CommonRequest) -> int:
        """The number of texts that a request asks for; known before its prompts are encoded."""
        check_lists(asked, self.settings)
        num_prompts = len(asked.prompts) if isinstance(asked, CompletionRequest) else 1
        num_samples = 1 if asked.n is None else asked.n
        num_texts = num_prompts * num_samples
        if not 1 <= num_texts <= self.settings.max_n:
            prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
            samples = "1 sample" if num_samples == 1 else f"{num_samples} samples"
            problem = f"{prompts} with {samples} each make {num_texts} in all"
            remedy = f"Ask for 1 to {self.settings.max_n} texts at a time. {_more('max_n')}"
            raise InvalidParameterError("n", asked.n, problem, remedy)
        return num_texts

    def _prompts(self, asked: CommonRequest) -> tuple[Prompt, ...]:
        if isinstance(asked, ChatRequest):
            return (Prompt(encode(asked, self.prompts)),)
        assert isinstance(asked, CompletionRequest)
        if asked.echo and self.text_start is not None:
            problem = "an encoder reads the prompt, which is no part of the text"
            raise UnsupportedParameterError("echo", asked.echo, problem, "Leave it out.")
        special = asked.add_special_tokens is not False
        encoded = [self.prompts.encode(prompt, add_special_tokens=special) for prompt in asked.prompts]
        return tuple(self._prompt(text, tokens, echoed=bool(asked.echo)) for text, tokens in encoded)

    def _prompt(self, text: str | None, tokens: tuple[int, ...], *, echoed: bool) -> Prompt:
        tokenizer = self.prompts.tokenizer
        if not echoed or tokenizer is None:
            return Prompt(tokens)
        check_prompt_ids(tokens, self.vocab_size)  # now: a tokenizer reads no others back
        shown = tokenizer.decode(tokens, skip_special_tokens=True) if text is None else text
        return Prompt(tokens, shown, tokenizer.decode(tokens[:1]))


# --- Translates requests to the engine's settings, and the engine's errors back to the request's field names.


#: What structured_outputs calls the kinds of structure, and their names inside.
_STRUCTURES = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
#: What clients of llama.cpp and text-generation-webui write for no seed, and for no limit of tokens.
_NONE = -1
#: What OpenAI's API writes of a completion where nobody says how much.
_COMPLETION_TOKENS = 16


def sampling(asked: CommonRequest, defaults: SamplingParams, room: int, settings: ServerSettings) -> SamplingParams:
    """The parameters of a request.

    Args:
        room: Tokens that may be written behind its prompt.
    """
    given = {name: getattr(asked, name) for name in SAME if getattr(asked, name) is not None}
    if given.get("stop") in ("", []):
        del given["stop"]  # clients that mean none
    if given.get("seed") == _NONE:
        given["seed"] = None
    found = structure(asked, settings)
    if found is not None:
        given["structured_outputs"] = found
    return defaults.replace(**given, **_max_tokens(asked, defaults, room), **_logprobs(asked))


def structure(asked: CommonRequest, settings: ServerSettings) -> StructuredOutputs | None:
    """Returns what the output must look like; None where it is free."""
    found = {**_response_format(asked), **_guided(asked)}
    if not found:
        return None
    if len(found) > 1:
        names = sorted(found)
        raise ContradictionError(names[0], names, f"{len(names)} kinds of structure at a time", "Give one of them.")
    ((name, value),) = found.items()
    check_size(name, value, settings)
    return StructuredOutputs(**value)


def check_size(name: str, structure: Any, settings: ServerSettings) -> None:
    """Raise InvalidParameterError where a structure is larger than the server allows."""
    size = len(json.dumps(structure))
    if size > settings.max_structure_bytes:
        remedy = f"Use up to {settings.max_structure_bytes:,} bytes. {_more('max_structure_bytes')}"
        raise InvalidParameterError(name, "...", f"{size:,} bytes are too many", remedy)


def field_names(asked: CommonRequest) -> dict[str, str]:
    """Returns what this request calls fields that have other names inside."""
    found = {"prompt_token_ids": "prompt", **{name: f"speculation.{name}" for name in CHANGEABLE}}
    for name in ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(asked, name) is not None:
            found |= dict.fromkeys(("structured_outputs", "json_schema", "regex", "choice", "grammar"), name)
    if asked.structured_outputs is not None:
        found |= {inner: f"structured_outputs.{name}" for name, inner in _STRUCTURES.items()}
    if isinstance(asked, ChatRequest):
        if asked.tools and asked.tool_choice not in (None, "auto", "none"):
            found |= dict.fromkeys(("structured_outputs", "grammar"), "tools")
        tools = num_characters([tool.model_dump() for tool in asked.tools or ()])
        messages = num_characters([message.model_dump() for message in asked.messages])
        found["prompt"] = "messages" if messages >= tools else "tools"  # of a prompt that is too long
        found["logprobs"] = "top_logprobs"
        if asked.max_completion_tokens is not None:
            found["max_tokens"] = "max_completion_tokens"
    return {**asked.names, **{inner: asked.names.get(name, name) for inner, name in found.items()}}


def _response_format(asked: CommonRequest) -> dict[str, dict[str, Any]]:
    schema = answer_schema(asked)
    return {} if schema is None else {"response_format": {"json_schema": schema}}


def _guided(asked: CommonRequest) -> dict[str, dict[str, Any]]:
    """vLLM's names, the older ones and the newer one."""
    found: dict[str, dict[str, Any]] = {}
    older = {
        "guided_json": "json_schema",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
    }
    for name, inner in older.items():
        value = getattr(asked, name)
        if value is not None:
            found[name] = {inner: value}
    if asked.structured_outputs is not None:
        given = asked.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        given = {name: value for name, value in given.items() if value is not False}
        if len(given) != 1:
            problem = f"{len(given)} kinds of structure at a time"
            remedy = f"Give exactly one of {', '.join(_STRUCTURES)}."
            raise ContradictionError("structured_outputs", sorted(given), problem, remedy)
        found["structured_outputs"] = {_STRUCTURES[name]: value for name, value in given.items()}
    return found


def _max_tokens(asked: CommonRequest, defaults: SamplingParams, room: int) -> dict[str, int]:
    """The request's, or the model's own, or OpenAI's: 16 for a completion, what there is room for in a chat."""
    given = asked.max_tokens
    if isinstance(asked, ChatRequest) and asked.max_completion_tokens is not None:
        if given is not None and given != asked.max_completion_tokens:
            problem = f"max_tokens={given} says something else"
            given = asked.max_completion_tokens
            raise ContradictionError("max_completion_tokens", given, problem, "Leave one of them out.")
        given = asked.max_completion_tokens
    if given == 0 and isinstance(asked, CompletionRequest) and asked.echo:
        return {"max_tokens": 1}  # which is not told: the prompt has to be read all the same
    if given == _NONE:
        return {"max_tokens": max(1, room)}
    if given is not None:
        return {"max_tokens": given}
    if "max_tokens" in defaults.model_fields_set:
        return {}
    return {"max_tokens": max(1, room) if isinstance(asked, ChatRequest) else _COMPLETION_TOKENS}


def _logprobs(asked: CommonRequest) -> dict[str, int]:
    if isinstance(asked, CompletionRequest):
        count, name = asked.logprobs, "logprobs"
    else:
        assert isinstance(asked, ChatRequest)
        count, name = asked.top_logprobs, "top_logprobs"
        if count is not None and not asked.logprobs:
            remedy = "Give logprobs=true too."
            raise ContradictionError("top_logprobs", count, "log probabilities are not asked for", remedy)
        count = (count or 0) if asked.logprobs else None
    if count is None:
        return {}
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidParameterError(name, count, "out of range", f"Use 0 to {MAX_LOGPROBS}.")
    echoes = isinstance(asked, CompletionRequest) and asked.echo
    return {"logprobs": count, **({"prompt_logprobs": count} if echoes else {})}


# --- Refuses parts of a request that are larger than this server takes, before they cost work.


#: Bytes of the headers of a request, with its path.
MAX_HEADERS = 64 * 2**10
#: Lists whose entries each cost work, when a request is prepared or in every step.
_LISTS = ("logit_bias", "bad_words", "stop_token_ids", "allowed_token_ids")
#: Lists of texts.
_TEXTS = ("stop", "bad_words")


def check_lists(asked: CommonRequest, settings: ServerSettings) -> None:
    """Raise InvalidParameterError where a list of a request has more entries, or longer ones, than the server takes."""
    for name, limit in {**dict.fromkeys(_LISTS, "max_list_items"), "stop": "max_stops"}.items():
        entries, most = getattr(asked, name), getattr(settings, limit)
        if entries is not None and not isinstance(entries, str) and len(entries) > most:
            raise _too_large(name, len(entries), "entries", most, limit)
    for name in _TEXTS:
        size = num_characters(getattr(asked, name))
        if size > settings.max_list_characters:
            raise _too_large(name, size, "characters in all", settings.max_list_characters, "max_list_characters")


def check_headers(path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ApiError where the headers of a request, with its path, are larger than any server takes."""
    if len(path) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEADERS:
        raise ApiError(431, "the headers of the request are too large", code="headers_too_large")


def check_values(body: bytes, most: int) -> None:
    """Raise ApiError where a body of JSON has more names and values than the server takes.

    They are counted without reading them: a comma or a colon stands before each of them but for the first of all and the
    first of a list or an object. Whatever stands in texts does not count. The C code that reads JSON lets no other thread
    run, and takes time for each value, but hardly any for the length of texts.
    """
    if body.count(b",") + body.count(b":") < most:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now a quotation mark is the beginning or the end of a text
    if plain.count(b'"') <= 2 * most:  # or the texts alone are too many, and need not be told apart
        outside = plain.split(b'"')[::2]
        found = 1 + sum(part.count(b",") + part.count(b":") for part in outside)
        if found <= most:
            return
    problem = f"the body holds more than {most:,} names and values. Send fewer of them; the length of texts does not count"
    problem = f"{problem}. {_more('max_body_values').removesuffix('.')}"
    raise ApiError(413, problem, code="body_too_large")


def _too_large(name: str, size: int, of_what: str, most: int, limit: str) -> InvalidParameterError:
    return InvalidParameterError(name, f"{size:,} {of_what}", "too many", f"Use {most:,} or fewer. {_more(limit)}")


def _more(limit: str) -> str:
    """Returns what is said of a limit that a server has."""
    return f"The option --{limit.replace('_', '-')} of the server allows more."

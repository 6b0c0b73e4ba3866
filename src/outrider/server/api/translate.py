"""Translates requests to the engine's settings, and the engine's errors back to the request's field names."""

from __future__ import annotations

import json
from typing import Any

from outrider.errors import ContradictionError, InvalidParameterError
from outrider.params import SamplingParams, StructuredOutputs
from outrider.server.api.allowed import CHANGEABLE
from outrider.server.api.schemas import MAX_LOGPROBS, ChatRequest, CommonRequest, CompletionRequest
from outrider.server.settings import ServerSettings

#: Fields that have the same name and meaning inside.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
)
#: What structured_outputs calls the kinds of structure, and their names inside.
_STRUCTURES = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
#: What OpenAI's API writes of a completion where nobody says how much.
_COMPLETION_TOKENS = 16


def sampling(asked: CommonRequest, defaults: SamplingParams, room: int, settings: ServerSettings) -> SamplingParams:
    """The parameters of a request.

    Args:
        asked: The request.
        defaults: The model's own, for what the request leaves open.
        room: Tokens that may be written behind its prompt.
        settings: The server's limits.

    Raises:
        InputError: A value is out of range, or settings contradict each other.
    """
    given = {name: getattr(asked, name) for name in _SAME if getattr(asked, name) is not None}
    if given.get("stop") in ("", []):
        del given["stop"]  # clients that mean none
    found = structure(asked, settings)
    if found is not None:
        given["structured_outputs"] = found
    return defaults.replace(**given, **_max_tokens(asked, defaults, room), **_logprobs(asked))


def structure(asked: CommonRequest, settings: ServerSettings) -> StructuredOutputs | None:
    """What the output must look like; None where it is free.

    Raises:
        InputError: Several kinds of structure are asked for, or one that is malformed or too large.
    """
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
        remedy = f"Use up to {settings.max_structure_bytes:,} bytes."
        raise InvalidParameterError(name, "...", f"{size:,} bytes are too many", remedy)


def field_names(asked: CommonRequest) -> dict[str, str]:
    """What this request calls fields that have other names inside."""
    found = {"prompt_token_ids": "prompt", **{name: f"speculation.{name}" for name in CHANGEABLE}}
    for name in ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(asked, name) is not None:
            found |= dict.fromkeys(("structured_outputs", "json_schema", "regex", "choice", "grammar"), name)
    if asked.structured_outputs is not None:
        found |= {inner: f"structured_outputs.{name}" for name, inner in _STRUCTURES.items()}
    if isinstance(asked, ChatRequest):
        if asked.tools and asked.tool_choice not in (None, "auto", "none"):
            found |= dict.fromkeys(("structured_outputs", "grammar"), "tools")
        found["prompt"] = "messages"
        found["logprobs"] = "top_logprobs"
        if asked.max_completion_tokens is not None:
            found["max_tokens"] = "max_completion_tokens"
    return found


def _response_format(asked: CommonRequest) -> dict[str, dict[str, Any]]:
    given = asked.response_format
    if given is None or given.type == "text":
        return {}
    if given.type == "json_object":
        return {"response_format": {"json_object": True}}
    if given.json_schema is None or given.json_schema.schema_ is None:
        remedy = 'Give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
        raise InvalidParameterError("response_format.json_schema", None, "there is no schema", remedy)
    return {"response_format": {"json_schema": given.json_schema.schema_}}


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

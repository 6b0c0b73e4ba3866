"""Bodies of requests that are wrong in many ways, made from some that are right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

COMPLETION: dict[str, Any] = {
    "prompt": "x", "max_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "n": 1, "stop": ["a", "b"],
    "logit_bias": {"5": 1.5}, "logprobs": 2, "stream": False,
    "speculation": {"method": "draft_model", "num_draft_tokens": 2}, "presence_penalty": 0.5,
    "guided_choice": ["ab", "cd"], "min_p": 0.1, "bad_words": ["self"], "echo": True, "user": "me",
}  # fmt: skip
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_completion_tokens": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "tool_choice": "auto",
    "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}, "stream": True,
    "prediction": {"type": "content", "content": "y"}, "chat_template_kwargs": {"a": 1},
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "y", "is_error": True}]},
    ],
    "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], "max_tokens": 1, "stream": True,
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}, "stop_sequences": ["a"],
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "a"}, "temperature": 0.5,
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "y"},
    ],
    "instructions": "x", "max_output_tokens": 1, "stream": True, "temperature": 0.5, "top_logprobs": 1, "include": ["x"],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "auto",
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "truncation": "disabled",
}  # fmt: skip
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", RESPONSES),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/tokenize", {"prompt": "x", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [5, 6]}),
]
#: What may come to stand anywhere.
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**200, -0.0, 1e308, 1.5, "", "x", "\ud800", "\x00", "x" * 5000, [], {}, [[]], {"": 0},
    [1], ["x"] * 1000, [None], {"a": {"b": {"c": []}}}, [2**70], "/etc/passwd", "nan", {"$ref": "#"}, [[1], ["x"]],
]  # fmt: skip
#: The same as text, since these are no JSON.
RAW = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"01",
    b"'x'",
    b"[" * 500,
    b'{"a":' * 500,
    b"\xff",
    b"",
    b"]",
    b'"',
    b"/* x */",
    b"\\u00",
]


def mutants(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """So many paths and bodies; most of these are wrong in one place or two."""
    chance = random.Random(seed)
    for _ in range(count):
        path, body = chance.choice(VALID)
        yield path, chance.choice(_WAYS)(chance, json.loads(json.dumps(body)))


def _other_value(chance: random.Random, body: Any) -> bytes:
    """A value anywhere in it is replaced."""
    places = list(_places(body))
    for _ in range(chance.randint(1, 2)):
        holder, key = chance.choice(places)
        holder[key] = chance.choice(ODD)
    return json.dumps(body).encode("utf-8", "surrogatepass")


def _other_name(chance: random.Random, body: Any) -> bytes:
    """A field has another name, or there is one more."""
    name = chance.choice(list(body))
    body[chance.choice([name.upper(), name + "s", name[1:], "", "__class__", "\ud800", "x" * 3000])] = body.pop(name)
    return json.dumps(body).encode("utf-8", "surrogatepass")


def _other_text(chance: random.Random, body: Any) -> bytes:
    """A value is replaced by what is no JSON."""
    holder, key = chance.choice(list(_places(body)))
    holder[key] = "here"
    return json.dumps(body).encode().replace(b'"here"', chance.choice(RAW), 1)


def _cut(chance: random.Random, body: Any) -> bytes:
    """It ends too early."""
    whole = json.dumps(body).encode()
    return whole[: chance.randrange(len(whole))]


def _other_bytes(chance: random.Random, body: Any) -> bytes:
    """Some bytes are others."""
    whole = bytearray(json.dumps(body).encode())
    for _ in range(chance.randint(1, 4)):
        whole[chance.randrange(len(whole))] = chance.randrange(256)
    return bytes(whole)


def _no_object(chance: random.Random, body: Any) -> bytes:
    """It is another kind of JSON, or nested deeply."""
    odd = json.dumps(chance.choice(ODD)).encode("utf-8", "surrogatepass")
    depth = chance.choice([10, 1000, 50_000])
    return chance.choice([odd, b"[" * depth, b"[" * depth + b"]" * depth, b'{"prompt":' * depth + b"1" + b"}" * depth])


_WAYS: list[Callable[[random.Random, Any], bytes]] = [
    _other_value,
    _other_name,
    _other_text,
    _cut,
    _other_bytes,
    _no_object,
]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where values stand: their holder, and their key or index in it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)

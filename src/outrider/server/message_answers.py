"""The answers of Anthropic's Messages API: what a chat answers, told in blocks, whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from outrider.params import RequestOutput
from outrider.server.answers import ChatAnswer
from outrider.server.errors import ApiError
from outrider.server.requests import Job
from outrider.server.tools import Heard, Piece, joined
from outrider.server.wire import MESSAGES, encoded, event, failure

#: Why a text has ended, by the words of OpenAI's API.
_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer(ChatAnswer):
    """The answer of /v1/messages, made of the answer to the chat that says the same.

    Args:
        tokenizer: The model's; None where it has none.
    """

    pause = event({"type": "ping"}, "ping")
    pause_seconds = 10.0
    last = b""

    def __init__(self, job: Job, model: str, tokenizer: Any | None, request_id: str) -> None:
        super().__init__(job, model, tokenizer)
        self.id = f"msg_{secrets.token_hex(12)}"
        self._request_id = request_id
        self._open: str | None = None  # the kind of the block that is being told
        self._num_blocks = 0
        self._signature = blake2b(digest_size=16)  # of the thoughts of the block that is being told
        self._outcome: dict[str, Any] = {}

    def whole(self, found: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer at once."""
        told = super().whole(found)
        (choice,) = told["choices"]
        content = list(map(_block, choice["pieces"]))
        return {**self._message(content, _usage(told["usage"]), _end(choice)), "speculation": told["speculation"]}

    def opening(self) -> Iterator[dict[str, Any]]:
        """One chunk, which is told as the beginning of the message."""
        yield {}

    def event(self, chunk: dict[str, Any]) -> bytes:
        """The events that tell a chunk of the chat."""
        if not chunk:
            usage = _usage({"prompt_tokens": self.job.num_prompt_tokens, "completion_tokens": 0})
            return _sent({"type": "message_start", "message": self._message([], usage, _end(None))}) + self.pause
        found = [each for choice in chunk["choices"] for each in self._told_choice(choice)]
        if "speculation" in chunk:
            self._outcome["speculation"] = chunk["speculation"]
        if chunk["usage"] is not None:
            self._outcome["usage"] = _usage(chunk["usage"])
            found += [*self._close(), {"type": "message_delta", **self._outcome}, {"type": "message_stop"}]
        return b"".join(map(_sent, found))

    def failure(self, error: ApiError) -> bytes:
        """The event of an error."""
        return failure(error, MESSAGES, self._request_id)

    def _content(self, heard: Heard, *, is_whole: bool) -> dict[str, Any]:
        """The pieces themselves, since their order is told."""
        return {"pieces": tuple(joined(heard.pieces))}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
        named = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**named, "content": content, **end, "usage": usage}

    def _told_choice(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a choice: thoughts, text and calls in the order in which they were written."""
        for kind, piece in choice["pieces"]:
            if kind == "thoughts":
                yield from self._begin("thinking", {"thinking": "", "signature": ""})
                self._signature.update(_bytes(piece))
                yield self._delta_of({"type": "thinking_delta", "thinking": piece})
            elif kind == "content":
                yield from self._begin("text", {"text": ""})
                yield self._delta_of({"type": "text_delta", "text": piece})
            else:
                if "id" in piece:
                    yield from self._close()
                    yield from self._begin("tool_use", {"id": piece["id"], "name": piece["function"]["name"], "input": {}})
                if arguments := piece["function"]["arguments"]:
                    yield self._delta_of({"type": "input_json_delta", "partial_json": arguments})
        if choice["finish_reason"] is not None:
            self._outcome["delta"] = _end(choice)

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begin a block of this kind, unless one is being told."""
        if self._open == kind:
            return
        yield from self._close()
        self._open, self._signature = kind, blake2b(digest_size=16)
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": {"type": kind, **block}}

    def _close(self) -> Iterator[dict[str, Any]]:
        """End the block that is being told, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta_of({"type": "signature_delta", "signature": self._signature.hexdigest()})
        yield {"type": "content_block_stop", "index": self._num_blocks}
        self._open, self._num_blocks = None, self._num_blocks + 1

    def _delta_of(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}


def _sent(body: dict[str, Any]) -> bytes:
    return event(body, body["type"])


def _signed(thoughts: str) -> str:
    """Returns what stands as the signature of thoughts: a digest. Clients want one, and nobody checks it."""
    return blake2b(_bytes(thoughts), digest_size=16).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _end(choice: dict[str, Any] | None) -> dict[str, Any]:
    """Returns how a text ended; nothing where it goes on."""
    if choice is None:
        return {"stop_reason": None, "stop_sequence": None}
    reason, matched = choice["finish_reason"], choice["stop_reason"]
    if reason == "stop" and isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _ENDS.get(reason, "end_turn"), "stop_sequence": None}


def _usage(told: dict[str, Any]) -> dict[str, Any]:
    """The cost in Anthropic's words: the tokens of the prompt that were computed, and those that the prefix cache had."""
    thought = told.get("completion_tokens_details", {}).get("reasoning_tokens")
    cached = told.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    found = {"input_tokens": told["prompt_tokens"] - cached, "cache_creation_input_tokens": 0}
    found |= {"cache_read_input_tokens": cached, "output_tokens": told["completion_tokens"]}
    return found if thought is None else {**found, "output_tokens_details": {"thinking_tokens": thought}}


def _block(piece: Piece) -> dict[str, Any]:
    """The block of an answer that a piece of its text is."""
    kind, told = piece
    if kind == "thoughts":
        return {"type": "thinking", "thinking": told, "signature": _signed(told)}
    if kind == "content":
        return {"type": "text", "text": told}
    function = told["function"]
    return {"type": "tool_use", "id": told["id"], "name": function["name"], "input": _input(function["arguments"])}


def _input(arguments: str) -> dict[str, Any]:
    """The object that arguments of a call are. What is none is told in one, as Anthropic's documentation does."""
    try:
        found = json.loads(arguments)
        encoded(found)  # which refuses numbers that JSON does not have
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}

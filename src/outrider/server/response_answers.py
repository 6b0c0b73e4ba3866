"""The answers of OpenAI's Responses API: what a chat answers, told in items, whole or as events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.params import RequestOutput
from outrider.server.answers import ChatAnswer
from outrider.server.errors import ApiError
from outrider.server.requests import Job
from outrider.server.responses import full_name
from outrider.server.tools import Heard, joined
from outrider.server.wire import event

_IDS = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_KINDS = {"thoughts": "reasoning", "content": "message"}  # of items, by what is heard


class ResponseAnswer(ChatAnswer):
    """The answer of /v1/responses, made of the answer to the chat that says the same. `asked` are the fields that the
    answer says again."""

    last = b""

    def __init__(self, job: Job, model: str, tokenizer: Any | None, asked: Mapping[str, Any]) -> None:
        super().__init__(job, model, tokenizer)
        self.id = f"resp_{secrets.token_hex(12)}"
        self._asked = asked
        spaces = ((tool["name"], inner["name"]) for tool in asked["tools"] for inner in tool.get("tools", ()))
        self._names = {full_name(name, space): (space, name) for space, name in spaces}  # by those of chats
        self._output: list[dict[str, Any]] = []  # the items that are over
        self._open: dict[str, Any] | None = None  # the item that is being told
        self._parts: list[str] = []  # its text, thoughts or arguments so far
        self._told_scores: list[dict[str, Any]] = []
        self._num_events = 0
        self._outcome: dict[str, Any] = {}

    def whole(self, found: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer at once."""
        told = super().whole(found)
        (choice,) = told["choices"]
        scores = (choice.get("logprobs") or {}).get("content") or []
        for kind, piece in choice["pieces"]:
            if kind == "call":
                self._output.append(_done(self._call(piece), piece["function"]["arguments"], []))
            else:
                self._output.append(_done(_item(_KINDS[kind]), piece, scores if kind == "content" else []))
                scores = [] if kind == "content" else scores
        status = _status(choice)
        if self._output and self._output[-1]["type"] != "function_call" and self._is_cut("message", status):
            self._output[-1]["status"] = "incomplete"
        return self._response(status, _usage(told["usage"]), told["speculation"])

    def opening(self) -> Iterator[dict[str, Any]]:
        """One chunk, which is told as the beginning of the response."""
        yield {}

    def event(self, chunk: dict[str, Any]) -> bytes:
        """The events that tell a chunk of the chat."""
        if not chunk:
            begun = self._response({"status": "in_progress"}, None, None)
            return self._sent("created", response=begun) + self._sent("in_progress", response=begun)
        found = b"".join(each for choice in chunk["choices"] for each in self._told_choice(choice))
        if "speculation" in chunk:
            self._outcome["speculation"] = chunk["speculation"]
        if chunk["usage"] is None:
            return found
        status = self._outcome["status"]
        is_cut = self._open is not None and self._is_cut(self._open["type"], status)
        found += b"".join(self._close(is_cut=is_cut))
        response = self._response(status, _usage(chunk["usage"]), self._outcome.get("speculation"))
        return found + self._sent(status["status"], response=response)

    def failure(self, error: ApiError) -> bytes:
        """The event of an error."""
        told = error.body["error"]
        body = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}
        return event({**body, "sequence_number": self._num_events}, "error")

    def _content(self, heard: Heard, *, is_whole: bool) -> dict[str, Any]:
        """The pieces themselves, since their order is told."""
        return {"pieces": tuple(joined(heard.pieces))}

    def _response(self, status: dict[str, Any], usage: Any, speculation: Any) -> dict[str, Any]:
        params = self.job.params
        named = {"id": self.id, "object": "response", "created_at": self.created, "model": self.model, "error": None}
        found = {**named, "incomplete_details": None, **status, **self._asked, "output": list(self._output)}
        found |= {"temperature": params.temperature, "top_p": params.top_p, "usage": usage}
        return found if speculation is None else {**found, "speculation": speculation}

    def _told_choice(self, choice: dict[str, Any]) -> Iterator[bytes]:
        """The events of a choice: thoughts, text and calls in the order in which they were written."""
        scores = (choice.get("logprobs") or {}).get("content") or []
        for kind, piece in choice["pieces"]:
            if kind == "thoughts":
                yield from self._begin("reasoning", _item("reasoning"))
                yield self._part("reasoning_text.delta", piece)
            elif kind == "content":
                yield from self._begin("message", _item("message"))
                self._told_scores += scores
                yield self._part("output_text.delta", piece, logprobs=scores)
                scores = []
            else:
                if "id" in piece:
                    yield from self._close()
                    yield from self._begin("function_call", self._call(piece))
                if arguments := piece["function"]["arguments"]:
                    yield self._part("function_call_arguments.delta", arguments)
        if choice["finish_reason"] is not None:
            self._outcome["status"] = _status(choice)

    def _is_cut(self, kind: str, status: dict[str, Any]) -> bool:
        """Tells whether the end of the text has cut off its last item. A call may also be cut off by a stop string."""
        is_in_call = any(listener.is_in_call for listener in self._listeners.values())
        is_cut_off = any(listener.is_cut_off for listener in self._listeners.values())
        return is_in_call if kind == "function_call" else status["status"] == "incomplete" and not is_cut_off

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The item of a call that has just begun."""
        named = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
        namespace, name = self._names.get(call["function"]["name"], (None, call["function"]["name"]))
        told = {} if namespace is None else {"namespace": namespace}
        return {**named, "call_id": call["id"], **told, "name": name, "arguments": ""}

    def _begin(self, kind: str, item: dict[str, Any]) -> Iterator[bytes]:
        """Begin an item, unless one of this kind is being told."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close()
        self._open, self._parts, self._told_scores = item, [], []
        yield self._sent("output_item.added", output_index=len(self._output), item=item)
        if kind == "message":
            yield self._of_item("content_part.added", content_index=0, part=_text_part("", []))

    def _part(self, kind: str, text: str, **more: Any) -> bytes:
        """The event of more of an item."""
        self._parts.append(text)
        place = {} if kind.startswith("function") else {"content_index": 0}
        return self._of_item(kind, **place, delta=text, **more)

    def _close(self, *, is_cut: bool = False) -> Iterator[bytes]:
        """End the item that is being told, if there is one. What is cut off is incomplete: nobody is to run such a call."""
        if self._open is None:
            return
        text, kind = "".join(self._parts), self._open["type"]
        if kind == "reasoning":
            yield self._of_item("reasoning_text.done", content_index=0, text=text)
        elif kind == "message":
            yield self._of_item("output_text.done", content_index=0, text=text, logprobs=self._told_scores)
            yield self._of_item("content_part.done", content_index=0, part=_text_part(text, self._told_scores))
        else:
            yield self._of_item("function_call_arguments.done", arguments=text, name=self._open["name"])
        over = _done(self._open, text, self._told_scores) | ({"status": "incomplete"} if is_cut else {})
        yield self._sent("output_item.done", output_index=len(self._output), item=over)
        self._output.append(over)
        self._open = None

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._sent(kind, item_id=self._open["id"], output_index=len(self._output), **fields)

    def _sent(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        self._num_events += 1
        return event({"type": name, "sequence_number": self._num_events - 1, **fields}, name)


def _item(kind: str) -> dict[str, Any]:
    """An item that has just begun."""
    found: dict[str, Any] = {"id": f"{_IDS[kind]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
    return found | ({"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []})


def _done(item: dict[str, Any], text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
    """An item with all that it holds."""
    over = {**item, "status": "completed"}
    if item["type"] == "function_call":
        return {**over, "arguments": text}
    part = {"type": "reasoning_text", "text": text} if item["type"] == "reasoning" else _text_part(text, scores)
    return {**over, "content": [part]}


def _text_part(text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def _status(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns how a response ended."""
    if choice["finish_reason"] == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed"}


def _usage(told: dict[str, Any]) -> dict[str, Any]:
    """The cost in the words of this API."""
    cached = told.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": told["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": told["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": told.get("completion_tokens_details", {}).get("reasoning_tokens", 0)},
        "total_tokens": told["total_tokens"],
    }

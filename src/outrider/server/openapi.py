"""The OpenAPI document of the server."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from outrider import __version__
from outrider.server.messages import CountRequest, MessagesRequest
from outrider.server.responses import ResponsesRequest
from outrider.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.wire import is_of_messages

_POSTED: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionRequest, "Complete prompts."),
    "/v1/chat/completions": (ChatRequest, "Complete a conversation."),
    "/v1/responses": (ResponsesRequest, "Complete a conversation, in the words of the Responses API."),
    "/v1/messages": (MessagesRequest, "Complete a conversation, in Anthropic's words."),
    "/v1/messages/count_tokens": (CountRequest, "The number of tokens of such a conversation."),
    "/tokenize": (TokenizeRequest, "The tokens of a prompt or a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of tokens."),
}
_FETCHED = {
    "/v1/models": "The model.",
    "/records": "What is kept of the texts of this API key.",
    "/health": "Whether the engine lives.",
    "/ready": "Whether another request would find a place.",
    "/version": "The version.",
    "/metrics": "Metrics for Prometheus.",
}
#: Statuses with error objects that any route may answer with.
_ERRORS = {
    "400": "The request cannot be served.",
    "401": "The API key is missing, or there is no such key.",
    "403": "The Host or the Origin of the request is not allowed.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "415": "The body is not said to be JSON, or it is compressed.",
    "429": "The queue is full.",
    "500": "The server failed.",
    "503": "The server is shutting down.",
}


@cache
def document() -> dict[str, Any]:
    """The document."""
    place = "#/components/schemas/{model}"
    kinds = [(kind, "validation") for kind, _ in _POSTED.values()]
    named, shared = models_json_schema(kinds, ref_template=place)  # type: ignore[arg-type]
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in _FETCHED.items()}
    paths["/records"]["delete"] = _operation("Delete what is kept of the texts of this API key.")
    for path, (kind, text) in _POSTED.items():
        body = {"required": True, "content": {"application/json": {"schema": named[(kind, "validation")]}}}
        error = "ErrorOfMessages" if is_of_messages(path) else "Error"
        paths[path] = {"post": {**_operation(text, error), "requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**shared["$defs"], "Error": _ERROR, "ErrorOfMessages": _ERROR_OF_MESSAGES}},
    }


def _operation(text: str, error: str = "Error") -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{error}"}}
    errors = {status: {"description": said, "content": {"application/json": schema}} for status, said in _ERRORS.items()}
    return {"summary": text, "responses": {"200": {"description": "The answer."}, **errors}}


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERROR_OF_MESSAGES = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object", "properties": {"error_code": {"type": "string"}}},
            },
        },
        "request_id": {"type": ["string", "null"]},
    },
}

"""What goes over the wire: JSON, server-sent events, and errors in the form of the API that a request came by."""

from __future__ import annotations

import json
from typing import Any

from outrider.server.errors import TYPES, ApiError

#: The last event of a stream of OpenAI's API.
DONE = b"data: [DONE]\n\n"
#: The Messages API, whose routes are this one and those below it.
MESSAGES = "/v1/messages"
#: What that API calls errors of a status, where it does not have OpenAI's names.
_TYPES = {413: "request_too_large", 499: "api_error", 500: "api_error", 503: "overloaded_error"}


def encoded(body: Any) -> bytes:
    """JSON as it is sent; minus infinity, which JSON does not have, does not occur in answers."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def is_json(value: Any) -> bool:
    """Tells whether a value can be sent. Python reads numbers that JSON does not have, as 1e999."""
    try:
        encoded(value)
    except (ValueError, RecursionError):
        return False
    return True


def event(body: Any, name: str | None = None) -> bytes:
    """One event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encoded(body) + b"\n\n"


def is_of_messages(path: str) -> bool:
    """Tells whether whoever asks at this path reads the errors of Anthropic's API, and no others."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def naming_headers(request_id: str, path: str) -> dict[str, str]:
    """The headers that tell the id of a request; Anthropic's clients know it by another name."""
    names = ("x-request-id", "request-id") if is_of_messages(path) else ("x-request-id",)
    return dict.fromkeys(names, request_id)


def error_body(error: ApiError, path: str, request_id: str | None = None) -> dict[str, Any]:
    """The error object of an answer at this path."""
    if not is_of_messages(path):
        return error.body
    told = error.body["error"]
    kind = _TYPES.get(error.status) or TYPES.get(error.status, "api_error")
    found = {"type": kind, "message": told["message"]}
    details = {} if error.code is None else {"details": {"error_code": error.code}}
    return {"type": "error", "error": {**found, **details}, "request_id": request_id}


def failure(error: ApiError, path: str, request_id: str | None = None) -> bytes:
    """The event of an error that came too late for a status."""
    return event(error_body(error, path, request_id), "error" if is_of_messages(path) else None)

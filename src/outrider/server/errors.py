"""Error objects in OpenAI's form, and the server's log."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from outrider.errors import (
    ClosedError,
    EngineDiedError,
    InputError,
    ModelError,
    NoTokenLeftError,
    OutriderError,
    ProcessingError,
    ProposerError,
    RequestError,
)

# --- Error objects in OpenAI's form.


#: The type that OpenAI gives to errors of a status.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "server_error")
        param = None if self.param is None else _shortened(self.param, 200)
        return {"error": {"message": _shortened(self.message, 1500), "type": kind, "param": param, "code": self.code}}


def api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """The answer to an error that was raised while a request was served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        field = (names or {}).get(error.field, error.field)
        return ApiError(400, _renamed(error, field), param=field, code="invalid_value")
    if isinstance(error, RequestError):
        of_the_client = isinstance(error, NoTokenLeftError | ProcessingError)
        return ApiError(400 if of_the_client else 500, f"{error.problem}. {error.remedy}", code=_code(error))
    if isinstance(error, ClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, EngineDiedError):
        return ApiError(503, "the engine has died; the server has to be started again", code="engine_died")
    if isinstance(error, OutriderError) and not isinstance(error, ModelError | ProposerError):
        return ApiError(500, str(error), code=_code(error))
    return ApiError(500, "the server failed; its log says why", code="internal_error")


def _shortened(text: str, most: int) -> str:
    """A text that may hold what the client has sent, and so may be as long as a body."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _code(error: OutriderError) -> str:
    """The name of its class, as other codes are written: no_token_left for a NoTokenLeftError."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower()


def _renamed(error: InputError, field: str) -> str:
    message = str(error)
    return field + message.removeprefix(error.field) if message.startswith(f"{error.field}=") else message


# --- The server's log: lines to read on a terminal, a JSON object a line elsewhere, and no text of a prompt or an answer.


logger = logging.getLogger("outrider.server")


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; what was given as `extra={"facts": {...}}` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


class PlainFormatter(logging.Formatter):
    """A record as a line for somebody who watches: the event, and its facts as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        line = f"{clock} {level}{record.getMessage()}" + "".join(f" {name}={_shown(fact)}" for name, fact in facts.items())
        if record.getMessage() == "listening":
            line += f"\n\n  Open {facts['url']}/ to try it, and {facts['url']}/learn to see why it works.\n"
            line += f"  Programs that speak to OpenAI's API use {facts['url']}/v1, and to Anthropic's {facts['url']}.\n"
            line += "  Ctrl-C ends the server.\n"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info))
        return line


def _shown(fact: Any) -> str:
    return fact if isinstance(fact, str) and " " not in fact else json.dumps(fact, ensure_ascii=False, default=str)


def write_logs(level: int = logging.INFO) -> None:
    """Send all logs of the process to standard error: for people where that is a terminal, else as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("outrider").setLevel(level)


def log(event: str, facts: Mapping[str, Any], level: int = logging.INFO, *, error: BaseException | None = None) -> None:
    """Write an event with its facts."""
    logger.log(level, event, extra={"facts": dict(facts)}, exc_info=error)

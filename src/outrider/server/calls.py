"""The life of one HTTP request, from its first byte to its line in the log."""

from __future__ import annotations

import re
import secrets
from time import perf_counter
from typing import Any

from starlette.requests import Request

from outrider.params import CompletionOutput
from outrider.server.errors import ApiError
from outrider.server.logs import log
from outrider.server.metrics import ServerMetrics
from outrider.server.spans import RequestSpan
from outrider.server.tenancy.keys import ApiKeys

#: What clients may choose as the id of a request; anything else gets one of ours.
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class Call:
    """What is known of a request while it is served.

    Args:
        request: The request.
        path: Its route.
        metrics: Where it is counted.
    """

    def __init__(self, request: Request, path: str, metrics: ServerMetrics) -> None:
        self.id = request_id(request)
        self.request = request
        self.path = path
        self.tenant: str | None = None
        self.span = RequestSpan(request, path)
        self._metrics = metrics
        self._start = perf_counter()
        self._first: float | None = None
        self._facts: dict[str, Any] = {}
        self._ended = False

    @property
    def seconds(self) -> float:
        """Since it came."""
        return perf_counter() - self._start

    def identify(self, keys: ApiKeys) -> None:
        """Find out whose it is.

        Raises:
            ApiError: There are keys, and it brings none of them.
        """
        if not keys:
            return
        key, headers = bearer(self.request), {"WWW-Authenticate": "Bearer"}
        if not key:
            problem = "the API key is missing. Send the header Authorization: Bearer KEY"
            raise ApiError(401, problem, code="missing_api_key", headers=headers)
        self.tenant = keys.tenant(key)
        if self.tenant is None:
            raise ApiError(401, "there is no such API key", code="invalid_api_key", headers=headers)

    async def body(self, limit: int) -> bytes:
        """What it holds, which is to be JSON.

        Raises:
            ApiError: It is too large, or is not said to be JSON.
        """
        check_content_type(self.request)
        return await read_body(self.request, limit)

    def began(self) -> None:
        """The first piece of a stream has come."""
        if self._first is None:
            self._first = self.seconds
            self._metrics.began(self._first)
            self.span.began(self._first)

    def wrote(self, num_prompt_tokens: int, outputs: list[CompletionOutput]) -> None:
        """The answer is whole."""
        self._metrics.wrote(num_prompt_tokens, outputs)
        self.span.wrote(num_prompt_tokens, outputs)
        self._facts = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": sum(len(output.token_ids) for output in outputs),
            "finish_reasons": sorted({output.finish_reason for output in outputs}),
        }

    def ended(self, status: int, code: str | None = None) -> None:
        """It is over; once."""
        if self._ended:
            return
        self._ended = True
        self._metrics.answered(self.path, status, self.seconds, self.tenant)
        self.span.ended(status, code)
        first = {} if self._first is None else {"first_piece_seconds": round(self._first, 4)}
        facts = {"request_id": self.id, "tenant": self.tenant, "method": self.request.method, "path": self.path}
        outcome = {"status": status, "code": code, "seconds": round(self.seconds, 4), **first, **self._facts}
        log("request", {**facts, **outcome})


def request_id(request: Request) -> str:
    """What to call a request: as it says itself, where that is a name, or by chance."""
    given = request.headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else secrets.token_hex(12)


def bearer(request: Request) -> str:
    """The API key that a request brings; empty where it brings none."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def check_content_type(request: Request) -> None:
    """See that a request says of its body that it is JSON. Browsers then ask before they send it for a page from elsewhere.

    Raises:
        ApiError: It says something else, or nothing.
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        said = f"the content type {given!r} is not JSON" if given else "the content type of the body is missing"
        remedy = "Send the header Content-Type: application/json"
        raise ApiError(415, f"{said}. {remedy}", code="unsupported_content_type")


async def read_body(request: Request, limit: int) -> bytes:
    """What a request holds.

    Raises:
        ApiError: It is larger than `limit` bytes.
    """
    problem = ApiError(413, f"the body is larger than {limit:,} bytes", code="body_too_large")
    if int(request.headers.get("content-length", "0") or 0) > limit:
        raise problem
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > limit:
            raise problem
    return bytes(found)

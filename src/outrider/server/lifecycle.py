"""The life of one HTTP request, from its first byte to its line in the log and its span."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from math import inf
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from outrider.params import CompletionOutput
from outrider.server.errors import ApiError, log
from outrider.server.metrics import ServerMetrics
from outrider.server.requests import Job
from outrider.server.settings import ServerSettings
from outrider.server.tenants import ApiKeys

if TYPE_CHECKING:
    from opentelemetry.trace import Span

# --- The life of one HTTP request, from its first byte to its line in the log.


#: What clients may choose as the id of a request; anything else gets one of ours.
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
#: Where the protocol leaves in the state of a request when its first byte came, by the clock of the event loop.
BEGAN = "outrider.began"


class Call:
    """Holds what is known of a request while it is served."""

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
        self._began: float = request.scope.get("state", {}).get(BEGAN) or asyncio.get_running_loop().time()

    @property
    def seconds(self) -> float:
        """Since it came."""
        return perf_counter() - self._start

    def end(self, seconds: float | None) -> float | None:
        """When it has taken so long since its first byte, by the clock of the event loop; None for never."""
        return None if seconds is None else self._began + seconds

    def identify(self, keys: ApiKeys) -> None:
        """Find out whose it is."""
        if not keys:
            return
        key, headers = api_key(self.request), {"WWW-Authenticate": "Bearer"}
        if not key:
            problem = "the API key is missing. Send the header Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError(401, problem, code="missing_api_key", headers=headers)
        self.tenant = keys.tenant(key)
        if self.tenant is None:
            raise ApiError(401, "there is no such API key", code="invalid_api_key", headers=headers)

    async def body(self, settings: ServerSettings) -> bytes:
        """Returns what it holds, which is to be JSON."""
        check_content_type(self.request)
        clock, seconds, end = asyncio.get_running_loop().time, settings.body_seconds, self.end(settings.request_seconds)
        try:
            async with asyncio.timeout_at(min(clock() + seconds, end or inf)):
                return await read_body(self.request, settings.max_body_bytes)
        except (TimeoutError, asyncio.CancelledError) as error:
            of_request = end is not None and clock() >= end
            if isinstance(error, asyncio.CancelledError) and not of_request:
                raise
            option = f"--request-seconds={settings.request_seconds:g}" if of_request else f"--body-seconds={seconds:g}"
            problem = f"the body of the request did not come in time. This server has {option}"
            raise ApiError(408, problem, code="request_timeout", headers={"Connection": "close"}) from None

    def began(self) -> None:
        """The first piece that the model wrote of a stream has come."""
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
    """Returns what to call a request: as it says itself, where that is a name, or by chance."""
    given = request.headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else secrets.token_hex(12)


def api_key(request: Request) -> str:
    """The API key that a request brings, as clients of OpenAI send it or as those of Anthropic do; empty for none."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return (key if kind.lower() == "bearer" else request.headers.get("x-api-key", "")).strip()


def check_content_type(request: Request) -> None:
    """See that a request says of its body that it is JSON, and not compressed. Browsers then ask before they send it for a
    page from elsewhere."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        said = f"the body is sent as {coding!r}, and this server reads none that is compressed. Leave out Content-Encoding"
        raise ApiError(415, said, code="unsupported_content_encoding")
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        said = f"the content type {given!r} is not JSON" if given else "the content type of the body is missing"
        remedy = "Send the header Content-Type: application/json"
        raise ApiError(415, f"{said}. {remedy}", code="unsupported_content_type")


async def read_body(request: Request, limit: int) -> bytes:
    """Returns what a request holds."""
    said = f"the body is larger than {limit:,} bytes. The option --max-body-bytes of the server allows more"
    problem = ApiError(413, said, code="body_too_large")
    if int(request.headers.get("content-length", "0") or 0) > limit:
        raise problem
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > limit:
            raise problem
    return bytes(found)


# --- One OpenTelemetry span for each request for texts, with its rounds as events, in the names of the conventions
# `gen_ai`.
#
# Only the API is used: who starts the server chooses where spans go, and without that nothing is recorded.


_CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
_OPERATIONS = {"/v1/completions": "text_completion", **dict.fromkeys(_CHATS, "chat")}


class RequestSpan:
    """The span of one request; nothing where its route writes no text, or where nobody records spans."""

    def __init__(self, request: Request, path: str) -> None:
        self._operation = _OPERATIONS.get(path)
        self._span = None if self._operation is None else _recorded(self._operation, request)
        self._began = time_ns()

    @property
    def records(self) -> bool:
        """Tells whether rounds are worth recording."""
        return self._span is not None

    def asks(self, job: Job, model: str) -> None:
        """Notes what is asked of the engine, from now on."""
        if self._span is None:
            return
        self._began = time_ns()
        self._span.update_name(f"{self._operation} {model}")
        params, asked = job.params, job.asked
        known: dict[str, Any] = {
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": job.num_sequences,
            "gen_ai.request.stream": bool(asked.stream),
            "outrider.method": job.speculation.name,
        }
        self._span.set_attributes({name: value for name, value in known.items() if value is not None})

    def began(self, seconds: float) -> None:
        """The first piece of a stream has come, so long after the request."""
        if self._span is not None:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def wrote(self, num_prompt_tokens: int, outputs: Sequence[CompletionOutput]) -> None:
        """The answer is whole."""
        if self._span is None:
            return
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(len(output.token_ids) for output in outputs),
            "gen_ai.response.finish_reasons": [output.finish_reason for output in outputs],
            "outrider.drafted": sum(output.stats.num_draft_tokens for output in outputs),
            "outrider.accepted": sum(output.stats.num_accepted_tokens for output in outputs),
        }
        self._span.set_attributes(attributes)
        for output in outputs:
            self._tell_rounds(self._span, output)

    def ended(self, status: int, code: str | None) -> None:
        """The request is over; once."""
        if self._span is None:
            return
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", status)
        if status >= 400:
            self._span.set_attribute("error.type", code or str(status))
        if status >= 500:
            self._span.set_status(StatusCode.ERROR, code)
        self._span.end()

    def _tell_rounds(self, span: Span, output: CompletionOutput) -> None:
        for found in output.rounds or ():
            attributes: dict[str, Any] = {
                "outrider.sample": output.index,
                "outrider.round": found.round,
                "outrider.methods": [each.method for each in found.drafted_by],
                "outrider.drafted": len(found.token_ids),
                "outrider.accepted": len(found.accepted),
            }
            span.add_event("outrider.round", attributes, self._began + round(found.at * 1e9))


def _recorded(operation: str, request: Request) -> Span | None:
    """A span that has begun; None where nobody records it."""
    if find_spec("opentelemetry") is None:
        return None
    from opentelemetry import propagate, trace

    attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "outrider"}
    context = propagate.extract(dict(request.headers))
    span = trace.get_tracer("outrider").start_span(operation, context, trace.SpanKind.SERVER, attributes)
    return span if span.is_recording() else None

"""One OpenTelemetry span for each request for texts, with its rounds as events, in the names of the conventions `gen_ai`.

Only the API is used: who starts the server chooses where spans go, and without that nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from time import time_ns
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from outrider.params import CompletionOutput
from outrider.server.api.jobs import Job

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}


class RequestSpan:
    """The span of one request; nothing where its route writes no text, or where nobody records spans.

    Args:
        request: The headers `traceparent` and `tracestate` name the span that it belongs to.
        path: Its route.
    """

    def __init__(self, request: Request, path: str) -> None:
        self._operation = _OPERATIONS.get(path)
        self._span = None if self._operation is None else _recorded(self._operation, request)
        self._began = time_ns()

    @property
    def records(self) -> bool:
        """Whether rounds are worth recording."""
        return self._span is not None

    def asks(self, job: Job, model: str) -> None:
        """What is asked of the engine, from now on."""
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

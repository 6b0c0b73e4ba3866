"""The routes of the HTTP application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider import __version__
from outrider.async_llm import AsyncStream
from outrider.config import nearest
from outrider.conversations import template_of
from outrider.errors import InvalidParameterError, OutriderError
from outrider.server.answers import Answer, ChatAnswer, CompletionAnswer
from outrider.server.chat import check_template, conversation, encode, ignored_fields
from outrider.server.errors import ApiError, api_error, log
from outrider.server.lifecycle import Call, request_id
from outrider.server.message_answers import MessageAnswer
from outrider.server.messages import CountRequest, MessagesRequest, as_chat
from outrider.server.metrics import MEDIA_TYPE
from outrider.server.openapi import document
from outrider.server.pages.pages import facts, page_routes
from outrider.server.recorder import Recorder
from outrider.server.requests import Job, field_names
from outrider.server.response_answers import ResponseAnswer
from outrider.server.responses import ResponsesRequest, told_back
from outrider.server.responses import as_chat as as_chat_of_responses
from outrider.server.schemas import ChatRequest, CommonRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.service import Service, close, described
from outrider.server.streams import events, while_connected
from outrider.server.tenants import Meter
from outrider.server.wire import encoded, error_body, is_json, naming_headers

Handler = Callable[[Service, Call], Awaitable[Response]]


def make_app(service: Service) -> Starlette:
    """The application."""
    created = int(time.time())

    async def models(service: Service, call: Call) -> Response:
        return answer({"object": "list", "data": [described(service, created)]})

    async def model(service: Service, call: Call) -> Response:
        service.check_model(call.request.path_params["name"])
        return answer(described(service, created))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await service.end()

    routes = [
        route(service, "/v1/completions", completions, "POST"),
        route(service, "/v1/chat/completions", chat_completions, "POST"),
        route(service, "/v1/responses", responses, "POST"),
        route(service, "/v1/messages", messages, "POST"),
        route(service, "/v1/messages/count_tokens", count_tokens, "POST"),
        route(service, "/v1/models", models),
        route(service, "/v1/models/{name:path}", model),
        route(service, "/tokenize", tokenize, "POST"),
        route(service, "/detokenize", detokenize, "POST"),
        route(service, "/records", told_records),
        route(service, "/records", deleted_records, "DELETE"),
        route(service, "/health", health, open_to_all=True),
        route(service, "/ready", ready, open_to_all=True),
        route(service, "/version", version, open_to_all=True),
        route(service, "/metrics", metrics, open_to_all=True),
        route(service, "/openapi.json", openapi, open_to_all=True),
        route(service, "/pages/facts", page_facts),
        *page_routes(),
    ]
    app = Starlette(
        routes=routes, middleware=_middleware(service), lifespan=lifespan, exception_handlers={HTTPException: _no_route}
    )
    app.router.redirect_slashes = False  # clients lose the body of a POST that is sent elsewhere
    return app


def _middleware(service: Service) -> list[Middleware]:
    """Tells browsers that the pages of allowed origins may read answers."""
    if not service.settings.origins:
        return []
    told = ("x-request-id", "retry-after")
    origins, methods = service.settings.origins, ("GET", "POST")
    return [
        Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=("*",), expose_headers=told)
    ]


def answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A body of JSON."""
    return Response(encoded(body), status, headers, "application/json")


def route(service: Service, path: str, handler: Handler, method: str = "GET", *, open_to_all: bool = False) -> Route:
    """A route whose errors are error objects of its API and whose requests have ids and lines in the log."""

    async def endpoint(request: Request) -> Response:
        call = Call(request, path, service.metrics)
        try:
            if not open_to_all:
                call.identify(service.keys)
            async with service.deadlines.until(call.end(service.settings.request_seconds)):
                response = await handler(service, call)
        except (Exception, asyncio.CancelledError) as error:
            response = _refusal(call, error)
        response.headers.update(naming_headers(call.id, path))
        if not isinstance(response, StreamingResponse) and not open_to_all:
            call.ended(response.status_code, getattr(response, "code", None))
        return response

    return Route(path, endpoint, methods=[method])


def _refusal(call: Call, error: BaseException) -> Response:
    if isinstance(error, asyncio.CancelledError):
        call.ended(499, "client_left")
        raise error
    if isinstance(error, ClientDisconnect):
        error = ApiError(499, "the client has left", code="client_left")
    found = api_error(error)
    _note(call, error)
    response = answer(error_body(found, call.path, call.id), found.status, found.headers)
    response.code = found.code  # type: ignore[attr-defined]
    return response


def _note(call: Call, error: BaseException) -> None:
    """Log what is a fault of ours."""
    cause = error.__cause__ if isinstance(error, ApiError) else error
    if api_error(error).status >= 500 and cause is not None:
        known = isinstance(cause, OutriderError)
        log("a request failed", {"request_id": call.id, "expected": known}, logging.ERROR, error=cause)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path, (error.headers or {}).get("Allow")
    if error.status_code == 405:
        found = ApiError(
            405, f"{request.method} {path}: this route has another method. Use {allowed}.", code="no_such_method"
        )
    else:
        problem = f"{request.method} {path}: {error.detail}{_route_elsewhere(path) or _routes_like(request)}"
        found = ApiError(error.status_code, problem, code="no_such_route")
    name = request_id(request)
    return answer(error_body(found, path, name), found.status, {**(error.headers or {}), **naming_headers(name, path)})


#: Routes of other APIs, whose they are, and what this server has for the same purpose.
_ELSEWHERE = {
    "/v1/responses/input_tokens": ("OpenAI's API for the number of tokens", "/tokenize"),
    "/v1/responses/compact": ("OpenAI's API for conversations that are made shorter", None),
    "/v1/responses": ("OpenAI's API for responses that are kept", "/v1/responses"),
    "/v1/conversations": ("OpenAI's API for conversations that are kept", "/v1/responses"),
    "/v1/messages/batches": ("Anthropic's API for batches", "/v1/messages"),
    "/v1/complete": ("Anthropic's older API", "/v1/completions"),
    "/v1/embeddings": ("OpenAI's API for embeddings", None),
    "/v1/audio": ("OpenAI's API for sound", None),
    "/v1/images": ("OpenAI's API for images", None),
    "/v1/moderations": ("OpenAI's API for moderation", None),
    "/api/generate": ("Ollama's API", "/v1/completions"),
    "/api/chat": ("Ollama's API", "/v1/chat/completions"),
    "/api/tags": ("Ollama's API", "/v1/models"),
    "/api/show": ("Ollama's API", "/v1/models"),
    "/api/version": ("Ollama's API", "/version"),
    "/api/embed": ("Ollama's API for embeddings", None),
    "/api/embeddings": ("Ollama's API for embeddings", None),
    "/completion": ("llama.cpp's own API", "/v1/completions"),
    "/embedding": ("llama.cpp's own API for embeddings", None),
    "/generate": ("the API of Text Generation Inference", "/v1/completions"),
}


def _route_elsewhere(path: str) -> str:
    """Says whose API a path belongs to, and what this server has instead; empty where that is not known."""
    known = next((route for route in _ELSEWHERE if path == route or path.startswith(f"{route}/")), None)
    if known is None:
        return ""
    whose, ours = _ELSEWHERE[known]
    instead = "it writes texts, by /v1/completions and /v1/chat/completions" if ours is None else f"it has {ours} instead"
    return f". This is {whose}, which this server does not speak; {instead}"


def _routes_like(request: Request) -> str:
    """Which routes a path without one may have meant: itself without a `/` at its end, those below it, or the nearest."""
    path, routes = request.url.path, [route for route in request.app.routes if isinstance(route, Route)]
    shorter = path.rstrip("/")
    if shorter != path and any(route.path_regex.fullmatch(shorter) for route in routes):
        return f". Did you mean {shorter}?"
    paths = [route.path for route in routes if "{" not in route.path]
    below = [each for each in paths if shorter and each.startswith(f"{shorter}/")]
    return f". Below it there are {', '.join(below)}" if below else f". {nearest(path, paths)}".rstrip(" .")


# -- texts -------------------------------------------------------------------------------------------------------------


async def completions(service: Service, call: Call) -> Response:
    """/v1/completions"""
    asked = await service.read(CompletionRequest.read, call)
    name, tokenizer = service.settings.model_name, service.engine.llm.tokenizer
    return await _write(service, call, asked, lambda job: CompletionAnswer(job, name, tokenizer))


async def chat_completions(service: Service, call: Call) -> Response:
    """/v1/chat/completions"""
    asked = await service.read(ChatRequest.read, call)
    name, tokenizer = service.settings.model_name, service.engine.llm.tokenizer
    return await _write(service, call, asked, lambda job: ChatAnswer(job, name, tokenizer))


async def responses(service: Service, call: Call) -> Response:
    """/v1/responses"""
    given: dict[str, Any] = {}

    def read(body: bytes) -> ChatRequest:
        asked = ResponsesRequest.read(body)
        given.update((name, value if is_json(value) else None) for name, value in told_back(asked))
        template = template_of(service.engine.llm.prompts.tokenizer, tools=bool(asked.tools))
        return as_chat_of_responses(asked, template)

    asked = await service.read(read, call)
    name, tokenizer = service.settings.model_name, service.engine.llm.tokenizer
    return await _write(service, call, asked, lambda job: ResponseAnswer(job, name, tokenizer, given))


async def messages(service: Service, call: Call) -> Response:
    """/v1/messages"""
    asked = await service.read(partial(_as_chat, service, MessagesRequest), call)
    name, tokenizer = service.settings.model_name, service.engine.llm.tokenizer
    return await _write(service, call, asked, lambda job: MessageAnswer(job, name, tokenizer, call.id))


async def count_tokens(service: Service, call: Call) -> Response:
    """/v1/messages/count_tokens"""
    asked = await service.read(partial(_as_chat, service, CountRequest), call)
    service.check_model(asked.model)
    ignored = _told_ignored(call, asked.ignored)
    job = partial(encode, asked, service.engine.llm.prompts)
    return answer({"input_tokens": len(await service.engine.prepared(call.tenant, job))}, headers=ignored)


def _as_chat(service: Service, kind: type[CountRequest], body: bytes) -> ChatRequest:
    """A request of the Messages API, as the chat that says the same."""
    asked = kind.read(body)
    return as_chat(asked, template_of(service.engine.llm.prompts.tokenizer, tools=bool(asked.tools)))


async def _write(service: Service, call: Call, asked: CommonRequest, make: Callable[[Job], Answer]) -> Response:
    service.check_model(asked.model)
    _check_streaming(asked)
    ignored = _told_ignored(call, ignored_fields(asked, service.engine.llm.prompts))
    service.watch_system_prompt(asked, call)
    async with AsyncExitStack() as stack:
        meter = service.meter(call.tenant)
        meter.check_tokens()
        stack.enter_context(meter.place(_size(service, asked)))
        job = replace(await service.job(asked, call.tenant), is_recorded=call.span.records)
        call.span.asks(job, service.settings.model_name)
        shaped = make(job)
        stack.enter_context(_paid(meter, shaped))
        if asked.stream:
            streams = await service.begin(job)
            stack.push_async_callback(close, streams)
            return _Events(_read(service, call, shaped, streams), stack.pop_all(), call, ignored)
        outputs = await while_connected(call.request.receive, service.write(job))
        body = shaped.whole(outputs)
    _wrote(service, call, shaped)
    return answer(body, headers=ignored)


def _wrote(service: Service, call: Call, shaped: Answer) -> None:
    """An answer is whole: it is counted, and kept where its tenant allows it."""
    call.wrote(shaped.job.num_prompt_tokens, list(shaped.outputs.values()))
    if service.recorder is not None:
        service.recorder.keep(shaped.job, shaped.outputs)


@contextmanager
def _paid(meter: Meter, shaped: Answer) -> Iterator[None]:
    """Charge the tenant for an answer when the block ends: for what was told of it. Whoever leaves before a whole answer is
    there pays for as much as it has asked for, since nobody knows how much of it was written."""
    job = shaped.job
    meter.use(job.num_prompt_tokens)
    try:
        yield
    except BaseException as error:
        refused = isinstance(error, ApiError) and error.status < 499
        if not (job.asked.stream or refused):
            meter.use(job.num_sequences * job.params.max_tokens)
        raise
    finally:
        meter.use(shaped.num_told)


def _size(service: Service, asked: CommonRequest) -> int:
    try:
        return service.jobs.check_size(asked)
    except InvalidParameterError as error:
        raise api_error(error, field_names(asked)) from error


def _told_ignored(call: Call, ignored: tuple[str, ...]) -> dict[str, str]:
    """The header that tells which fields of a request were passed over; the log has them as a warning."""
    if not ignored:
        return {}
    log("fields of a request were ignored", {"request_id": call.id, "fields": list(ignored)}, logging.WARNING)
    return {"x-ignored-fields": ", ".join(ignored)}


def _check_streaming(asked: CommonRequest) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options: the answer is not streamed", param="stream_options", code="invalid_value")


async def _read(service: Service, call: Call, shaped: Answer, streams: list[AsyncStream]) -> AsyncGenerator[bytes, None]:
    """The events of an answer, and what is counted of them."""
    failures: list[BaseException] = []
    end = call.end(service.settings.request_seconds)
    parts = events(shaped, streams, service.deadlines, end, failures.append)
    async with aclosing(parts) as found:
        async for part in found:
            if shaped.has_begun:
                call.began()
            yield part
    if not failures:
        _wrote(service, call, shaped)
        call.ended(200)
    for error in failures:
        _note(call, error)
        call.ended(api_error(error).status, api_error(error).code)


class _Events(StreamingResponse):
    """Events, with what is held until the last of them has gone, or the client has: a place in the queue, and the
    streams."""

    def __init__(
        self, content: AsyncGenerator[bytes, None], held: AsyncExitStack, call: Call, headers: dict[str, str]
    ) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        self._content, self._held, self._call = content, held, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._content.aclose()
                self._call.ended(499, "client_left")  # unless its end is written down already


# -- tokens ------------------------------------------------------------------------------------------------------------


async def tokenize(service: Service, call: Call) -> Response:
    """/tokenize: the tokens of a prompt or a conversation."""
    asked = await service.read(TokenizeRequest.read, call)
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "prompt: give either a prompt or messages", param="prompt", code="invalid_value")
    return await service.engine.prepared(call.tenant, partial(_tokens, service, asked))


def _tokens(service: Service, asked: TokenizeRequest) -> Response:
    prompts = service.engine.llm.prompts
    if asked.messages is not None:
        check_template(prompts)
        tokens = prompts.encode_conversation(conversation(asked.messages))[1]
    else:
        tokens = prompts.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)[1]
    return answer({"count": len(tokens), "max_model_len": service.facts.longest, "tokens": tokens})


async def detokenize(service: Service, call: Call) -> Response:
    """/detokenize: the text of tokens."""
    asked = await service.read(DetokenizeRequest.read, call)
    service.check_model(asked.model)
    return await service.engine.prepared(call.tenant, partial(_text, service, asked))


def _text(service: Service, asked: DetokenizeRequest) -> Response:
    tokenizer, size = service.engine.llm.prompts.tokenizer, service.facts.vocab_size
    if tokenizer is None:
        raise ApiError(400, "tokens: the model has no tokenizer", param="tokens", code="unsupported")
    outside = next((token for token in asked.tokens if not 0 <= token < size), None)
    if outside is not None:
        problem = "token id outside the vocabulary"
        raise InvalidParameterError("tokens", outside, problem, f"Use ids from 0 to {size - 1}.")
    return answer({"prompt": tokenizer.decode(asked.tokens)})


# -- records -----------------------------------------------------------------------------------------------------------


def _recorder(service: Service) -> Recorder:
    if service.recorder is None:
        raise ApiError(404, "this server keeps no texts. It does with --record", code="no_records")
    return service.recorder


async def told_records(service: Service, call: Call) -> Response:
    """GET /records: what is kept of the tenant that asks"""
    recorder, tenant = _recorder(service), call.tenant
    assert tenant is not None, "a server that keeps texts has keys"
    return answer(asdict(await recorder.tell(tenant)))


async def deleted_records(service: Service, call: Call) -> Response:
    """DELETE /records: delete what is kept of the tenant that asks"""
    recorder, tenant = _recorder(service), call.tenant
    assert tenant is not None, "a server that keeps texts has keys"
    return answer({"namespace": tenant, "deleted_texts": await recorder.delete(tenant)})


# -- the server itself -------------------------------------------------------------------------------------------------


async def health(service: Service, call: Call) -> Response:
    """/health: 200 as long as the engine lives, with how it has fared."""
    found = service.health
    facts = {
        "num_broken_steps": found.num_broken_steps,
        "num_rebuilds": found.num_rebuilds,
        "switched_off": list(found.switched_off),
    }
    return answer({"status": service.status, **facts}, 200 if service.status == "ok" else 503)


async def ready(service: Service, call: Call) -> Response:
    """/ready: 200 where another request would find a place."""
    if service.status != "ok":
        return answer({"status": service.status}, 503)
    if service.is_full:
        raise ApiError(429, "the queue is full", code="queue_full", headers={"Retry-After": "1"})
    return answer({"status": "ready"})


async def version(service: Service, call: Call) -> Response:
    """/version"""
    return answer({"version": __version__})


async def metrics(service: Service, call: Call) -> Response:
    """/metrics, for Prometheus"""
    return Response(await service.metrics_text(), media_type=MEDIA_TYPE)


async def page_facts(service: Service, call: Call) -> Response:
    """/pages/facts: what the playground and the Learn page must know"""
    return answer(facts(service))


async def openapi(service: Service, call: Call) -> Response:
    """/openapi.json: what this server takes"""
    return answer(document())

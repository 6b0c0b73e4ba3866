"""`outrider serve`: the model behind OpenAI's API."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.errors import InvalidParameterError, MissingExtraError

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.server.settings import ServerSettings

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model: options.Model = None,
    method: options.Method = None,
    draft_model: options.DraftModel = None,
    num_draft_tokens: options.NumDraftTokens = None,
    rule: options.Rule = None,
    tree: options.Tree = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="A further method that requests may ask for, as in --method; may be repeated.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; others than this machine reach 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with a chat template, in place of the model's.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A key a line, or tenant:key; also from OUTRIDER_API_KEYS, with commas between.")
    ] = None,
    dtype: options.DType = "auto",
    device: options.Device = None,
    attention_backend: options.Backend = "auto",
    quantization: options.Quantization = None,
    batch_invariant: options.BatchInvariant = False,
    max_model_len: Annotated[int | None, typer.Option(help="Longest text, prompt and output together.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Texts that are written at a time.")] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Rows of a pass.")] = 1024,
    kv_cache_tokens: Annotated[int | None, typer.Option(help="KV memory; sized from free memory unless given.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Share the KV of equal beginnings, within a tenant.")] = True,
    max_queue: Annotated[int, typer.Option(help="Texts that may wait beside these; further ones get 429.")] = 256,
    max_n: Annotated[int, typer.Option(help="Texts of one request.")] = 16,
    max_body_bytes: Annotated[int, typer.Option(help="Of one request.")] = 4 * 2**20,
    request_seconds: Annotated[float | None, typer.Option(help="A request that takes longer is ended.")] = None,
    drain_seconds: Annotated[int, typer.Option(help="How long requests may finish after SIGTERM.", min=0)] = 30,
    stalled_seconds: Annotated[int, typer.Option(help="A client that takes nothing for so long is cut off.", min=1)] = 60,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate, for https.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key.")] = None,
) -> None:
    """Serve a model to everything that speaks to OpenAI's API."""
    allowed = [options.speculation(name, None, None, None) for name in allow or []]
    settings = options.speculation(method, draft_model, num_draft_tokens, rule, tree)
    template = None if chat_template is None else _template(chat_template)
    _check_installed()
    from outrider.server.keys import ApiKeys
    from outrider.server.logs import log, write_json
    from outrider.server.run import listen
    from outrider.server.settings import ServerSettings

    limits = ServerSettings(
        model_name=served_model_name or _usual_name(model),
        max_queue=max_queue,
        max_n=max_n,
        max_body_bytes=max_body_bytes,
        request_seconds=request_seconds,
    )
    keys = ApiKeys.of(api_key_file)
    place = listen(host, port, stalled_seconds)  # before the model: a port that cannot be had is better known now
    write_json()
    if not keys and host not in _LOOPBACK:
        log("everybody who reaches this address is served: give --api-key-file", {"host": host}, logging.WARNING)
    llm = _load(
        model,
        settings,
        template,
        dtype=dtype,
        device=device,
        attention_backend=attention_backend,
        quantization=quantization,
        batch_invariant=batch_invariant,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_tokens=kv_cache_tokens,
        prefix_caching=prefix_caching,
    )
    tls = {"ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
    given = {name: str(path) for name, path in tls.items() if path is not None}
    _serve(llm, limits, allowed, keys, place, drain_seconds=drain_seconds, **given)


def _load(model: str | None, settings: Any, template: str | None, **given: Any) -> LLM:
    from rich.console import Console

    llm = options.load(Console(stderr=True), model, settings, **given)
    if template is not None:
        if llm.tokenizer is None:
            raise InvalidParameterError("chat_template", "...", "the model has no tokenizer", "Leave it out.")
        llm.tokenizer.chat_template = template
    return llm


def _serve(llm: LLM, limits: ServerSettings, allowed: list[Any], keys: Any, place: Any, **how: Any) -> None:
    from outrider.async_llm import AsyncLLM
    from outrider.server.allowed import AllowedMethods
    from outrider.server.run import serve as run
    from outrider.server.service import Service

    methods = AllowedMethods(llm.speculation, [llm.resolve(config) for config in allowed])
    for config in allowed:
        method = llm.resolve(config).method
        if method is not None:
            llm.proposers.get(method)  # one that cannot be had is better known now than at the first request
    run(Service(AsyncLLM(llm), limits, methods, keys), place, **how)


def _check_installed() -> None:
    """Raise MissingExtraError where the packages of the server are missing."""
    from importlib.util import find_spec

    for name in ("starlette", "uvicorn", "prometheus_client"):
        if find_spec(name) is None:
            raise MissingExtraError("outrider serve", f"the package {name} is not installed", "Install outrider[serve].")


def _usual_name(model: str | None) -> str:
    """A hub id as it is; of a folder its name alone."""
    if model is None:
        return "outrider-embedded"
    return os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model


def _template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        remedy = "Give a file in UTF-8 that holds a Jinja template."
        raise InvalidParameterError("chat_template", str(path), problem, remedy) from None

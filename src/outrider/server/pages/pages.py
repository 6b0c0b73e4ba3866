"""The pages of the server: their built files, and the facts that they show."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.model.memory import weight_bytes
from outrider.propose.settings import SpeculationConfig
from outrider.server.service import Service

# --- Facts about the model and the methods of this server, for the pages.


def facts(service: Service) -> dict[str, Any]:
    """Name, length and weights of the model, and the methods that draft by themselves, the server's own first."""
    runner = service.engine.llm.engine.runner
    loaded, usual = runner.loaded, service.allowed.usual
    configs = [service.allowed.of(name, predicted=False) for name in service.allowed.names]
    drafting = [config for config in configs if config.enabled and config.name != "prediction"]
    drafting.sort(key=lambda config: config.name != usual.name)
    return {
        "model": service.settings.model_name,
        "max_model_len": service.facts.longest,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weight_bytes": runner.backend.weight_bytes(loaded.model) or weight_bytes(loaded.model),
        "max_texts": min(service.settings.max_n, service.facts.max_num_seqs),
        "chats": getattr(service.engine.llm.prompts.tokenizer, "chat_template", None) is not None,
        "methods": [_method(config, invariant=runner.invariant) for config in drafting],
    }


def _method(config: SpeculationConfig, *, invariant: bool) -> dict[str, Any]:
    method = config.method
    assert method is not None
    return {
        "name": config.name,
        "num_draft_tokens": config.num_draft_tokens,
        "takes_tree": method.allows_tree,
        "adapts": method.allows_tree and method.grows_from_probabilities,
        "least_length": method.least_length(),
        "takes_seeds": invariant or not config.engine_chooses,
    }


# --- Serves the built files of the pages.


BUILT = Path(__file__).parent / "built"
PAGES = {"/": "index.html", "/learn": "learn.html"}
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
#: A page loads nothing from elsewhere and runs no script but its own, whatever a prompt holds.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def page_routes() -> list[Route]:
    """The routes of the pages and of what they load. All of it is open to everybody; what the pages ask for is not."""
    return [*(Route(path, _page) for path in PAGES), Route("/assets/{name}", _asset)]


async def _page(request: Request) -> Response:
    return _file(request, PAGES[request.url.path], "no-cache")


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _assets():
        raise HTTPException(404, "there is no such file")
    return _file(request, name, "public, max-age=31536000, immutable")  # its name holds a digest of what is in it


def _assets() -> set[str]:
    return {path.name for path in BUILT.iterdir() if path.suffix in (".css", ".js", ".svg")}


def _file(request: Request, name: str, caching: str) -> Response:
    headers = {**_HEADERS, "cache-control": caching, "vary": "accept-encoding"}
    packs = "gzip" in request.headers.get("accept-encoding", "")
    if packs:
        headers["content-encoding"] = "gzip"
    return Response(_content(name, packed=packs), headers=headers, media_type=_TYPES[Path(name).suffix])


@cache
def _content(name: str, *, packed: bool) -> bytes:
    """A built file; they do not change while a server runs, and there are few."""
    content = (BUILT / name).read_bytes()
    return gzip.compress(content, mtime=0) if packed else content

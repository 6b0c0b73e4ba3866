"""The server's process: a socket, uvicorn, and an orderly end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from outrider.errors import InvalidParameterError
from outrider.server.app import make_app
from outrider.server.logs import log
from outrider.server.service import Service


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can reach; port 0 takes a free one.

    Raises:
        InvalidParameterError: The address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise InvalidParameterError("port", f"{host}:{port}", f"it cannot be had ({error})", "Use another one.") from None
    return found


def serve(service: Service, place: socket.socket, *, drain_seconds: int, **tls: Any) -> None:
    """Serve until SIGTERM or Ctrl-C, then let those who are being served finish.

    Args:
        service: What to serve.
        place: Where.
        drain_seconds: How long requests may take to finish at the end; then they are ended.
        tls: Options of uvicorn that begin with ssl_.
    """
    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=drain_seconds,
        **tls,
    )
    signal.signal(signal.SIGTERM, _end)  # uvicorn sends itself what it was sent once it has ended
    host, port = place.getsockname()[:2]
    scheme = "https" if tls.get("ssl_certfile") else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    _Server(config, {"url": url, "model": service.settings.model_name}).run(sockets=[place])


class _Server(uvicorn.Server):
    """One that says when it can be reached.

    Args:
        config: Of uvicorn.
        facts: What it says then.
    """

    def __init__(self, config: uvicorn.Config, facts: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._facts = facts

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            log("listening", self._facts)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)

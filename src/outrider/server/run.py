"""Runs the server's process: a socket, uvicorn, a profile that can be read again, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from threading import Timer
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from outrider.building import read_profile
from outrider.errors import ContradictionError, InvalidParameterError, OutriderError
from outrider.propose.settings import SpeculationConfig
from outrider.server.access import AccessGuard
from outrider.server.app import make_app
from outrider.server.connections import ACCEPTED_AT_ONCE, Listener
from outrider.server.errors import log
from outrider.server.protocol import Protocol
from outrider.server.service import Service
from outrider.server.streams import PARTING_SECONDS

# --- Runs the server's process: a socket, uvicorn, and an orderly end.


#: How long the engine may take to end its step and to free its memory, once everybody was told that the server ends.
_HANGING_SECONDS = 15


def listen(host: str, port: int, stalled_seconds: int, most: int = Listener.most) -> Listener:
    """A socket that clients can reach."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol's number asyncio sends every event at once. Without, the system would hold events back until the
    # client acknowledges those before, for up to 40 ms.
    found = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.most = most
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # the connections that are accepted have it from this one
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled_seconds * 1000)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        problem = f"no socket of {host} can listen there ({str(error).rstrip('.')})"
        raise InvalidParameterError("port", port, problem, "Use another one, from 0 to 65535, or another host.") from None
    return found


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is asked for its password")


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """See that https can be had with these files, or was not asked for.

    Args:
        key: None where the certificate's file holds it.
    """
    if certificate is None and key is not None:
        raise ContradictionError("ssl_keyfile", str(key), "there is no certificate", "Give --ssl-certfile too.")
    if certificate is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, _no_password)
        except (OSError, ValueError) as error:
            problem = f"with the key in {key or certificate} it cannot be used ({error})"
            remedy = "Give PEM files of a certificate and of its key."
            raise InvalidParameterError("ssl_certfile", str(certificate), problem, remedy) from None


class Hangups:
    """Does what SIGHUP asks for, from the moment at which this is made. It does not end the process."""

    def __init__(self) -> None:
        self._renew: Callable[[], object] | None = None
        self._is_asked = False
        signal.signal(signal.SIGHUP, self._note)

    def begin(self, renew: Callable[[], object]) -> None:
        """Call `renew` for each signal from now on, and for those that came while nobody could."""
        self._renew = renew
        if self._is_asked:
            renew()

    def end(self) -> None:
        """Do nothing any more. Python gives a signal its usual effect at its end, unless it is ignored."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        if self._renew is not None:
            self._renew()


def serve(
    service: Service,
    place: Listener,
    hangups: Hangups,
    *,
    profile: Path | None = None,
    **tls: Any,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then refuse what is new and let those who are being served finish.

    SIGHUP has the profile read again; see `Renewal`.

    Where the engine hangs in a step, the process ends with exit code 1 some 25 seconds after the time to finish.

    Args:
        profile: Who drafts, as `outrider tune` says; None where the command says it.
    """
    config = uvicorn.Config(
        AccessGuard(make_app(service), service.settings),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        # Not whatever else is installed: Ray brings a parser that has no limit for headers, and a package for WebSocket
        # would answer requests to change to it, which no route takes.
        ws="none",
        http=partial(Protocol, listener=place, settings=service.settings),  # type: ignore[arg-type]
        backlog=ACCEPTED_AT_ONCE,
        loop="asyncio",
        **tls,
    )
    signal.signal(signal.SIGTERM, _end)  # uvicorn sends itself what it was sent once it has ended
    place.handshake_seconds, place.is_tls = service.settings.header_seconds, bool(tls)
    server = _Server(config, service, place, Renewal(service, profile), hangups)
    try:
        server.run(sockets=[place])
    finally:
        hangups.end()
        server.has_ended()


class _Server(uvicorn.Server):
    """One that says when it can be reached, and goes on to answer while the last requests finish."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        listener: Listener,
        renewal: Renewal,
        hangups: Hangups,
    ) -> None:
        super().__init__(config)
        self._listener, self._hangups = listener, hangups
        self._service, self._renewal = service, renewal
        self._renewing: set[asyncio.Task[None]] = set()
        self._end: float | None = None
        self._has_cut_off = self._hangs = False
        self._last_resort: Timer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Not a handler of the event loop: those end with it, and the next signal would end the process.
        self._hangups.begin(partial(asyncio.get_running_loop().call_soon_threadsafe, self._renew))
        if self.started:
            self._listener.wait_in_line()
            host, port = self._listener.getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
            arithmetic = self._service.engine.llm.engine.runner.loaded.arithmetic
            log("listening", {"url": url, "model": self._service.settings.model_name, "arithmetic": arithmetic})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the answers that are still sent. Whoever does not take his answer is cut off before uvicorn would cancel
        it, and call that a fault."""
        self._hangups.end()
        wait = max(0.0, (self._end or 0.0) + PARTING_SECONDS - monotonic())
        self.config.timeout_graceful_shutdown = ceil(wait + PARTING_SECONDS)
        parting = asyncio.get_running_loop().call_later(wait, self._cut_connections)
        self._last_resort = Timer(wait + PARTING_SECONDS + _HANGING_SECONDS, _end_at_once)
        self._last_resort.daemon = True
        self._last_resort.start()
        try:
            await super().shutdown(sockets)
        finally:
            parting.cancel()

    def _renew(self) -> None:
        if self.should_exit:
            return
        task = asyncio.get_running_loop().create_task(self._renewal.run())
        self._renewing.add(task)  # the loop itself holds no task
        task.add_done_callback(self._renewing.discard)

    def has_ended(self) -> None:
        """Nothing hangs any more."""
        if self._last_resort is not None:
            self._last_resort.cancel()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; whether uvicorn closes its sockets now. Before that nobody would be told why."""
        self._watch()
        if counter % 10 == 0:
            self._listener.forget_closed()
        return await super().on_tick(counter) and self._is_drained()

    def _watch(self) -> None:
        """Log when the engine begins to hang, and when it goes on."""
        hangs = self._service.status == "hanging"
        if hangs != self._hangs:
            self._hangs = hangs
            event = "the engine hangs in a step" if hangs else "the engine goes on"
            log(event, {}, logging.CRITICAL if hangs else logging.WARNING)

    def _is_drained(self) -> bool:
        service, now = self._service, monotonic()
        if self._end is None:
            service.draining, self._end = True, now + service.settings.drain_seconds
            log("ending", {"texts": service.num_texts})
        if now >= self._end and not self._has_cut_off:
            self._has_cut_off = True
            if service.is_busy:
                log("the time to finish is over", {"texts": service.num_texts}, logging.WARNING)
            service.deadlines.end_all()
        return self.force_exit or not service.is_busy or now >= self._end + PARTING_SECONDS

    def _cut_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _end_at_once() -> NoReturn:
    """End the process although its engine's thread does not come to its end. Nobody can end a thread, and whoever looks
    after the process would have to kill it."""
    log("the engine does not come to its end", {}, logging.CRITICAL)
    logging.shutdown()
    os._exit(1)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one would find no handler any more while Python ends
    raise SystemExit(0)


# --- Reads the profile of a running server again, so that a new head drafts without a restart.


class Renewal:
    """Does what SIGHUP asks for. Several signals take turns.

    Args:
        profile: The file that `outrider tune` writes; None where the server was started without one.
    """

    def __init__(self, service: Service, profile: Path | None) -> None:
        self._service, self._profile = service, profile
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Let what the profile says draft from now on. Where it cannot be had, everything stays as it is."""
        async with self._turn:
            try:
                config = await asyncio.to_thread(self._change)
            except OutriderError as error:
                self._service.metrics.read_profile("refused")
                log("the profile cannot be used, and drafts stay as they are", {"problem": str(error)}, logging.ERROR)
            else:
                self._service.metrics.read_profile("used")
                log("the profile was read", {"speculation": config.as_mapping()})

    def _change(self) -> SpeculationConfig:
        llm = self._service.engine.llm
        if self._profile is None:
            remedy = "Start it with --profile FILE."
            raise InvalidParameterError("profile", None, "the server was started without one", remedy)
        profile, config = read_profile(self._profile)
        found = llm.identity
        profile.check_model(str(self._profile), found)
        misfit = profile.misfit(found)
        if misfit:
            problem = f"it was made for other circumstances ({misfit})"
            raise ContradictionError("profile", str(self._profile), problem, "Run outrider tune here.")
        self._service.draft_with(config)
        return self._service.allowed.usual

"""uvicorn's HTTP/1.1, with error objects, times and a limit for headers, and answers for clients that closed their side."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import sys
from time import monotonic
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.server.connections import ASKED, SILENT, UPLOADING, Listener, Place
from outrider.server.errors import ApiError, log
from outrider.server.lifecycle import BEGAN
from outrider.server.requests import MAX_HEADERS, check_headers
from outrider.server.settings import ServerSettings
from outrider.server.wire import encoded, error_body, naming_headers

#: A client that has closed its side is asked for a sign of life after so long, and then each time after twice as long.
_FIRST_PROBE_SECONDS = 0.1
_MOST_PROBE_SECONDS = 2.0
#: How much of a request tells which API's errors its client reads.
_LINE_BYTES = 64


class Protocol(H11Protocol):
    """uvicorn's protocol, with four differences.

    What is no HTTP gets an error object. Headers have a limit, also where they come all at once. They have to come in time,
    and so does the rest of a body whose request was answered before. And a client that has sent
    its whole request may close its side of the connection and still read the answer. The system tells the same of a client
    that has gone. So such a client is sent something that means nothing, again and again; where nobody reads any more, the
    system of the client answers with a reset.
    """

    def __init__(self, *args: Any, listener: Listener, settings: ServerSettings, **more: Any) -> None:
        super().__init__(*args, **more)
        self._listener, self._settings = listener, settings
        self._place: Place | None = None
        self._began: float | None = None
        self._line = b""  # what the request that is coming begins with
        self._clock: asyncio.TimerHandle | None = None
        self._checked = _Connection(h11.SERVER, MAX_HEADERS)
        self.conn = self._checked
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._place = self._listener.place(transport.get_extra_info("socket").fileno())
        if self._place is not None:
            self._place.stage = self._stage
        self._end_in(self._settings.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is no more."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More of a request. Its time begins with its first byte."""
        if self._began is None and not self._is_served:
            self._began = self.loop.time()
            self.app_state = {**self.app_state, BEGAN: self._began}
            self._end_in(self._head_seconds)
        if self._began is not None:
            self._line = (self._line + data)[:_LINE_BYTES]
        super().data_received(data)

    def handle_events(self) -> None:
        """Go on with what has come."""
        super().handle_events()
        if self._is_served or (self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]):
            self._stop_clock()

    @property
    def _is_served(self) -> bool:
        """Tells whether the headers of a request are here, and its answer is not whole."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _head_seconds(self) -> float:
        limits = (self._settings.header_seconds, self._settings.request_seconds)
        return min(limit for limit in limits if limit is not None)

    def _stage(self) -> int:
        if not self._is_served:
            return SILENT
        return UPLOADING if self.cycle.more_body else ASKED

    def _end_in(self, seconds: float) -> None:
        """End the connection in so many seconds, unless it is to end earlier or what is waited for has come."""
        end = self.loop.time() + seconds
        if self._clock is None or self._clock.when() > end:
            self._stop_clock(keeps_beginning=True)
            self._clock = self.loop.call_at(end, self._out_of_time)

    def _stop_clock(self, *, keeps_beginning: bool = False) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if not keeps_beginning:
            self._began, self._line = None, b""

    def _out_of_time(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state is not h11.IDLE or self._began is None:  # nothing has come, or the rest of a body has not
            self.transport.close()
            return
        seconds = self._head_seconds
        option = "--header-seconds" if seconds == self._settings.header_seconds else "--request-seconds"
        problem = f"the headers of the request did not come within {seconds:g} seconds. The option {option} allows more"
        self._refuse(ApiError(408, problem, code="request_timeout"))

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. Returns whether the connection stays open for the answer."""
        waits = self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)
        if not waits or self.scheme == "https":  # asyncio keeps no half of a connection with TLS
            return False
        if not self._half_closed:
            self._half_closed = True
            self.loop.call_later(_FIRST_PROBE_SECONDS, self._probe, _FIRST_PROBE_SECONDS)
        return True

    def on_response_complete(self) -> None:
        """An answer has gone. A client that sends no more has no further requests but those that are here already."""
        super().on_response_complete()
        if self._place is not None:
            self._place.since = monotonic()
        if self._half_closed and self.cycle.response_complete and not self.transport.is_closing():
            self.timeout_keep_alive_handler()

    def _probe(self, seconds: float) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self.flow.write_paused:
            self.transport.write(self._checked.nothing())
        later = min(2 * seconds, _MOST_PROBE_SECONDS)
        self.loop.call_later(later, self._probe, later)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be read, and close the connection."""
        self._refuse(_protocol_refusal(sys.exception(), msg))

    def _refuse(self, found: ApiError) -> None:
        name, path = secrets.token_hex(12), _path(self._line)
        log("a request cannot be read", {"request_id": name, "status": found.status}, logging.WARNING)
        body = encoded(error_body(found, path, name))
        headers = {"content-type": "application/json", "content-length": str(len(body)), **naming_headers(name, path)}
        lines = [(key.encode(), value.encode()) for key, value in {**headers, "connection": "close"}.items()]
        for event in (h11.Response(status_code=found.status, headers=lines), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Connection(h11.Connection):
    """One that refuses headers beyond the limit and bodies of two lengths, takes whole URLs, and can send what means
    nothing."""

    _sends_events = False

    def next_event(self) -> Any:
        """Returns what the client has sent next."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            try:
                check_headers(event.target, event.headers)
            except ApiError as error:
                raise h11.RemoteProtocolError(str(error), error_status_hint=431) from error
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:  # proxies and servers may disagree where it ends
                raise h11.RemoteProtocolError("it has both Content-Length and Transfer-Encoding")
            return _in_origin_form(event)
        return event

    def send(self, event: Any) -> Any:
        """The bytes of a part of an answer."""
        if isinstance(event, h11.Response):
            kind = next((value for name, value in event.headers if name == b"content-type"), b"")
            self._sends_events = kind.startswith(b"text/event-stream")
        return super().send(event)

    def nothing(self) -> bytes:
        """Bytes that every client passes over: an interim answer before the answer, a comment between events, else none."""
        if self.our_state is h11.SEND_RESPONSE and self.their_http_version != b"1.0":
            return self.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")) or b""
        if self.our_state is h11.SEND_BODY and self._sends_events:
            return self.send(h11.Data(data=b":\n\n")) or b""
        return b""


def _in_origin_form(asked: h11.Request) -> h11.Request:
    """The same request for a path and a query; clients of proxies write a whole URL (RFC 9112, 3.2.2)."""
    url = re.fullmatch(rb"https?://[^/?#]*/?([^#]*)", asked.target, re.IGNORECASE)
    if url is None:
        return asked
    target, version = b"/" + url[1], asked.http_version
    return h11.Request(method=asked.method, headers=asked.headers, target=target, http_version=version)


def _path(line: bytes) -> str:
    """The path in what a request begins with; empty where there is none yet."""
    _, _, target = line.partition(b" ")
    return re.split(rb"[ ?]", target)[0].decode("latin-1")


def _protocol_refusal(error: BaseException | None, usual: str) -> ApiError:
    """Returns what is told of an error of h11, which is being handled where uvicorn refuses a request."""
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
        return ApiError(431, "the headers of the request are too large", code="headers_too_large")
    return ApiError(400, f"the request is no HTTP that can be read ({error or usual})", code="invalid_http")

"""What reaches the server at all: hosts and origins of requests, and HTTP/1.1 itself."""

from __future__ import annotations

import logging
import re
import secrets
import socket
import sys
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.errors import InvalidParameterError
from outrider.server.errors import ApiError, log
from outrider.server.lifecycle import request_id
from outrider.server.requests import MAX_HEADERS, ServerSettings, check_headers
from outrider.server.streams import encoded

# --- Checks the Host and the Origin of requests, so that no page from elsewhere reaches a server through its user's
# browser.
#
# A page may let its own name point to 127.0.0.1 (DNS rebinding). The browser then sends the name of that page as Host,
# so a name that is not this server's is refused. A page may also send a POST anywhere without asking. The browser then
# sends as Origin where the page is from, so an Origin that is not this server's is refused.


#: In place of a name or an origin: all of them.
ANY = "*"
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_PORT = re.compile(r":\d*$")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


class AccessGuard:
    """An application of ASGI that is reached only by requests that may come from where they say they do.

    Args:
        app: The application.
        settings: Which hosts and origins may be named.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the beginning and the end of the server."""
        app = self._app
        if scope["type"] == "http":
            try:
                check_access(Headers(scope=scope), self._settings)
            except ApiError as error:
                app = _refusal(Request(scope), error)
        await app(scope, receive, send)


def _refusal(request: Request, error: ApiError) -> Response:
    name = request_id(request)
    log("a request was refused", {"request_id": name, "status": error.status, "code": error.code}, logging.WARNING)
    return Response(encoded(error.body), error.status, {"x-request-id": name}, "application/json")


def allowed_hosts(listened: str, named: Iterable[str], *, has_keys: bool) -> tuple[str, ...] | None:
    """The hosts that requests may name; None for any.

    Args:
        listened: The address that the server listens at.
        named: Further ones, as the caller has written them.
        has_keys: Whether requests need an API key. A page from elsewhere has none, so hosts are then checked on demand.

    Raises:
        InvalidParameterError: One is no name and no address.
    """
    names = [_checked_host(name) for name in named]
    if ANY in names or (has_keys and not names):
        return None
    return (*names, listened.lower())


def allowed_origins(named: Iterable[str]) -> tuple[str, ...]:
    """The origins whose pages may ask, as the caller has written them.

    Raises:
        InvalidParameterError: One is no origin.
    """
    found = [name.strip().lower().rstrip("/") for name in named]
    for name in found:
        if name != ANY and not _ORIGIN.fullmatch(name):
            remedy = "Use scheme://host or scheme://host:port, like https://chat.example.com, or * for all."
            raise InvalidParameterError("allow_origin", name, "this is no origin of a page", remedy)
    return tuple(found)


def check_access(headers: Headers, settings: ServerSettings) -> None:
    """See that a request may come from where it says it does.

    Raises:
        ApiError: Its Host is not a name of this server, or its Origin is another place.
    """
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not _is_allowed(host, settings.hosts):
        remedy = f"Start it with --allowed-host {_name(host) or 'NAME'} if it is one, or with API keys"
        problem = f"the Host {host!r} is not a name of this server. {remedy}"
        raise ApiError(403, problem, code="host_not_allowed")
    if origin is None or ANY in settings.origins or origin.lower() in settings.origins:
        return
    if not _is_same(origin, host or ""):
        remedy = f"Start it with --allow-origin {origin} if its pages may ask. A proxy before it should pass the Host on"
        problem = f"the Origin {origin!r} is not this server. {remedy}"
        raise ApiError(403, problem, code="origin_not_allowed")


def _checked_host(name: str) -> str:
    found = name.strip().lower().strip("[]")
    if found != ANY and not _NAME.fullmatch(found) and _address(found) is None:
        remedy = "Use a name without scheme and port, like llm.example.com, *.example.com, or an address; * for all."
        raise InvalidParameterError("allowed_host", name, "this is no name of a host", remedy)
    return found


def _name(host: str) -> str:
    """The name or the address in a Host header."""
    return _PORT.sub("", host.lower()).strip("[]").rstrip(".")


def _is_allowed(host: str, hosts: tuple[str, ...] | None) -> bool:
    if hosts is None:
        return True
    name = _name(host)
    address = _address(name)
    if name in hosts or name == "localhost" or (address is not None and address.is_loopback):
        return True
    if any(name.endswith(each[1:]) for each in hosts if each.startswith("*.")):
        return True
    return address is not None and _listens_everywhere(hosts) and _is_local(address)


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _listens_everywhere(hosts: tuple[str, ...]) -> bool:
    return any(name == "" or ((found := _address(name)) is not None and found.is_unspecified) for name in hosts)


def _is_local(address: IPv4Address | IPv6Address) -> bool:
    """Whether it is an address of this machine: others cannot be bound. Addresses come and go, so no list is kept."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def _is_same(origin: str, host: str) -> bool:
    """Whether a page comes from this server. A proxy may speak https in its place, so the scheme does not count."""
    scheme, _, place = origin.lower().partition("://")
    usual = _USUAL_PORTS.get(scheme, "")
    return bool(place) and place.removesuffix(usual) == host.lower().removesuffix(usual)


# --- uvicorn's HTTP/1.1, with error objects, a limit for headers, and answers for clients that closed their side.


#: A client that has closed its side is asked for a sign of life after so long, and then each time after twice as long.
_FIRST_PROBE_SECONDS = 0.1
_MOST_PROBE_SECONDS = 2.0


class Protocol(H11Protocol):
    """uvicorn's protocol, with three differences.

    What is no HTTP gets an error object. Headers have a limit, also where they come all at once. And a client that has sent
    its whole request may close its side of the connection and still read the answer. The system tells the same of a client
    that has gone. So such a client is sent something that means nothing, again and again; where nobody reads any more, the
    system of the client answers with a reset.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._checked = _Connection(h11.SERVER, MAX_HEADERS)
        self.conn = self._checked
        self._half_closed = False

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
        """Answer a request that cannot be read, and close the connection.

        Args:
            msg: What uvicorn would say.
        """
        found, name = _protocol_refusal(sys.exception(), msg), secrets.token_hex(12)
        log("a request cannot be read", {"request_id": name, "status": found.status}, logging.WARNING)
        body = encoded(found.body)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": name}
        lines = [(key.encode(), value.encode()) for key, value in {**headers, "connection": "close"}.items()]
        for event in (h11.Response(status_code=found.status, headers=lines), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Connection(h11.Connection):
    """One that refuses headers beyond the limit, and can send what means nothing."""

    _sends_events = False

    def next_event(self) -> Any:
        """What the client has sent next."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            try:
                check_headers(event.target, event.headers)
            except ApiError as error:
                raise h11.RemoteProtocolError(str(error), error_status_hint=431) from error
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


def _protocol_refusal(error: BaseException | None, usual: str) -> ApiError:
    """What is told of an error of h11, which is being handled where uvicorn refuses a request."""
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
        return ApiError(431, "the headers of the request are too large", code="headers_too_large")
    return ApiError(400, f"the request is no HTTP that can be read ({error or usual})", code="invalid_http")

"""Checks the Host and the Origin of requests, so that no page from elsewhere reaches a server through its user's browser.

A page may let its own name point to 127.0.0.1 (DNS rebinding). The browser then sends the name of that page as Host,
so a name that is not this server's is refused. A page may also send a POST anywhere without asking. The browser then
sends as Origin where the page is from, so an Origin that is not this server's is refused.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.errors import InvalidParameterError
from outrider.server.errors import ApiError, log
from outrider.server.lifecycle import request_id
from outrider.server.settings import ServerSettings
from outrider.server.wire import encoded, error_body

#: In place of a name or an origin: all of them.
ANY = "*"
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_PORT = re.compile(r":\d*$")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


class AccessGuard:
    """An application of ASGI that is reached only by requests that may come from where they say they do."""

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
    return Response(
        encoded(error_body(error, request.url.path, name)), error.status, {"x-request-id": name}, "application/json"
    )


def allowed_hosts(listened: str, named: Iterable[str], *, has_keys: bool) -> tuple[str, ...] | None:
    """The hosts that requests may name; None for any."""
    names = [_checked_host(name) for name in named]
    if ANY in names or (has_keys and not names):
        return None
    return (*names, listened.lower())


def allowed_origins(named: Iterable[str]) -> tuple[str, ...]:
    """The origins whose pages may ask, as the caller has written them."""
    found = [name.strip().lower().rstrip("/") for name in named]
    for name in found:
        if name != ANY and not _ORIGIN.fullmatch(name):
            remedy = "Use scheme://host or scheme://host:port, like https://chat.example.com, or * for all."
            raise InvalidParameterError("allow_origin", name, "this is no origin of a page", remedy)
    return tuple(found)


def check_access(headers: Headers, settings: ServerSettings) -> None:
    """See that a request may come from where it says it does."""
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
    """Tells whether it is an address of this machine: others cannot be bound. Addresses come and go, so no list is kept."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def _is_same(origin: str, host: str) -> bool:
    """Tells whether a page comes from this server. A proxy may speak https in its place, so the scheme does not count."""
    scheme, _, place = origin.lower().partition("://")
    usual = _USUAL_PORTS.get(scheme, "")
    return bool(place) and place.removesuffix(usual) == host.lower().removesuffix(usual)

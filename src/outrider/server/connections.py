"""How many connections there may be, which of them go first where room is short, and a listener that keeps to it."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from outrider.errors import InvalidParameterError
from outrider.server.errors import ApiError, log
from outrider.server.wire import encoded

#: Open files that are never connections: records, pages, weights, and what the libraries open.
RESERVED_FILES = 128
#: More open files than this are never asked of the system, and more connections are never held unless somebody says so.
_MOST_FILES, _MOST_CONNECTIONS = 65_536, 16_384
#: Connections that asyncio accepts before it does anything else. Each takes a file before it can be refused.
ACCEPTED_AT_ONCE = 16
#: What clients wait in before they are accepted.
_WAITING = 2048
#: Errors that mean that there is no file or memory for one more connection.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_file_limit() -> int:
    """Let this process open as many files as it may, and return how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def room_for_connections(files: int, asked: int | None) -> int:
    """Returns how many connections there may be at a time.

    Args:
        asked: What the caller wants; None for as many as there is room for.
    """
    room = max(files - RESERVED_FILES, files // 2)
    if asked is not None and not 1 <= asked <= room:
        remedy = f"Use 1 to {room}, or raise the limit with `ulimit -n`."
        raise InvalidParameterError("max_connections", asked, f"this process may open {files} files", remedy)
    return min(room, _MOST_CONNECTIONS) if asked is None else asked


@dataclass(eq=False)
class Place:
    """A connection."""

    connection: socket.socket  # its socket
    since: float  # when it was accepted, or was last answered
    # What is still to come of its request; None before it is known to the protocol, as within a TLS handshake.
    stage: Callable[[], int] | None = None

    @property
    def is_open(self) -> bool:
        return self.connection.fileno() != -1

    @property
    def rank(self) -> tuple[int, float]:
        """Whoever has the lowest goes first. Those who have said the least go first, and of them the oldest."""
        return (SILENT if self.stage is None else self.stage(), self.since)

    def cut_off(self) -> None:
        """End it; its transport finds out in the next turn of the event loop."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


#: What there is of the request of a connection: not even its headers, no whole body, or all of it.
SILENT, UPLOADING, ASKED = range(3)


class Listener(socket.socket):
    """A socket that accepts as many connections as there may be. It makes room for a new one by cutting off the oldest
    that has sent no request; where there is none, the new one is told so and closed.

    The one that asyncio itself has would, without files, fail 2,048 times in a row, log each, and do so ever again.
    """

    #: Connections at a time.
    most = _MOST_CONNECTIONS
    #: How long a TLS handshake may take.
    handshake_seconds = 30.0
    #: Whether connections begin with TLS. What is no TLS would not be understood there.
    is_tls = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._places: dict[int, Place] = {}
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._is_short = False

    def wait_in_line(self) -> None:
        """Let the system hold more clients than asyncio accepts at once."""
        self.listen(_WAITING)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises BlockingIOError where there is none, or none that there is room for."""
        try:
            found, address = super().accept()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._say_short(error)
            self._make_room()
            self._refuse_with_spare()
            raise BlockingIOError from error
        if len(self._places) >= self.most:
            self.forget_closed()
        if len(self._places) >= self.most and not self._make_room():
            self._say_short(None)
            self._refuse(found)
            raise BlockingIOError
        if len(self._places) <= self.most // 2:
            self._is_short = False
        self._places[found.fileno()] = Place(found, monotonic())
        return found, address

    def place(self, number: int) -> Place | None:
        """The connection whose file has this number."""
        return self._places.get(number)

    def forget_closed(self) -> None:
        """Forget connections that are over, and end those whose TLS handshake takes too long."""
        end = monotonic() - self.handshake_seconds
        for number, place in list(self._places.items()):
            if not place.is_open:
                del self._places[number]
            elif place.stage is None and place.since < end:
                place.cut_off()

    def close(self) -> None:
        """Accept nothing more."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        super().close()

    def _make_room(self) -> bool:
        """Cut off the connection that has said the least, the oldest of them. Whether there was one."""
        number = min(self._places, key=lambda number: self._places[number].rank, default=None)
        if number is None or self._places[number].rank[0] == ASKED:
            return False
        self._places.pop(number).cut_off()
        return True

    def _refuse_with_spare(self) -> None:
        """Take the next connection in place of a spare file and close it; it would wake the event loop for ever."""
        if self._spare is None:
            return
        os.close(self._spare)
        self._spare = None
        try:
            found, _ = super().accept()
            self._refuse(found)
        except OSError:
            pass
        finally:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _refuse(self, connection: socket.socket) -> None:
        with suppress(OSError):
            if not self.is_tls:
                connection.setblocking(False)
                connection.send(_refusal(self.most))
        connection.close()

    def _say_short(self, error: OSError | None) -> None:
        """Once, until there is room again."""
        if not self._is_short:
            self._is_short = True
            facts = {"max_connections": self.most, "problem": None if error is None else str(error)}
            log("there is no room for more connections", facts, logging.ERROR)


def _refusal(most: int) -> bytes:
    problem = f"the server has {most} connections, and --max-connections is as many"
    body = encoded(ApiError(503, problem, code="too_many_connections").body)
    lines = ("HTTP/1.1 503 Service Unavailable", "content-type: application/json", f"content-length: {len(body)}")
    return "\r\n".join([*lines, "retry-after: 1", "connection: close", "", ""]).encode() + body

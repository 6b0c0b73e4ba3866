"""Connections that send nothing, or too slowly, and more of them than there is room for."""

from __future__ import annotations

import errno
import json
import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPResponse

import pytest

from outrider.errors import InvalidParameterError
from outrider.server.connections import ASKED, UPLOADING, Listener, raise_file_limit, room_for_connections
from outrider.server.run import listen
from tests.server.running import Server, running

REQUEST_LINE = b"POST /v1/completions HTTP/1.1\r\n"
HEAD = REQUEST_LINE + b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n"


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = listen("127.0.0.1", 0, 60)
    found.listen()
    found.setblocking(False)
    found.most = 2
    yield found
    found.close()


def client(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.getsockname(), timeout=10)


def accepted(listener: Listener, stack: ExitStack, stage: int | None = None) -> socket.socket:
    """A client whose connection was accepted, and has come to this stage of its request."""
    found = stack.enter_context(client(listener))
    connection = stack.enter_context(listener.accept()[0])
    place = listener.place(connection.fileno())
    assert place is not None
    place.stage = None if stage is None else lambda: stage
    return found


def test_the_one_that_has_said_the_least_goes_first_and_then_the_oldest(listener: Listener) -> None:
    with ExitStack() as stack:
        uploading = accepted(listener, stack, UPLOADING)
        silent = accepted(listener, stack)
        asked = accepted(listener, stack, ASKED)
        assert silent.recv(1) == b""
        accepted(listener, stack)
        assert uploading.recv(1) == b"", "the oldest that has not sent all"
        asked.settimeout(0.05)
        with pytest.raises(TimeoutError):
            asked.recv(1)


def test_where_all_are_being_answered_a_new_one_is_told_so(listener: Listener) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            accepted(listener, stack, ASKED)
        refused = stack.enter_context(client(listener))
        with pytest.raises(BlockingIOError):
            listener.accept()
        told = refused.recv(4096)
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"too_many_connections"' in told
        assert b"--max-connections" in told


def test_places_come_back(listener: Listener) -> None:
    for _ in range(5):
        with ExitStack() as stack:
            for _ in range(2):
                accepted(listener, stack, ASKED)


def test_an_error_of_accept_is_logged_once_and_wakes_nobody_again(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many clients as there are wait in vain where the process has no file left, and each is closed."""

    def fail(_: socket.socket) -> tuple[socket.socket, object]:
        if listener._spare is None:
            return accept(listener)
        raise OSError(errno.EMFILE, "too many open files")

    accept = socket.socket.accept
    with ExitStack() as stack, caplog.at_level(logging.ERROR, "outrider.server"):
        waiting = [stack.enter_context(client(listener)) for _ in range(3)]
        monkeypatch.setattr(socket.socket, "accept", fail)
        for each in waiting:
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert each.recv(4096).startswith(b"HTTP/1.1 503 ")
        monkeypatch.undo()
        with pytest.raises(BlockingIOError):
            accept(listener)
    assert [record.getMessage() for record in caplog.records] == ["there is no room for more connections"]


def test_a_handshake_has_an_end(listener: Listener) -> None:
    listener.handshake_seconds = 0.0
    with ExitStack() as stack:
        silent = accepted(listener, stack)
        listener.forget_closed()
        assert silent.recv(1) == b""


def test_connections_leave_files_for_everything_else() -> None:
    assert room_for_connections(1024, None) == 896
    assert room_for_connections(64, None) == 32
    assert room_for_connections(10**6, None) == 16_384
    assert room_for_connections(10**6, 20_000) == 20_000
    for asked in (897, 0, -1):
        with pytest.raises(InvalidParameterError, match="1 to 896"):
            room_for_connections(1024, asked)


def test_as_many_files_as_the_system_grants() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = ("--header-seconds", "2", "--body-seconds", "1", "--max-connections", "20")
    with running("--method", "off", *limits) as server:
        yield server


def connected(server: Server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def told(connection: socket.socket, begun: bytes) -> bytes:
    """What a client is told that sends this, and then a byte now and again."""
    found = b""
    connection.sendall(begun)
    connection.settimeout(0.2)
    with suppress(ConnectionError):
        while True:
            try:
                piece = connection.recv(4096)
            except TimeoutError:
                connection.sendall(b" ")
                continue
            if not piece:
                break
            found += piece
    return found


@pytest.mark.parametrize(
    ("begun", "option"),
    [(b"POST /v1/comp", "--header-seconds"), (REQUEST_LINE + b"x: ", "--header-seconds"), (HEAD + b"{", "--body-seconds")],
    ids=["request line", "headers", "body"],
)
def test_a_request_that_does_not_come_in_time_is_told_408(server: Server, begun: bytes, option: str) -> None:
    with connected(server) as connection:
        start = time.monotonic()
        head, _, body = told(connection, begun).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout"
    assert option in error["message"]
    assert 0.5 < time.monotonic() - start < 15


def test_a_second_request_of_a_connection_has_its_own_time(server: Server) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    whole = HEAD.replace(b"900", str(len(body)).encode()) + body
    with connected(server) as connection:
        for _ in range(3):
            time.sleep(1)
            connection.sendall(whole)
            answer = HTTPResponse(connection)
            answer.begin()
            assert (answer.status, bool(answer.read())) == (200, True)
        assert told(connection, REQUEST_LINE).startswith(b"HTTP/1.1 408 ")


def test_the_rest_of_a_body_that_was_answered_before_has_an_end(server: Server) -> None:
    """A route that reads no body answers at once, and its client may not go on for ever."""
    with connected(server) as connection:
        assert told(connection, HEAD.replace(b"/v1/completions", b"/nowhere")).startswith(b"HTTP/1.1 404 ")


def test_silent_connections_keep_nobody_out(server: Server) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(server)) for _ in range(60)]
        assert server.get("/health").status_code == 200
        assert all(each.recv(1) == b"" for each in silent)
    assert len([line for line in server.lines if line.get("level") == "error"]) <= 1


def test_the_time_of_a_request_begins_with_its_first_byte() -> None:
    with running("--method", "off", "--request-seconds", "1") as server:
        for begun in (b"POST /v1/comp", HEAD + b"{"):
            with connected(server) as connection:
                answer = told(connection, begun)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"--request-seconds" in answer

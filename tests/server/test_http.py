"""What bytes may come: from clients that close their side, in huge headers, in other encodings, as endless numbers."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from tests.server.running import Server, running

LONG = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
ENDLESS = {**LONG, "max_tokens": 1500, "n": 8, "temperature": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--method", "off", "--max-body-values", "1000") as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(server: Server) -> Iterator[None]:
    yield
    assert server.rests()


def request(body: Any, path: str = "/v1/completions", **headers: str) -> bytes:
    written = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(written)}",
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + written


def connected(server: Server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def answer_to(server: Server, sent: bytes) -> tuple[int, bytes]:
    with connected(server) as connection:
        connection.sendall(sent)
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read()


def test_an_upgrade_to_web_sockets_is_an_ordinary_request(server: Server) -> None:
    """uvicorn would take it where a package for it is installed, and answer without the form of errors."""
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    upgrade["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    status, body = answer_to(server, request({"prompt": "x", "max_tokens": 1}, **upgrade))
    assert (status, json.loads(body)["object"]) == (200, "text_completion")
    status, body = answer_to(server, request({}, "/nope", **upgrade))
    assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("fields", [{"prompt": "x", "max_tokens": 2, "temperature": 0}, LONG], ids=["short", "long"])
def test_a_client_that_closes_its_side_gets_its_answer(server: Server, fields: dict[str, Any]) -> None:
    want = server.post("/v1/completions", fields).json()["choices"]
    with connected(server) as connection:
        connection.sendall(request(fields))
        connection.shutdown(socket.SHUT_WR)
        answer = HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["choices"]) == (200, want)
        assert rest(connection) == b"", "the connection ends with the answer"


def test_it_gets_its_stream_too(server: Server) -> None:
    want = server.post("/v1/completions", LONG).json()["choices"][0]["text"]
    with connected(server) as connection:
        connection.sendall(request({**LONG, "stream": True}))
        connection.shutdown(socket.SHUT_WR)
        answer = HTTPResponse(connection)
        answer.begin()
        events = [line.removeprefix(b"data: ") for line in answer.read().split(b"\n\n") if line not in (b"", b":")]
    assert events.pop() == b"[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == want


def test_it_gets_all_answers_that_it_asked_for(server: Server) -> None:
    asked = request({"prompt": "x", "max_tokens": 1})
    with connected(server) as connection:
        connection.sendall(asked + asked + asked)
        connection.shutdown(socket.SHUT_WR)
        assert rest(connection).count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_closes_both_sides_has_left(server: Server, streamed: bool) -> None:
    """The system tells the same of it at first. Eight texts of 1,500 tokens would take many seconds."""
    written = server.metric("vllm:generation_tokens_total")
    with connected(server) as connection:
        connection.sendall(request({**ENDLESS, "stream": streamed}))
        connection.shutdown(socket.SHUT_WR)
        server.busy()
    assert server.rests()
    assert server.metric("vllm:generation_tokens_total") < written + 6000


def test_a_request_that_is_cut_off_gets_no_answer(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(request(LONG)[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert rest(connection) == b""


@pytest.mark.parametrize("headers", [{"x": "y" * 70_000}, {f"x{i}": "y" * 100 for i in range(650)}], ids=["one", "many"])
def test_headers_beyond_the_limit_are_refused_however_they_come(server: Server, headers: dict[str, str]) -> None:
    asked = request({"prompt": "x", "max_tokens": 1}, **headers)
    status, body = answer_to(server, asked)
    assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
    status, body = answer_to(server, asked.replace(b"/v1/completions", b"/v1/messages?beta=true"))
    told = json.loads(body)
    assert (status, told["type"], told["error"]["details"]) == (431, "error", {"error_code": "headers_too_large"})
    assert len(told["request_id"]) == 24


def test_headers_up_to_the_limit_are_taken(server: Server) -> None:
    assert answer_to(server, request({"prompt": "x", "max_tokens": 1}, x="y" * 60_000))[0] == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("size", [1, 20_000])
def test_json_is_utf_8(server: Server, encoding: str, size: int) -> None:
    """In another encoding the values of a body would stand between other bytes, and could not be counted unread."""
    body = json.dumps({"prompt": [0x2C2C] * size, "max_tokens": 1}).encode(encoding)
    response = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 413)
    assert response.json()["error"]["code"] in ("invalid_json", "body_too_large")


def test_a_mark_of_utf_8_may_stand_before_a_body(server: Server) -> None:
    body = b"\xef\xbb\xbf" + b'{"prompt": "x", "max_tokens": 1}'
    response = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize("prompt", [[-1], [5, -1], [2**70], [[5], [-2]], [10**6], [2**31]])
@pytest.mark.parametrize("echo", [True, False])
def test_token_ids_that_there_are_not(server: Server, prompt: Any, echo: bool) -> None:
    response = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "echo": echo})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert "outside the vocabulary" in response.json()["error"]["message"]


NUMBERS = ("n", "max_tokens", "seed", "top_k", "min_tokens", "priority", "logprobs", "temperature", "stop_token_ids")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("digits", [101, 4300, 4301])
def test_numbers_of_many_digits(server: Server, name: str, digits: int) -> None:
    number = "-" * (name == "priority") + "9" * digits
    written = f"[{number}]" if name == "stop_token_ids" else number
    body = f'{{"prompt": ["x", "y"], "max_tokens": 1, "{name}": {written}}}'.encode()
    response = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] in ("invalid_value", "invalid_json")


def suggestion(server: Server, path: str) -> str:
    response = server.get(path)
    assert response.status_code == 404
    return str(response.json()["error"]["message"].partition("Not Found")[2])


@pytest.mark.parametrize("path", ["/v1/", "/v1", "/v1/chat", "/v1/chat/", "/health/", "/v1/completion", "/metric", "/zzz"])
def test_a_path_that_is_suggested_is_there(server: Server, path: str) -> None:
    said = suggestion(server, path)
    assert bool(said) == (path != "/zzz")
    for found in re.findall(r"/[a-z0-9_/]+", said):
        assert server.get(found).status_code in (200, 405), found


def test_what_is_below_a_path_is_told(server: Server) -> None:
    found = "/v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/models"
    assert suggestion(server, "/v1/") == f". Below it there are {found}"
    assert suggestion(server, "/health/") == ". Did you mean /health?"


HABITS = {"metadata": {"a": "b"}, "session_id": "s", "service_tier": "flex", "prompt_cache_key": "k", "verbosity": "low"}


@pytest.mark.parametrize("streamed", [False, True])
def test_fields_that_change_no_text_are_passed_over_with_a_warning(server: Server, streamed: bool) -> None:
    body = {"prompt": "x", "max_tokens": 2, "temperature": 0, "stream": streamed}
    plain, found = server.post("/v1/completions", body), server.post("/v1/completions", {**body, **HABITS})
    assert found.status_code == 200, found.text
    assert found.headers["x-ignored-fields"] == ", ".join(sorted(HABITS))
    assert "x-ignored-fields" not in plain.headers
    name = found.headers["x-request-id"]
    line = server.logged(request_id=name, event="fields of a request were ignored")
    assert (line["level"], line["fields"]) == ("warning", sorted(HABITS))
    if not streamed:
        assert found.json()["choices"] == plain.json()["choices"]
    assert "x-ignored-fields" not in server.post("/v1/completions", {**body, "metadata": None}).headers

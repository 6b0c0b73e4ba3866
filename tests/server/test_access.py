"""Who reaches a server: names that are its own, pages that it knows, and bodies that say that they are JSON."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from outrider.errors import InvalidParameterError
from outrider.server.access import allowed_hosts, allowed_origins
from tests.server.running import CLIENT, Server, running

ASKED = {"prompt": "x", "max_tokens": 1}
PATHS = ("/", "/learn", "/health", "/metrics", "/v1/models", "/nothing")
FRIEND = "https://chat.example.com"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """As it is started without options: at 127.0.0.1, without keys."""
    with running("--method", "off") as server:
        yield server


@pytest.fixture(scope="module")
def everywhere() -> Iterator[Server]:
    """At all addresses of the machine, under names of its own, for the pages of a friend."""
    names = ("--allowed-host", "llm.example.com", "--allowed-host", "*.inside.example", "--allow-origin", FRIEND)
    with running("--method", "off", "--host", "0.0.0.0", *names) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        yield server


def status(server: Server, host: str, path: str = "/v1/completions") -> int:
    port = server.url.rpartition(":")[2]
    headers = {"host": host.replace("PORT", port)}
    found = server.post(path, ASKED, headers=headers) if path == "/v1/completions" else server.get(path, headers=headers)
    if found.status_code == 403:
        assert found.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-host" in found.json()["error"]["message"]
        assert len(found.headers["x-request-id"]) == 24
    return found.status_code


@pytest.mark.parametrize(
    "host", ["127.0.0.1:PORT", "localhost:PORT", "LocalHost", "localhost.:80", "127.0.0.9", "[::1]:PORT", "[::1]"]
)
def test_names_of_the_loopback_are_answered(server: Server, host: str) -> None:
    assert status(server, host) == 200


FOREIGN = ("evil.example", "evil.example:PORT", "127.0.0.1.evil.example", "localhost.evil.example", "evil-localhost", "")
ODD = (
    "203.0.113.7",
    "10.0.0.1:PORT",
    "0.0.0.0:PORT",
    "[2001:db8::1]:PORT",
    "evil.example:127.0.0.1",
    "localhost:evil",
    "*",
)


@pytest.mark.parametrize("host", [*FOREIGN, *ODD])
def test_other_names_are_refused(server: Server, host: str) -> None:
    assert status(server, host) == 403


def test_every_path_is_guarded(server: Server) -> None:
    assert {path: status(server, "evil.example", path) for path in PATHS} == dict.fromkeys(PATHS, 403)
    assert {path: status(server, "localhost", path) for path in PATHS} == {**dict.fromkeys(PATHS, 200), "/nothing": 404}


def test_what_is_refused_for_its_host_starts_no_work(server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    assert status(server, "evil.example") == 403
    assert server.metric("vllm:generation_tokens_total") == before
    server.logged(code="host_not_allowed")


def test_all_addresses_of_the_machine_where_it_listens_at_all(everywhere: Server) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; it only finds the address that would be sent from
        except OSError:
            pytest.skip("the machine has no address beside the loopback's")
        own = probe.getsockname()[0]
    assert status(everywhere, own) == status(everywhere, f"{own}:PORT") == 200
    assert status(everywhere, "localhost:PORT") == status(everywhere, "0.0.0.0:PORT") == 200
    assert status(everywhere, "203.0.113.7") == status(everywhere, "evil.example") == 403


def test_allowed_names(everywhere: Server) -> None:
    assert status(everywhere, "llm.example.com") == status(everywhere, "LLM.example.com.:443") == 200
    assert status(everywhere, "a.inside.example") == status(everywhere, "a.b.inside.example:8000") == 200
    assert status(everywhere, "inside.example") == status(everywhere, "x.llm.example.com") == 403
    assert status(everywhere, "notinside.example") == 403


def test_keys_are_enough(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann: secret\n", "utf-8")
    with running("--method", "off", "--api-key-file", str(keys)) as server:
        headers = {"host": "llm.example.com", "authorization": "Bearer secret"}
        assert server.post("/v1/completions", ASKED, headers=headers).status_code == 200
        assert server.post("/v1/completions", ASKED, headers={"host": "llm.example.com"}).status_code == 401


def from_page(server: Server, origin: str, **headers: str) -> httpx.Response:
    return server.post("/v1/completions", ASKED, headers={"origin": origin, **headers})


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1", FRIEND, ""])
def test_pages_from_elsewhere_are_refused(server: Server, origin: str) -> None:
    response = from_page(server, origin)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "--allow-origin" in response.json()["error"]["message"]
    assert "access-control-allow-origin" not in response.headers


def test_its_own_pages_may_ask(server: Server) -> None:
    assert from_page(server, server.url).status_code == 200
    own = {"host": "localhost"}
    assert from_page(server, "http://localhost", **own).status_code == 200
    assert from_page(server, "https://localhost:443", **own).status_code == 200, "behind a proxy that speaks https"
    assert from_page(server, "http://localhost:443", **own).status_code == 403


def test_pages_of_allowed_origins_may_ask_and_read(everywhere: Server) -> None:
    response = from_page(everywhere, FRIEND)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == FRIEND
    assert from_page(everywhere, "https://other.example.com").status_code == 403
    asks = {
        "origin": FRIEND,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = CLIENT.options(f"{everywhere.url}/v1/chat/completions", headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == FRIEND
    assert "authorization" in answer.headers["access-control-allow-headers"]
    foreign = CLIENT.options(f"{everywhere.url}/v1/chat/completions", headers={**asks, "origin": "https://evil.example"})
    assert foreign.status_code == 403


@pytest.mark.parametrize(
    ("kind", "want"),
    [("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("application/problem+json", 200)]
    + [(kind, 415) for kind in ("text/plain", "text/plain;application/json", "application/x-www-form-urlencoded")]
    + [("multipart/form-data", 415), ("application/jsonp", 415), ("", 415), (None, 415)],
)
def test_json_says_that_it_is(server: Server, kind: str | None, want: int) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = server.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert response.status_code == want, response.text
    if want == 415:
        assert response.json()["error"]["code"] == "unsupported_content_type"
        assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(("coding", "want"), [("identity", 200), ("gzip", 415), ("br, gzip", 415)])
def test_a_body_is_not_compressed(server: Server, coding: str, want: int) -> None:
    headers = {"content-type": "application/json", "content-encoding": coding}
    response = server.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert response.status_code == want, response.text
    if want == 415:
        error = response.json()["error"]
        assert error["code"] == "unsupported_content_encoding"
        assert repr(coding) in error["message"]


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "a/b", "", "a b", "*.*", "a.*", "[::1]:80"])
def test_what_is_no_host_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(InvalidParameterError, match="allowed_host"):
        allowed_hosts("127.0.0.1", [name], has_keys=False)


@pytest.mark.parametrize("name", ["a.example", "https://", "https://a.example/path", "https://u@a.example", "null", ""])
def test_what_is_no_origin_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(InvalidParameterError, match="allow_origin"):
        allowed_origins([name])


def test_a_star_allows_all() -> None:
    assert allowed_hosts("127.0.0.1", ["*"], has_keys=False) is None
    assert allowed_hosts("127.0.0.1", ["a"], has_keys=True) == ("a", "127.0.0.1"), "named hosts hold with keys, too"
    assert allowed_origins(["*", "https://A.example/"]) == ("*", "https://a.example")

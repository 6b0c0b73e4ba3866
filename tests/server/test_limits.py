"""Keys, limits, and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.errors import InvalidParameterError
from outrider.server.errors import ApiError
from outrider.server.run import listen
from outrider.server.tenants import ApiKeys, Meter, TenantLimits
from tests.server.running import Server, running
from tests.waiting import wait_until
from tests.warm import warm_python

ENDLESS = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
ANN, BOB = {"authorization": "Bearer first"}, {"authorization": "Bearer third"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(
        "# who may ask\nann: first\nann: second\nbob: third\n"
        "one: fourth max_concurrent=1\npoor: fifth tokens_per_minute=40\nslow: sixth tokens_per_minute=40\n",
        "utf-8",
    )
    limits = ("--max-num-seqs", "2", "--max-queue", "1", "--max-n", "3", "--max-body-bytes", "2000")
    with running("--api-key-file", str(keys), *limits, "--served-model-name", "small") as server:
        yield server


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer nobody"}, {"authorization": "Basic first"}])
def test_without_a_key_nothing_is_written(server: Server, headers: dict[str, str]) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        response = server.post(path, body, headers=headers)
        assert response.status_code == 401
        key = headers.get("authorization", "").removeprefix("Bearer ")
        assert response.json()["error"]["code"] == ("invalid_api_key" if key == "nobody" else "missing_api_key")
    assert server.get("/v1/models", headers=headers).status_code == 401
    assert server.get("/health", headers=headers).status_code == 200


def test_each_tenant_has_a_prefix_cache_of_its_own(server: Server) -> None:
    body = {"prompt": "def parse(line):\n    " + "x = 1\n    " * 20, "max_tokens": 2}

    def cached(key: str) -> int:
        response = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("first") == 0
    assert cached("second") > 0, "two keys of one tenant"
    assert cached("third") == 0
    assert cached("third") > 0


@contextmanager
def writing(server: Server, headers: dict[str, str], tenant: str, count: int) -> Iterator[None]:
    """So many long texts of a tenant are written or wait meanwhile; their clients leave at the end."""
    with ExitStack() as streams:
        for _ in range(count):
            streams.enter_context(server.stream("/v1/completions", {**ENDLESS, "stream": True}, headers=headers))
        assert server.metric("outrider:tenant_texts", f'tenant="{tenant}"') == count
        yield
    assert server.rests()


def test_a_full_queue_refuses_and_says_when_to_come_back(server: Server) -> None:
    with writing(server, ANN, "ann", 3):  # two at a time, and one waits
        full = server.post("/v1/completions", {"prompt": "x"}, headers=ANN)
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(full.headers["retry-after"]) >= 1
    assert server.post("/v1/completions", {"prompt": "x"}, headers=ANN).status_code == 200, "places come back"


def test_a_full_queue_of_one_tenant_is_not_anothers(server: Server) -> None:
    with writing(server, ANN, "ann", 3):
        assert server.post("/v1/completions", {"prompt": "x"}, headers=ANN).status_code == 429
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers=BOB).status_code == 200


def test_a_key_has_its_own_number_of_texts_and_its_own_rate(server: Server) -> None:
    one, poor = {"authorization": "Bearer fourth"}, {"authorization": "Bearer fifth"}
    with writing(server, one, "one", 1):
        refused = server.post("/v1/completions", {"prompt": "x"}, headers=one)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limit")
    assert server.post("/v1/completions", {"prompt": "x", "n": 2}, headers=one).status_code == 400
    for body, streamed in (({**ENDLESS, "max_tokens": 60}, False), ({**ENDLESS, "max_tokens": 60}, True)):
        key = poor if not streamed else {"authorization": "Bearer sixth"}
        assert server.post("/v1/completions", {**body, "stream": streamed}, headers=key).status_code == 200
        response = server.post("/v1/completions", {"prompt": "x"}, headers=key)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "token_rate_limit")
        assert 0 < int(response.headers["retry-after"]) <= 40, "some 21 tokens over, at 40 a minute"


def test_what_tenants_use_is_counted(server: Server) -> None:
    def count(name: str, *labels: str) -> float:
        return server.metric(f"outrider:tenant_{name}", 'tenant="bob"', *labels)

    texts, tokens, requests = count("texts"), count("tokens_total"), count("requests_total", 'status="200"')
    found = server.post("/v1/completions", {"prompt": "x", "max_tokens": 7, "ignore_eos": True}, headers=BOB).json()
    assert server.post("/v1/completions", {"prompt": "x", "top_p": 7}, headers=BOB).status_code == 400
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 401
    assert texts == count("texts") == 0
    assert count("tokens_total") - tokens == found["usage"]["total_tokens"]
    assert count("requests_total", 'status="200"') - requests == 1
    assert count("requests_total", 'status="400"') >= 1
    lines = server.get("/metrics").text.splitlines()
    tenants = {line.partition('tenant="')[2].partition('"')[0] for line in lines if "tenant=" in line}
    assert tenants <= {"ann", "bob", "one", "poor", "slow"}, "and not what a request says"


def test_refused_requests_give_their_places_back(server: Server) -> None:
    for _ in range(5):
        assert server.post("/v1/completions", {"prompt": "x", "top_p": 7, "n": 2}, headers=ANN).status_code == 400
        bad = {"prompt": "x", "stream": True, "guided_regex": "(", "n": 2}
        assert server.post("/v1/completions", bad, headers=ANN).status_code == 400
    for _ in range(5):
        with server.stream("/v1/completions", {**ENDLESS, "stream": True, "n": 2}, headers=BOB):
            pass  # left before the first event is read
        assert server.rests()
    assert server.post("/v1/completions", {"prompt": "x", "n": 3}, headers=ANN).status_code == 400, "two sequences run"
    assert server.post("/v1/completions", {"prompt": ["x"] * 3}, headers=ANN).status_code == 200


def test_too_much_is_refused(server: Server) -> None:
    response = server.post("/v1/completions", {"prompt": "x" * 3000}, headers=ANN)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    kind = {**ANN, "content-type": "application/json"}
    chunked = server.post("/v1/completions", content=iter([b"x" * 1000] * 3), headers=kind)
    assert chunked.status_code == 413
    assert server.post("/v1/completions", {"prompt": ["x"] * 4}, headers=ANN).status_code == 400
    huge = {**ANN, "x-request-id": "y" * 200_000}
    with suppress(httpx.TransportError):  # the server need not read to the end what it refuses
        assert server.get("/v1/models", headers=huge).status_code in (400, 431)
    for length in ("-1", "one", "99999999999999999999999"):
        lied = _raw(
            server, f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first\r\ncontent-length: {length}"
        )
        assert lied.split(b" ")[1] in (b"400", b"413"), lied
    assert server.get("/v1/models", headers=ANN).json()["data"][0]["id"] == "small"


def test_a_client_that_leaves_in_the_middle_of_its_request_disturbs_nobody(server: Server) -> None:
    with socket.create_connection(_address(server)) as half:
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first\r\ncontent-length: 99\r\n\r\n{"
        )
    assert server.rests()
    assert server.post("/v1/completions", {"prompt": "x"}, headers=ANN).status_code == 200
    assert not [line for line in server.lines if line.get("level") == "error"]


def test_the_log_names_tenants_and_no_keys(server: Server) -> None:
    assert server.post("/v1/completions", {"prompt": "x"}, headers=BOB).status_code == 200
    server.logged(tenant="bob")
    assert not [line for line in server.lines if "third" in str(line)]


def test_what_does_not_finish_in_time_is_ended() -> None:
    body = {**ENDLESS, "n": 4}
    with running("--request-seconds", "0.6") as server:
        found = server.post("/v1/completions", body)
        assert (found.status_code, found.json()["error"]["code"]) == (503, "timeout")
        with server.stream("/v1/completions", {**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert '"code":"timeout"' in lines[-2]
        assert lines[-1] == "data: [DONE]"
        assert server.rests()
        server.logged(code="timeout")
        assert not [line for line in server.lines if line.get("level") == "error"], "nothing of the server has failed"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def _address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def _raw(server: Server, head: str) -> bytes:
    with socket.create_connection(_address(server), 30) as plain:
        plain.sendall(head.encode() + b"\r\n\r\n")
        return plain.recv(65536)


def test_a_flood_in_preparing_does_not_starve_another_tenant() -> None:
    flood, quiet = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
    body = {"prompt": "x", "max_tokens": 2}

    async def ask(server: Server) -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            calls = [client.post(f"{server.url}/v1/completions", json=body, headers=flood) for _ in range(20)]
            tasks = [asyncio.create_task(call) for call in calls]
            full = "queue that is full of requests in preparing"
            await asyncio.to_thread(wait_until, lambda: server.get("/ready").status_code == 429, full)
            streamed = {**body, "stream": True, "stop": ["y"]}
            for path, asked in (("/v1/completions", body), ("/v1/completions", streamed), ("/tokenize", {"prompt": "x"})):
                found = await client.post(f"{server.url}{path}", json=asked, headers=quiet)
                assert found.status_code == 200, found.text
            assert not any(task.done() for task in tasks), "none of the flood is prepared yet"
            server.process.send_signal(signal.SIGUSR1)
            return [(await task).status_code for task in tasks]

    keys = {"OUTRIDER_API_KEYS": "flood:first,quiet:second", "OUTRIDER_PLANTED": "a tenant's requests take long to prepare"}
    limits = ("--max-num-seqs", "4", "--max-queue", "16")
    with running(*limits, module="tests.server.broken_server", **keys) as server:
        assert asyncio.run(ask(server)) == [200] * 20
        assert server.rests()


def test_what_is_sent_is_not_held_back() -> None:
    """Otherwise each event waits until the client's system acknowledges the one before."""

    async def accepted() -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            plain = writer.get_extra_info("socket")
            found.set_result(bool(plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        place = listen("127.0.0.1", 0, 60)
        async with await asyncio.start_server(meet, sock=place):
            _, writer = await asyncio.open_connection(*place.getsockname())
            sent_at_once = await found
            writer.close()
        return sent_at_once

    assert asyncio.run(accepted())


# -- without a server --------------------------------------------------------------------------------------------------


def test_keys_come_from_a_file_or_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("ann: one\n\n# nobody\n two \n", "utf-8")
    keys = ApiKeys.of(file)
    assert (keys.tenant("one"), keys.tenant("ann"), keys.tenant(""), keys.tenant("on")) == ("ann", None, None, None)
    own = keys.tenant("two")
    assert own is not None
    assert "two" not in own
    monkeypatch.setenv("OUTRIDER_API_KEYS", "ann:one,three")
    assert ApiKeys.of(None).tenant("one") == "ann"
    monkeypatch.delenv("OUTRIDER_API_KEYS")
    assert not ApiKeys.of(None)


def test_settings_of_a_tenant_stand_behind_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("ann: a== max_concurrent=4\nann: b tokens_per_minute=600\nbob: c weight=2.5\nd weight=2\n", "utf-8")
    keys = ApiKeys.of(file)
    assert keys.limits("ann") == TenantLimits(max_concurrent=4, tokens_per_minute=600)
    assert keys.limits(None) == keys.limits("nobody") == TenantLimits()
    assert keys.weights == {"bob": 2.5, keys.tenant("d"): 2}
    assert (keys.tenant("a=="), keys.tenant("b")) == ("ann", "ann")
    monkeypatch.setenv("OUTRIDER_API_KEYS", "ann:one max_concurrent=3,two")
    assert ApiKeys.of(None).limits("ann").max_concurrent == 3


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("ann: SECRET max_concurrent=0", "max_concurrent=0"),
        ("ann: SECRET max_concurrent=many", "max_concurrent='many'"),
        ("ann: SECRET max_concurrent=1.5", "max_concurrent=1.5"),
        ("ann: SECRET tokens_per_minute=-1", "tokens_per_minute=-1"),
        ("ann: SECRET weight=0", "weight=0"),
        ("ann: SECRET weight=1e999", "weight=inf"),
        ("ann: SECRET max_concurent=3", "Did you mean max_concurrent"),
        ("ann: SECRET fast", "fast"),
        ("ann:", "no key"),
        (": secret", "the tenant has no name"),
        ("bob: SECRET weight=3", "another line of this tenant says 2"),
        ("ann: other", "another line gives this key to bob"),
    ],
)
def test_a_wrong_line_is_named_with_its_field_and_without_its_key(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may ask\n\nbob: other weight=2\n{line}\n", "utf-8")
    with pytest.raises(InvalidParameterError, match=r"api_key_file=.*line 4") as found:
        ApiKeys.of(file)
    assert named in str(found.value)
    assert "SECRET" not in str(found.value)


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def refusal(call: Callable[[], Any]) -> tuple[int, str | None, str | None]:
    with pytest.raises(ApiError) as found:
        call()
    return found.value.status, found.value.code, found.value.headers.get("Retry-After")


def test_texts_at_a_time_and_when_there_will_be_a_place() -> None:
    clock = Clock()
    meter = Meter(TenantLimits(max_concurrent=3), 5, clock)

    def take(count: int) -> None:
        with meter.place(count):
            clock.now += seconds

    seconds = 0.0
    with meter.place(2):
        assert refusal(lambda: take(2)) == (429, "concurrency_limit", "1"), "nothing is known yet"
        take(1)
        assert refusal(lambda: take(4)) == (400, "concurrency_limit", None), "so many never find a place"
    seconds = 10.0
    for _ in range(4):
        take(1)
    with meter.place(3):
        clock.now += 4
        assert refusal(lambda: take(1)) == (429, "concurrency_limit", "7"), "7 ended in 44 seconds"
        assert refusal(lambda: take(2)) == (429, "concurrency_limit", "10"), "none took longer"
        clock.now += 1000
        assert refusal(lambda: take(2)) == (429, "concurrency_limit", "10"), "idle time tells nothing"
    clock.now += 10
    with meter.place(3):  # the last three had their places for 1,004 seconds
        assert refusal(lambda: take(3)) == (429, "concurrency_limit", "60"), "and no client waits longer"
    assert meter.num_texts == 0
    assert refusal(lambda: Meter(TenantLimits(), 2).place(3).__enter__()) == (400, "queue_full", None)


def test_tokens_a_minute_and_when_they_are_paid_off() -> None:
    clock = Clock()
    meter = Meter(TenantLimits(tokens_per_minute=60), 5, clock)
    meter.check_tokens()
    meter.use(60)
    assert refusal(meter.check_tokens) == (429, "token_rate_limit", "1")
    clock.now += 1
    meter.check_tokens()
    meter.use(100)
    status, code, wait = refusal(meter.check_tokens)
    assert (status, code, wait) == (429, "token_rate_limit", "100")
    clock.now += 98
    assert refusal(meter.check_tokens)[2] == "2"
    clock.now += 2
    meter.check_tokens()
    clock.now += 10_000
    meter.use(60)
    assert refusal(meter.check_tokens)[2] == "1", "no more than a minute's tokens are saved up"


@pytest.mark.parametrize("content", [b"", b"# nobody\n", b"\xff"])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InvalidParameterError, match="api_key_file="):
        ApiKeys.of(file)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--api-key-file", "/nowhere"], "--api-key-file"),
        (["--chat-template", "/nowhere"], "--chat-template"),
        (["--host", "256.0.0.1"], "port"),
        (["--max-n", "0"], "--max-n"),
        (["--allow", "nothing"], "method"),
    ],
)
def test_a_server_that_cannot_start_says_why(arguments: list[str], named: str) -> None:
    done = warm_python().run("outrider", "serve", *arguments)
    assert done.returncode == 2
    assert f"{named}=" in done.stderr

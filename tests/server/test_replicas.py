"""Two replicas behind one address, on a real local cluster of Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import LLM, SamplingParams
from outrider.server.pages.pages import BUILT
from tests.server.pages.browser import Watch, browsing
from tests.server.pages.playground import open_playground, run
from tests.server.replicas import engine_pids, kill_all, kill_one, listening_at, replicas
from tests.server.running import Server, running
from tests.server.test_faults import Told, disturb
from tests.server.wire import Connection
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; it comes with outrider[ray]")

PROMPTS = ["def parse(line):\n", "class Reader:\n", "import os\n", "for name in names:\n"]
MODES: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 11}]
MAX_TOKENS = 150
LONG = "import os\n" * 60


@pytest.fixture(scope="module")
def texts() -> list[tuple[dict[str, Any], str]]:
    """Requests, and what the offline API writes for them."""
    with LLM(kv_cache_tokens=4096) as llm:
        asked = [(prompt, {**mode, "max_tokens": MAX_TOKENS}) for prompt in PROMPTS for mode in MODES]
        return [({"prompt": p, **m}, llm.generate(p, SamplingParams(**m))[0].text) for p, m in asked]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--replicas", "2", "--kv-cache-tokens", "16384", "--max-body-bytes", "200000", warm=False) as server:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert [line["books"] for line in server.ended() if line["event"] == "ended"] == [["agree", "agree"]]


async def whole(client: httpx.AsyncClient, server: Server, fields: dict[str, Any]) -> httpx.Response:
    """One answer that is not streamed."""
    return await client.post(f"{server.url}/v1/completions", json=fields)


def test_texts_are_those_of_the_offline_api(server: Server, texts: list[tuple[dict[str, Any], str]]) -> None:
    async def ask() -> tuple[list[Told], list[httpx.Response]]:
        async with httpx.AsyncClient(timeout=120) as client:
            answers = asyncio.gather(*(whole(client, server, fields) for fields, _ in texts))
            streams = await disturb(server.url, [fields for fields, _ in texts], 0, lambda: None)
            return streams, list(await answers)

    streams, answers = asyncio.run(ask())
    for told, answer, (_, text) in zip(streams, answers, texts, strict=True):
        assert (told.text, told.done, told.error) == (text, True, None)
        assert answer.json()["choices"][0]["text"] == text
    assert len(replicas(server)) == 2
    assert all(server.metric("vllm:generation_tokens_total", f'replica="{name}"') > 0 for name in replicas(server))


def test_nothing_listens_beyond_the_loopback(server: Server) -> None:
    """Ray's processes run what they are sent, and all of them are on this machine."""
    found = listening_at(server)
    assert found.keys() == {"127.0.0.1"}, found
    names = " ".join(found["127.0.0.1"])
    assert all(part in names for part in ("ServeReplica:outrider:engine", "ServeReplica:outrider:ingress", "gcs_server"))


def test_who_may_ask_is_checked_before_any_replica(server: Server) -> None:
    for headers, code in (({"host": "evil.example"}, "host"), ({"origin": "http://evil.example"}, "origin")):
        for path in ("/v1/models", "/metrics", "/"):
            found = server.get(path, headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (403, f"{code}_not_allowed")


def test_answers_have_one_id_and_errors_their_usual_form(server: Server) -> None:
    found = server.post("/v1/completions", {"prompt": "x", "temperature": -1})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "temperature")
    for headers in ({}, {"x-request-id": "mine-7"}):
        ids = server.get("/v1/models", headers=headers).headers.get_list("x-request-id")
        assert len(ids) == 1
        assert not headers or ids == ["mine-7"]
    assert server.post("/v1/completions", {"prompt": "x" * 200_001}).status_code == 413
    assert server.get("/nothing").json()["error"]["code"] == "no_such_route"
    assert server.get("/ready").json() == {"status": "ready"}


def test_the_log_tells_that_replicas_start(server: Server) -> None:
    server.logged(running=2)
    events = [line["event"] for line in server.lines]
    assert events[:2] == ["loading", "replicas start"]
    assert events.index("replicas run") < events.index("listening")
    assert max(line.get("running", 0) for line in server.lines) == 2, "and no more"


def test_the_pages_work_through_the_ingress(server: Server) -> None:
    with browsing() as browser:
        page = browser.new_page(reduced_motion="reduce")
        page.set_default_timeout(60_000)
        page.watch = Watch(page)
        open_playground(page, server)
        page.fill("#prompt", "def read(path):\n")
        plain, fast = run(page)
        assert plain["asked"]["speculation"] == "off"
        assert plain["text"] == fast["text"]
        lanes = page.locator(".lane").evaluate_all("all => all.map(e => e.querySelectorAll('.token').length)")
        assert lanes == [len(plain["token_ids"]), len(fast["token_ids"])]
        page.goto(f"{server.url}/learn")
        page.wait_for_selector("#lab-5 .experiment")
        assert page.watch.problems == []
        names = {url.rpartition("/assets/")[2] for url in page.watch.urls if "/assets/" in url}
    assert {"index.html", "learn.html", "digests.json"} == {path.name for path in BUILT.iterdir()} - names
    assert all(server.get(f"/assets/{name}").content == (BUILT / name).read_bytes() for name in names)


def test_a_prompt_goes_where_its_beginning_was_read(server: Server) -> None:
    def cached(number: int, ending: str) -> int:
        body = {"prompt": f"# {number}\n{LONG}{ending}", "max_tokens": 2}
        usage = server.post("/v1/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(number, "") for number in range(8)] == [0] * 8
    assert all(cached(number, ending) > 100 for ending in ("a = 1\n", "b = 2\n") for number in range(8))


def test_a_client_that_leaves_frees_its_replica(server: Server) -> None:
    async def leave() -> None:
        async with Connection(server.url) as connection:
            body = {"prompt": "import os\n", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            answer = await connection.ask("/v1/completions", json.dumps(body).encode())
            await anext(answer.events())
            connection.leave()

    asyncio.run(leave())
    assert server.rests()


@pytest.mark.slow
def test_a_replica_is_killed_under_fifty_streams(server: Server, texts: list[tuple[dict[str, Any], str]]) -> None:
    asked = [(fields, text) for _ in range(7) for fields, text in texts][:50]

    # Long enough to be under way on both replicas when one dies; nothing of them has been sent then.
    long = [{"prompt": f"# {number}\n", "seed": number, "max_tokens": 600, "ignore_eos": True} for number in range(8)]

    async def ask() -> tuple[list[Told], list[httpx.Response]]:
        async with httpx.AsyncClient(timeout=120) as client:
            answers = asyncio.gather(*(whole(client, server, fields) for fields in long))
            streams = await disturb(server.url, [fields for fields, _ in asked], 20, lambda: kill_one(server))
            return streams, list(await answers)

    before = engine_pids(server)
    streams, answers = asyncio.run(ask())
    lost = [told for told in streams if told.error is not None]
    assert 0 < len(lost) < len(streams)
    for told, (_, text) in zip(streams, asked, strict=True):
        assert told.done
        assert told.error is None or (told.status, told.error["code"]) == (200, "replica_lost")
        assert text.startswith(told.text) if told.error else told.text == text
    assert [answer.status_code for answer in answers] == [200] * len(long)
    again = [server.post("/v1/completions", fields) for fields in long]
    assert [_text(answer) for answer in answers] == [_text(answer) for answer in again]
    wait_until(lambda: len(replicas(server)) == 2, "replica in the place of the one that was killed", 600)
    assert len(set(engine_pids(server)) & set(before)) == 1
    assert server.logged(event="a replica was lost")["running"] == 1
    assert server.rests()


@pytest.mark.slow
def test_all_replicas_are_killed_at_once(server: Server) -> None:
    async def ask() -> tuple[list[Told], list[httpx.Response]]:
        async with httpx.AsyncClient(timeout=240) as client:
            answers = asyncio.gather(*(whole(client, server, fields) for fields in long))
            streams = await disturb(server.url, long, len(long), lambda: kill_all(server))
            late = await whole(client, server, long[0])
            return streams, [*await answers, late]

    long = [{"prompt": f"# {number}\n", "seed": number, "max_tokens": 600, "ignore_eos": True} for number in range(4)]
    streams, answers = asyncio.run(ask())
    assert [(told.error or {}).get("code") for told in streams] == ["replica_lost"] * len(streams)
    assert [answer.status_code for answer in answers] == [200] * len(answers), "they wait for replicas that are new"
    wait_until(lambda: len(replicas(server)) == 2, "replicas in the places of those that were killed", 600)
    assert server.rests()


def _text(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.slow
def test_sigterm_lets_requests_finish_and_refuses_new_ones() -> None:
    async def ask(server: Server) -> tuple[Told, httpx.Response]:
        async def end() -> None:
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(lambda: server.logged(event="ending"))
            await asyncio.to_thread(wait_until, lambda: server.get("/ready").status_code == 503, "answer of 503")

        body = {"prompt": "import os\n", "max_tokens": 1500, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=60) as client:
            refused: list[httpx.Response] = []

            async def act() -> None:
                await end()
                refused.append(await whole(client, server, {"prompt": "x"}))

            (told,) = await disturb(server.url, [body], 1, act)
            return told, refused[0]

    with running("--replicas", "1", "--kv-cache-tokens", "4096", warm=False) as server:
        told, refused = asyncio.run(ask(server))
        assert (told.done, told.error) == (True, None)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert server.process.wait(60) == 0
    assert [line["books"] for line in server.lines if line["event"] == "ended"] == [["agree"]]


def test_a_cluster_that_cannot_be_started_is_told_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)  # too long for the path of a socket
    folder.mkdir()
    command = [sys.executable, "-m", "outrider", "serve", "--replicas", "1", "--method", "off", "--port", "0"]
    surroundings = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=surroundings)
    assert done.returncode == 1
    assert "Ray: no cluster can be started here" in done.stderr
    assert "TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr


def test_too_many_replicas_are_refused_before_anything_starts() -> None:
    command = [sys.executable, "-m", "outrider", "serve", "--replicas", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "1000000 replicas" in done.stderr.replace("\n", " ")
    assert "Use --replicas" in done.stderr
    assert "Ray" not in done.stderr

"""SIGHUP: a new head drafts without a restart, texts under way finish with the old one; a broken one changes nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import LLM
from outrider.building import Identity, Profile
from outrider.config import default_model
from outrider.lab.prove.tiny_heads import save_random_heads
from tests.server.running import Server, running
from tests.waiting import wait_until
from tests.warm import warm_python

Write = Callable[..., None]


@pytest.fixture(scope="module")
def identity() -> Identity:
    with LLM(speculation="none", kv_cache_tokens=1024) as llm:
        return llm.identity


@pytest.fixture
def write(identity: Identity, tmp_path: Path) -> Write:
    """Writes the profile."""

    def put(**settings: Any) -> None:
        profile = Profile(identity=identity, speculation=settings, concurrency=1, gain=1.1, measured=False)
        (tmp_path / "profile.json").write_text(profile.model_dump_json(), "utf-8")

    return put


def drafted(server: Server, **more: Any) -> int:
    """The longest draft of a short text."""
    body = {"prompt": "def parse(", "max_tokens": 8, "ignore_eos": True, **more}
    found = server.post("/v1/completions", body).json()["speculation"]
    assert found["method"] == "medusa"
    return len(found["drafted_per_position"])


def renew(server: Server, event: str) -> dict[str, Any]:
    """Send SIGHUP, and wait for what the server says then."""
    before = len(server.lines)
    server.process.send_signal(signal.SIGHUP)
    said = wait_until(lambda: [line for line in server.lines[before:] if line["event"].startswith(event)], event)
    return said[0]


def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_a_new_head_drafts_while_texts_finish_with_the_old_one(write: Write, tmp_path: Path) -> None:
    old, new = (save_random_heads(tmp_path / f"{seed}", default_model("target"), "medusa", seed) for seed in (1, 2))
    write(method="medusa", model=old, num_draft_tokens=2)
    body = {"prompt": "import os", "max_tokens": 200, "ignore_eos": True, "seed": 7}
    with running("--profile", str(tmp_path / "profile.json")) as server:
        assert drafted(server) == 2
        with server.stream("/v1/completions", {**body, "stream": True}) as answer:
            pieces = chunks(answer)
            told = [next(pieces)]
            write(method="medusa", model=new, num_draft_tokens=3)
            assert renew(server, "the profile was read")["speculation"]["model"] == new
            assert server.metric("vllm:num_requests_running") == 1, "the old text goes on"
            assert drafted(server) == 3
            told += pieces
        assert len(told[-1]["speculation"]["drafted_per_position"]) == 2
        plain = server.post("/v1/completions", {**body, "speculation": "off"}).json()["choices"][0]["text"]
        assert "".join(piece["choices"][0]["text"] for piece in told) == plain
        assert server.rests()

        (tmp_path / "1" / "heads.safetensors").write_bytes((tmp_path / "2" / "heads.safetensors").read_bytes()[:-9])
        write(method="medusa", model=old, num_draft_tokens=1)
        assert "heads.safetensors cannot be read" in renew(server, "the profile cannot be used")["problem"]
        write(method="medusa", model=str(tmp_path / "nowhere"))
        assert "nowhere" in renew(server, "the profile cannot be used")["problem"]
        (tmp_path / "profile.json").write_text("{", "utf-8")
        assert "it is not JSON" in renew(server, "the profile cannot be used")["problem"]
        assert drafted(server) == 3
        counts = [server.metric("outrider:profile_reads_total", f'outcome="{each}"') for each in ("used", "refused")]
        assert counts == [1, 3]


def test_a_server_without_a_profile_says_so(tmp_path: Path) -> None:
    with running("--method", "suffix") as server:
        assert "started without one" in renew(server, "the profile cannot be used")["problem"]
        assert server.get("/health").status_code == 200


def test_a_profile_that_is_a_pipe_is_refused_and_the_server_ends(write: Write, tmp_path: Path) -> None:
    write(method="suffix")
    with running("--profile", str(tmp_path / "profile.json")) as server:
        (tmp_path / "profile.json").unlink()
        os.mkfifo(tmp_path / "profile.json")
        assert "no regular file" in renew(server, "the profile cannot be used")["problem"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_a_signal_while_the_model_loads_is_answered_when_it_is_there(write: Write, tmp_path: Path) -> None:
    """From the first line on; the profile that is there when the server listens holds."""
    write(method="suffix")
    process = warm_python().start("outrider", "serve", "--port", "0", "--profile", str(tmp_path / "profile.json"))
    ended = threading.Event()

    def disturb() -> None:
        while not ended.wait(0.05):
            process.send_signal(signal.SIGHUP)

    threading.Timer(0.3, disturb).start()  # until then Python itself starts
    try:
        server = Server(process)
        ended.set()
        server.logged(event="the profile was read")
        assert server.get("/health").status_code == 200
    finally:
        ended.set()
        process.kill()
        process.wait(60)
    server.read_to_the_end()


def test_signals_while_it_ends_change_nothing_of_its_end(tmp_path: Path) -> None:
    with running("--method", "off") as server:
        server.process.send_signal(signal.SIGTERM)
        while server.process.poll() is None:
            server.process.send_signal(signal.SIGHUP)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.002)
        assert server.process.returncode == 0
        assert server.ended()[-1]["event"] == "ended"

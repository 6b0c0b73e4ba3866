"""Where the engine's thread dies nobody waits for it, and everybody is told."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.engine.thread import EngineThread
from outrider.errors import ClosedError, EngineDiedError
from outrider.propose.settings import PLAIN
from outrider.server.app import make_app
from outrider.server.requests import AllowedMethods
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from outrider.server.tenants import ApiKeys

ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture
def llm() -> LLM:
    return LLM(kv_cache_tokens=2048, speculation="none")


def kill(monkeypatch: pytest.MonkeyPatch, after: int = 5) -> None:
    """Have the next engine's thread die after some steps."""
    stock, left = EngineThread.gather, [None] * after

    def gather(self: EngineThread) -> Any:
        if self.serving:
            if not left:
                raise SystemExit("planted")
            left.pop()
        return stock(self)

    monkeypatch.setattr(EngineThread, "gather", gather)


def test_who_waits_is_told_and_later_calls_are_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kill(monkeypatch)

    async def ask() -> list[Any]:
        server = AsyncLLM(llm)
        calls = [server.generate("x", ENDLESS) for _ in range(3)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 120)

    assert [type(found) for found in asyncio.run(ask())] == [EngineDiedError] * 3
    assert not llm.health.alive
    assert llm.health.last_error == "SystemExit('planted')"
    assert "the engine's thread has died" in caplog.text
    for call in (lambda: llm.generate("x"), lambda: llm.stats, lambda: llm.stream("x")):
        with pytest.raises(EngineDiedError):
            call()
    llm.close()
    with pytest.raises(ClosedError):
        llm.generate("x")


def test_a_command_that_comes_too_late_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kill(monkeypatch, after=0)
    with pytest.raises(EngineDiedError):
        llm.generate("x", ENDLESS)
    llm._thread._thread.join(30)
    monkeypatch.setattr(llm._thread, "check", lambda: None)  # as where it dies right behind the check
    with pytest.raises(EngineDiedError):
        llm._thread.call(lambda: None)


def test_health_notices_an_engine_that_hangs(llm: LLM) -> None:
    """It rests for as long as it likes; a step that takes too long is told while it lasts, and no longer."""
    settings = ServerSettings(model_name="m", step_seconds=0.2)
    service = Service(AsyncLLM(llm), settings, AllowedMethods(PLAIN), ApiKeys())
    client = TestClient(make_app(service))
    time.sleep(0.3)
    assert (llm.busy_seconds, client.get("/health").status_code) == (0, 200)
    go_on = threading.Event()
    hangs = threading.Thread(target=lambda: llm.between_steps(lambda engine: go_on.wait(60)))
    hangs.start()
    while llm.busy_seconds < 0.2:
        time.sleep(0.01)
    for path in ("/health", "/ready"):
        assert (client.get(path).status_code, client.get(path).json()["status"]) == (503, "hanging")
    assert "outrider:http_requests" in client.get("/metrics").text, "although the engine does not answer"
    go_on.set()
    hangs.join()
    while llm.busy_seconds:
        time.sleep(0.01)
    assert client.get("/health").json()["status"] == "ok"
    assert "vllm:num_requests_running" in client.get("/metrics").text


def test_health_notices(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(AsyncLLM(llm), ServerSettings(model_name="m"), AllowedMethods(PLAIN), ApiKeys())
    client = TestClient(make_app(service))
    assert (client.get("/health").json()["status"], client.get("/ready").status_code) == ("ok", 200)
    kill(monkeypatch)
    died = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 900, "ignore_eos": True})
    assert (died.status_code, died.json()["error"]["code"]) == (503, "engine_died")
    for path in ("/health", "/ready"):
        assert (client.get(path).status_code, client.get(path).json()["status"]) == (503, "dead")
    assert client.post("/v1/completions", json={"prompt": "x"}).json()["error"]["code"] == "engine_died"

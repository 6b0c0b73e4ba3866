"""The real server, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.waiting import LIMIT, wait_until
from tests.warm import Forked, warm_python

ROOT = Path(__file__).parents[2]
#: One client for all requests: to make one takes longer than most answers. Each request has a connection of its own.
CLIENT = httpx.Client(timeout=LIMIT, limits=httpx.Limits(max_keepalive_connections=0))

#: Every conversation as plain text; it knows tools in Hermes' form, so that a structured output can be one.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}# {{ tool.function.name }}\n{% endfor %}"
    '{# they are called like <tool_call>{"name": ..., "arguments": ...}</tool_call> #}{% endif %}'
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ ending }}"
)


class Server:
    """A server under test.

    Attributes:
        url: Where it listens.
        lines: Its log so far, line by line.
    """

    def __init__(self, process: Forked | subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        most = 3 * LIMIT  # Ray starts two engines, and other tests start processes beside it
        assert self._listening.wait(most), f"it does not listen after {most:.0f} seconds: {self.lines}"
        urls = [line["url"] for line in self.lines if line.get("event") == "listening"]
        assert urls, f"it has ended: {self.lines}"
        (self.url,) = urls

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:  # also of a server that never listens: else a later test is told of it
            for line in lines:
                self.lines.append(json.loads(line) if line.startswith("{") else {"event": line})
                if self.lines[-1]["event"] == "listening":
                    self._listening.set()
        self._listening.set()

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """One request."""
        return CLIENT.post(f"{self.url}{path}", json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        """The same without a body."""
        return CLIENT.get(f"{self.url}{path}", **more)

    def stream(self, path: str, body: Any, **more: Any) -> AbstractContextManager[httpx.Response]:
        """A request whose answer is read as it comes."""
        return CLIENT.stream("POST", f"{self.url}{path}", json=body, **more)

    def metric(self, name: str, *labels: str) -> float:
        """The sum of a metric over the series that have these labels, written name="value"."""
        return _sum(self.get("/metrics").text, name, *labels)

    def memory(self) -> float:
        """Bytes of the process that are in memory."""
        lines = self.get("/metrics").text.splitlines()
        (line,) = (line for line in lines if line.startswith("process_resident_memory_bytes "))
        return float(line.rsplit(" ", 1)[1])

    def rests(self, limit: float = LIMIT) -> bool:
        """Waits until nothing is written, nothing waits and no memory is held."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

        def at_rest() -> bool:
            text = self.get("/metrics").text
            return not any(_sum(text, name) for name in names)

        return wait_until(at_rest, f"rest: {', '.join(names)} are not all 0", limit)

    def logged(self, **facts: Any) -> dict[str, Any]:
        """Waits for a line of the log with these facts; the log comes some time after the answer that it tells of."""

        def line() -> dict[str, Any] | None:
            return next((line for line in list(self.lines) if facts.items() <= line.items()), None)

        found = wait_until(line, f"line of the log with {facts}")
        assert found is not None
        return found

    def busy(self) -> None:
        """Waits until a text is written."""
        wait_until(lambda: self.metric("vllm:num_requests_running"), "text that is written")

    def ended(self) -> list[dict[str, Any]]:
        """The whole log of a process that has ended."""
        self._reader.join(60)
        return self.lines

    def read_to_the_end(self) -> None:
        """Read the rest of the log of a process that has ended."""
        self._reader.join(60)


def _sum(text: str, name: str, *labels: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


def _cold(module: str, *arguments: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    command, surroundings = [sys.executable, "-m", module, *arguments], {**os.environ, **environment}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=surroundings, bufsize=1, cwd=folder
    )


@contextmanager
def running(
    *arguments: str, module: str = "outrider", folder: Path = ROOT, warm: bool = True, **environment: str
) -> Iterator[Server]:
    """A server on a free port, of the embedded pair unless the arguments name another model.

    It is a fork of a process that has imported PyTorch; unless `warm`, it begins with nothing, as a user's server does.
    """
    start = warm_python().start if warm else _cold
    process = start(module, "serve", "--port", "0", *arguments, folder=folder, **environment)
    server = None
    try:
        server = Server(process)
        yield server
    finally:
        process.kill()
        process.wait(60)
        if server is not None:
            server.read_to_the_end()

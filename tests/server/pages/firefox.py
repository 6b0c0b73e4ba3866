"""A headless Firefox as distributions ship it, driven by WebDriver BiDi: Playwright drives only builds of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")


class FirefoxPage:
    """One page.

    Attributes:
        problems: Errors of scripts, and what the console says of errors.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []
        self._ask("session.new", capabilities={})
        self._ask("session.subscribe", events=["log.entryAdded"])
        self._context = self._ask("browsingContext.getTree")["contexts"][0]["context"]

    def open(self, url: str) -> None:
        """Load a page, with all that it loads."""
        self._ask("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def size(self, width: int, height: int) -> None:
        self._ask("browsingContext.setViewport", context=self._context, viewport={"width": width, "height": height})

    def evaluate(self, expression: str) -> Any:
        """The value of an expression."""
        target = {"context": self._context}
        code = f"JSON.stringify({expression})"
        answer = self._ask("script.evaluate", expression=code, target=target, awaitPromise=True, userActivation=True)
        assert answer["type"] == "success", answer
        return json.loads(answer["result"].get("value", "null"))

    def wait_for(self, expression: str) -> None:
        """Until an expression holds."""
        wait_until(lambda: self.evaluate(f"Boolean({expression})"), expression)

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=90))
            if message.get("method") == "log.entryAdded" and message["params"]["level"] == "error":
                self.problems.append(message["params"]["text"])
            if message.get("id") == self._number:
                assert message["type"] == "success", message
                return message["result"]


@contextmanager
def browsing_in_firefox(profile: Path) -> Iterator[FirefoxPage]:
    """A page; the test is skipped where there is no Firefox. The profile is a folder that is its own."""
    if FIREFOX is None:
        pytest.skip("no Firefox is installed: on Debian it is the package firefox-esr")
    client = pytest.importorskip("websockets.sync.client", reason="the package websockets is not installed")
    command = [FIREFOX, "--headless", "--no-remote", "--remote-debugging-port=0", "--profile", str(profile), "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = next(line.split()[-1] for line in process.stderr if line.startswith("WebDriver BiDi listening"))
        with client.connect(f"{address}/session", max_size=None) as socket:
            yield FirefoxPage(socket)
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()

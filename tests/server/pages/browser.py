"""A headless browser, and what it saw of the server's answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: Names of the browser, Debian's first. Playwright's own is not needed.
_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: Windows in which pages are audited, a small phone, a phone, a tablet and a desk, each with the colours that it asks for.
WINDOWS = ((320, "light"), (390, "dark"), (768, "light"), (1440, "dark"))
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: `make browser` installs it on Debian as root")
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        # Root has no sandbox, and a container little shared memory.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """What a page asked for, and what went wrong on it.

    Attributes:
        urls: Of everything that was loaded.
        problems: Errors of scripts, and what the console says of errors.
    """

    def __init__(self, page: Any) -> None:
        self.urls: list[str] = []
        self.problems: list[str] = []
        self._responses: list[Any] = []
        self._answers: list[dict[str, Any]] = []
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("response", self._note)

    def _note(self, response: Any) -> None:
        if response.url.endswith(("/v1/completions", "/v1/chat/completions")):
            self._responses.append(response)

    def answers(self) -> list[dict[str, Any]]:
        """The completions so far, in their order: what was asked, the text of the first choice, its trace, and the
        statistics."""
        waiting, self._responses = self._responses, []  # their bodies are gone when the page is left
        found = [_answer(response) for response in waiting if response.status == 200]
        self._answers += [each for each in found if each is not None]
        return list(self._answers)


def check(axe: Any, page: Any) -> None:
    """No rule of accessibility is broken."""
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def _answer(response: Any) -> dict[str, Any] | None:
    try:
        lines = response.body().decode().split("\n\n")
    except Exception:  # the page has ended it
        return None
    if "data: [DONE]" not in lines:
        return None
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if "trace" in choice]  # a chat opens without
    last = [choice for choice in choices if choice["finish_reason"]]
    return {
        "asked": json.loads(response.request.post_data),
        "text": "".join(_text(choice) for choice in choices if choice["index"] == 0),
        "trace": next(choice["trace"] for choice in last if choice["index"] == 0),
        "traces": [choice["trace"] for choice in last],
        "speculation": next(chunk["speculation"] for chunk in chunks if "speculation" in chunk),
        "token_ids": [token for choice in choices if choice["index"] == 0 for token in choice["trace"]["token_ids"]],
        "origins": [origin for choice in choices if choice["index"] == 0 for origin in choice["trace"]["origins"]],
    }


def _text(choice: dict[str, Any]) -> str:
    found: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return found

"""What a person does on the playground: its controls, a run, and the turns of a measurement."""

from __future__ import annotations

import json
from typing import Any

from tests.server.running import Server

NEXT, BACK = ".round-buttons button:last-child", ".round-buttons button:first-child"


def open_playground(page: Any, server: Server) -> None:
    page.goto(f"{server.url}/")
    page.wait_for_selector("#go:enabled")


def set_slider(page: Any, name: str, value: float) -> None:
    page.locator(f"#{name}").evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')) }", str(value))


def run(page: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write both texts and stop behind the first turn; returns the answers of the server that the page shows."""
    plain, fast, *_ = turns(page, stop=True)
    return plain, fast


def turns(page: Any, *, stop: bool = False) -> list[dict[str, Any]]:
    """Write both texts, and measure until it is known which is faster; returns all answers of the server to it."""
    before = len(page.watch.answers())
    page.evaluate("document.querySelector('#verdict').replaceChildren()")
    page.click("#go")
    page.wait_for_selector("#verdict [data-turns], .problem:visible")
    if stop:
        page.evaluate("document.querySelector('#stop').click()")  # also where it is measured already
    page.wait_for_selector("#go:enabled")
    assert page.locator(".problem:visible").count() == 0, page.inner_text(".problem")
    found: list[dict[str, Any]] = page.watch.answers()[before + 1 :]  # behind the one that reads the prompt
    return found


def value(page: Any, selector: str) -> float:
    return float(page.locator(selector).get_attribute("data-value"))


def asking_for(text: str, request: Any) -> str:
    """A request whose answer can only be this text."""
    return json.dumps({**json.loads(request.post_data), "guided_choice": [text]})

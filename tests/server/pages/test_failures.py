"""The playground where something is refused, missing or gone: it says so, and it recovers."""

from __future__ import annotations

from typing import Any

from tests.server.pages.browser import Watch
from tests.server.pages.playground import open_playground, run, set_slider
from tests.server.running import Server, running


def test_a_prompt_of_two_thousand_tokens_is_taken(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.fill("#prompt", long_prompt(server))
    set_slider(page, "tokens", 24)
    assert run(page)[1]["token_ids"]
    assert page.watch.problems == []


def long_prompt(server: Server) -> str:
    """A prompt of 2,000 tokens."""
    tokens = server.post("/tokenize", {"prompt": "def read(path):\n    return open(path).read()\n" * 200}).json()["tokens"]
    text: str = server.post("/detokenize", {"tokens": tokens[:2000]}).json()["prompt"]
    assert server.post("/tokenize", {"prompt": text}).json()["count"] == 2000
    return text


def test_what_the_server_refuses_is_said(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.fill("#prompt", "word " * 3000)
    page.click("#go")
    page.wait_for_selector(".problem:visible")
    assert "2048" in page.inner_text(".problem").replace(",", "")
    page.fill("#prompt", "def f(")
    run(page)
    assert page.locator(".problem:visible").count() == 0


def test_a_server_that_goes_away_is_said_and_recovered_from(page: Any) -> None:
    with running() as first:
        open_playground(page, first)
        port = first.url.rsplit(":", 1)[1]
        set_slider(page, "tokens", 256)
        page.click("#go")
        page.wait_for_selector(".lane .token")
        first.process.kill()
        page.wait_for_selector(".problem:visible")
        assert "server" in page.inner_text(".problem")
        whole = page.locator("#verdict [data-turns]").count()  # on a slow machine the first turn may have ended before
        assert page.inner_text("#verdict").startswith("Not known yet" if whole else "Broken off")
        assert page.locator("#rounds:visible").count() == whole
    with running("--port", port):
        page.wait_for_function("() => document.querySelector('.status').textContent === 'The server is back.'")
        assert page.locator(".problem:visible").count() == 0
        page.watch = Watch(page)
        set_slider(page, "tokens", 24)
        _, fast = run(page)
        assert fast["token_ids"]


def test_a_server_that_is_told_to_end_is_recovered_from(page: Any) -> None:
    with running() as first:
        open_playground(page, first)
        port = first.url.rsplit(":", 1)[1]
        set_slider(page, "tokens", 256)
        page.click("#go")
        page.wait_for_selector(".lane .token")
        first.process.terminate()
        page.wait_for_selector(".problem:visible")
        assert "goes on by itself" in page.inner_text(".problem")
        first.process.wait(60)
    with running("--port", port):
        page.wait_for_function("() => document.querySelector('.status').textContent === 'The server is back.'")
        set_slider(page, "tokens", 16)
        page.watch = Watch(page)
        assert run(page)[1]["token_ids"]


def test_a_key_is_asked_for(page: Any) -> None:
    name = "<b>not</b> markup"
    with running("--served-model-name", name, OUTRIDER_API_KEYS="team:secret") as server:
        assert server.get("/").status_code == 200
        assert server.get("/pages/facts").status_code == 401
        page.goto(f"{server.url}/")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#go:enabled")
        assert page.inner_text("#model").startswith(f"{name}, ")
        set_slider(page, "tokens", 16)
        assert run(page)[1]["token_ids"]


def test_without_scripts_the_pages_say_what_is_missing(browser: Any, server: Server) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    for path, words in (("/", "needs JavaScript"), ("/learn", "need JavaScript")):
        page.goto(server.url + path)
        assert words in page.inner_text("noscript")
    context.close()

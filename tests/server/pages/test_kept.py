"""What a visitor keeps of a run: its address, its file and its commands; and the page itself is light."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.server.pages.playground import open_playground, run, set_slider
from tests.server.running import CLIENT, Server


def test_a_run_survives_a_reload_and_the_way_back(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.fill("#prompt", "def f(a_b):\n")
    page.select_option("#method", "draft_model")
    set_slider(page, "temperature", 0.5)
    set_slider(page, "tokens", 16)
    _, fast = run(page)
    for leave in (page.reload, lambda: (page.goto(f"{server.url}/learn"), page.go_back())):
        leave()
        page.wait_for_selector("#go:enabled")
        assert page.input_value("#prompt") == "def f(a_b):\n"
        assert page.input_value("#method") == "draft_model"
        assert [page.input_value(f"#{name}") for name in ("temperature", "tokens")] == ["0.5", "16"]
        texts = page.locator(".lane:nth-child(2) .token").count()
        assert texts == len(fast["token_ids"])
    other = page.context.browser.new_context().new_page()
    other.goto(page.url)
    other.wait_for_selector("#go:enabled")
    assert other.input_value("#prompt") == "def f(a_b):\n"
    assert other.input_value("#temperature") == "0.5"
    assert other.locator("#results:visible").count() == 0, "an address holds the settings, and no texts"
    other.context.close()


def test_a_run_is_saved_and_opened_and_its_commands_work(page: Any, server: Server, tmp_path: Path) -> None:
    open_playground(page, server)
    page.fill("#prompt", 'it\'s = "\\n"\n')
    page.select_option("#method", "draft_model")
    set_slider(page, "tokens", 16)
    _, fast = run(page)
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "run.json")
    page.locator("#sharing details").evaluate_all("all => all.forEach(e => e.open = true)")
    curl, python = page.locator("#sharing pre").all_inner_texts()
    answered = subprocess.run(["bash", "-c", curl], capture_output=True, check=True, timeout=60)
    assert json.loads(answered.stdout)["choices"][0]["text"] == fast["text"]
    names: dict[str, Any] = {"OpenAI": openai_client}
    exec(python.removeprefix("from openai import OpenAI").replace("print(", "text = ("), names)
    assert names["text"] == fast["text"]
    page.goto(f"{server.url}/#")
    page.reload()
    page.wait_for_selector("#go:enabled")
    assert page.locator("#results:visible").count() == 0
    page.set_input_files("#file", tmp_path / "run.json")
    page.wait_for_selector("#results:visible")
    for again in (lambda: None, page.reload):
        again()
        page.wait_for_selector("#results:visible")
        assert page.locator(".lane:nth-child(2) .token").count() == 16
        assert page.input_value("#prompt") == 'it\'s = "\\n"\n'
        assert page.input_value("#method") == "draft_model", "the settings come with the file"
        assert page.input_value("#tokens") == "16"
    (tmp_path / "other.json").write_text("[]")
    page.set_input_files("#file", tmp_path / "other.json")
    page.wait_for_selector(".problem:visible")
    assert "no run" in page.inner_text(".problem")


class openai_client:
    """What the shown program uses of OpenAI's package: it posts its arguments."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.completions = self.chat = self
        self._url = base_url

    def create(self, extra_body: dict[str, Any], **body: Any) -> Any:
        path = "chat/completions" if "messages" in body else "completions"
        answer = CLIENT.post(f"{self._url}/{path}", json={**body, **extra_body}).text
        return json.loads(answer, object_hook=lambda found: SimpleNamespace(**found))


def test_a_page_is_light_and_loads_nothing_from_elsewhere(page: Any, server: Server) -> None:
    for path in ("/", "/learn"):
        page.goto(server.url + path)
        page.wait_for_load_state("networkidle")
        sent = "['resource', 'navigation'].flatMap(kind => performance.getEntriesByType(kind)).map(e => e.encodedBodySize)"
        assert 10_000 < sum(page.evaluate(sent)) < 50_000
        assert page.evaluate("performance.getEntriesByName('first-contentful-paint').length") == 1
        response = server.get(path)
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "'unsafe" not in response.headers["content-security-policy"]
    assert {url.startswith((server.url, "data:")) for url in page.watch.urls} == {True}
    plain = server.get("/", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.text == server.get("/").text
    assert server.get("/assets/digests.json").status_code == 404
    assert server.get("/assets/..%2Ffiles.py").status_code == 404

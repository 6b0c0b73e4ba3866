"""Both pages before a model with a chat template: prompts are messages, unless a switch takes them bare."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.pages.playground import open_playground, run, set_slider
from tests.server.pages.test_kept import openai_client
from tests.server.running import TEMPLATE, Server, running
from tests.server.test_thoughts import FINAL, save_harmony


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("chats") / "template"
    template.write_text(TEMPLATE, "utf-8")
    with running("--chat-template", str(template), "--allow", "suffix") as server:
        yield server


@pytest.mark.core
def test_the_playground_asks_in_a_chat_unless_the_prompt_is_bare(page: Any, chats: Server, tmp_path: Path) -> None:
    open_playground(page, chats)
    assert page.inner_text("#prompt-label") == "A message, for the model to answer"
    assert page.input_value("#prompt").startswith("Write a class")
    page.select_option("#method", "draft_model")
    set_slider(page, "tokens", 16)
    plain, fast = run(page)
    for answer in (plain, fast):
        assert answer["asked"]["messages"] == [{"role": "user", "content": page.input_value("#prompt")}]
        assert not answer["asked"].keys() & {"prompt", "chat"}
    assert page.locator(".lane:nth-child(2) .token").count() == len(fast["token_ids"])
    commands_write(page, fast["text"])
    page.reload()
    page.wait_for_selector("#go:enabled")
    assert not page.is_checked("#bare"), "an address keeps the switch"
    page.check("#bare")
    assert page.inner_text("#prompt-label") == "A beginning, for the model to go on with"
    assert page.input_value("#prompt").startswith("class Reader"), "an example becomes its like"
    page.fill("#prompt", "def f(a):\n")
    _, fast = run(page)
    assert fast["asked"]["prompt"] == "def f(a):\n"
    commands_write(page, fast["text"])
    page.reload()
    page.wait_for_selector("#go:enabled")
    assert (page.is_checked("#bare"), page.input_value("#prompt")) == (True, "def f(a):\n")
    page.uncheck("#bare")
    assert page.input_value("#prompt") == "def f(a):\n", "what somebody wrote stays"
    assert page.watch.problems == []


def commands_write(page: Any, text: str) -> None:
    """The commands that are shown ask for the same text."""
    page.locator("#sharing details").evaluate_all("all => all.forEach(e => e.open = true)")
    curl, python = page.locator("#sharing pre").all_inner_texts()
    answered = subprocess.run(["bash", "-c", curl], capture_output=True, check=True, timeout=60)
    choice = json.loads(answered.stdout)["choices"][0]
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == text
    names: dict[str, Any] = {"OpenAI": openai_client}
    exec(python.removeprefix("from openai import OpenAI").replace("print(", "text = ("), names)
    assert names["text"] == text


def test_the_scenes_ask_in_a_chat_unless_the_prompt_is_bare(page: Any, chats: Server) -> None:
    page.goto(f"{chats.url}/learn")
    page.wait_for_selector("#lab-7 .experiment")
    for bare in (False, True):
        page.set_checked("#bare", bare)
        before = len(page.watch.answers())
        found = page.locator("#lab-2 .found")
        found.evaluate("e => delete e.dataset.measured")
        page.click("#lab-2 .go button")
        page.wait_for_selector("#lab-2 .found[data-measured]")
        (answer,) = page.watch.answers()[before:]
        assert ("prompt" in answer["asked"], "messages" in answer["asked"]) == (bare, not bare)
    assert page.watch.problems == []


def test_thoughts_are_shown_while_they_are_written(page: Any, tmp_path: Path) -> None:
    """They are tokens like others, though the server tells them beside the answer."""

    def asking(route: Any) -> None:
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), "guided_grammar": FINAL}))

    page.route("**/v1/chat/completions", asking)
    with running(save_harmony(tmp_path)) as server:
        open_playground(page, server)
        page.evaluate("""() => {
            window.seen = "";
            const added = (all) => all.forEach((each) => each.addedNodes.forEach((node) => {
                if (document.querySelector("#stop")?.offsetParent) window.seen += node.textContent;
            }));
            new MutationObserver(added).observe(document.querySelector("main"), { subtree: true, childList: true });
        }""")
        set_slider(page, "tokens", 96)
        run(page)
        seen = page.evaluate("window.seen")
        assert 0 <= seen.find("</think>") < seen.find("analysis"), "all tokens, with the heads of messages, come afterwards"
        assert page.watch.problems == []


@pytest.mark.parametrize("width", [390, 1280])
def test_values_beside_sliders_stand_in_one_line(page: Any, chats: Server, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for path in ("/", "/learn"):
        page.goto(chats.url + path)
        page.wait_for_selector("#lab-7 .experiment, #go:enabled")
        heights = page.locator(".with-number output").evaluate_all(
            "all => all.map(e => { e.textContent = '2.1\u00d7'; const one = e.offsetHeight;"
            " e.textContent = '1'; return one - e.offsetHeight })"
        )
        assert len(heights) > 2
        assert set(heights) == {0}


def test_there_is_no_switch_where_no_template_is(page: Any, server: Server) -> None:
    for path in ("/", "/learn"):
        page.goto(server.url + path)
        page.wait_for_selector("#lab-7 .experiment, #go:enabled")
        assert page.locator("#bare").count() == 0

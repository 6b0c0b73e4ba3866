"""The front page of the site: the Learn page from a plain file server, with what was recorded in place of measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.server.pages.browser import WINDOWS, Watch, browsing, check

RECORD = json.loads((ROOT / "web" / "src" / "recorded.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as opened_one:
        yield opened_one


def opened(browser: Any, address: str) -> Any:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(60_000)
    page.watch = Watch(page)
    page.goto(f"{address}/")
    page.wait_for_selector("#lab-7 .experiment")
    return page


@pytest.fixture(scope="module")
def page(browser: Any, address: str) -> Any:
    """The front page as it opens."""
    return opened(browser, address)


@pytest.fixture(scope="module")
def guessed(browser: Any, address: str) -> Any:
    """The front page on which every guess was made, the most of each, and what was recorded is shown."""
    page = opened(browser, address)
    boxes = page.locator(".experiment")
    for place in range(boxes.count()):
        box = boxes.nth(place)
        slider = box.locator(".predict input")
        slider.evaluate("e => { e.value = e.max; e.dispatchEvent(new Event('input')) }")
        box.locator(".go button").click()
        box.locator(".found[data-measured]").wait_for()
        mine = box.locator(".guessed b").first.get_attribute("data-value")
        assert mine == slider.input_value()
    return page


def test_it_is_alive_and_hides_what_needs_a_server(page: Any) -> None:
    for scene in (2, 6):
        assert page.locator(f"#lab-{scene} .tree").count() == 1
    for scene in (1, 3, 4, 5, 7):
        assert page.locator(f"#lab-{scene} .toy").count() > 0
    assert set(page.locator(".experiment .go button").all_inner_texts()) == {"Show what was recorded"}
    assert needs_a_server(page) == []


def needs_a_server(page: Any) -> list[str]:
    """What the page says that makes sense on the pages of a server alone."""
    shown = page.inner_text("body")
    return [words for words in ("Playground", "this server", "Measure passes", "Measure again") if words in shown]


def test_every_scene_takes_a_guess_and_shows_the_numbers_of_the_record(guessed: Any) -> None:
    boxes = guessed.locator(".experiment")
    assert boxes.count() == len(RECORD) - 1
    scenes = guessed.locator(".lab:has(.predict)").count()
    assert scenes == 7
    for place in range(boxes.count()):
        box = boxes.nth(place)
        assert RECORD["machine"] in box.locator(".recorded").inner_text()
        assert box.locator(".chart, .tree, .distribution, .finding").count() > 0

    assert needs_a_server(guessed) == []

    def told(name: str) -> float:
        return float(guessed.get_attribute(f"[data-name={name}]", "data-value"))

    assert told("gain") == RECORD["speed"]["gain"]["middle"]
    assert told("passes") == len(RECORD["verify"]["rounds"])
    assert told("first-fast") == RECORD["first"]["fast"]
    assert told("gain-many") == RECORD["many"][-1]["gain"]["middle"]
    assert told("stood") == pytest.approx(sum(each["stood"] for each in RECORD["rejection"]) / len(RECORD["rejection"]))


def test_it_asks_nobody_but_the_file_server(guessed: Any, address: str) -> None:
    assert {url.startswith((f"{address}/learn/", "data:")) or url == f"{address}/" for url in guessed.watch.urls} == {True}
    assert guessed.watch.problems == []


def test_axe_finds_nothing_and_nothing_is_cut_off(guessed: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    for width, scheme in WINDOWS:
        guessed.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        guessed.set_viewport_size({"width": width, "height": 900})
        check(axe, guessed)
        assert guessed.evaluate("document.documentElement.scrollWidth <= innerWidth"), width


def test_its_links_lead_into_the_site(page: Any, address: str, site: Path) -> None:
    links = page.locator("header nav a, .lede a, .onward a").evaluate_all("all => all.map(e => e.href)")
    paths = {link.removeprefix(f"{address}/") for link in links}
    assert {"tutorial/", "how-to/install/", "reference/python/", "explanation/losslessness/"} <= paths
    assert [path for path in paths if not (site / path / "index.html").exists()] == []


def test_a_page_of_the_site_opens_without_an_error(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(60_000)
    page.watch = Watch(page)
    for path in ("tutorial", "reference/python", "reference/command"):
        page.goto(f"{address}/{path}/")
        page.wait_for_load_state("networkidle")
        assert page.locator("h1").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    page.close()
    assert {url.startswith((address, "data:", "blob:")) for url in page.watch.urls} == {True}
    assert page.watch.problems == []

"""The pages in Firefox: they load, both texts are written and are the same, and Learn measures, without an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.pages.firefox import FirefoxPage, browsing_in_firefox
from tests.server.running import Server, running

SLIDE = "(([e, v]) => { e.value = v; e.dispatchEvent(new Event('input')) })([document.querySelector('#%s'), %s])"
LANES = (
    "[...document.querySelectorAll('.lane')].map(e => [...e.querySelectorAll('.token')].map(t => t.textContent).join(''))"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--method", "draft_model") as server:
        yield server


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirefoxPage]:
    with browsing_in_firefox(tmp_path_factory.mktemp("firefox")) as page:
        yield page


def test_both_texts_are_written_and_are_the_same(page: FirefoxPage, server: Server) -> None:
    page.open(f"{server.url}/")
    page.wait_for("document.querySelector('#go:enabled')")
    page.evaluate(SLIDE % ("tokens", 24))
    page.evaluate("document.querySelector('#go').click()")
    page.wait_for("document.querySelector('#verdict [data-turns]')")
    page.evaluate("document.querySelector('#stop').click()")
    page.wait_for("document.querySelector('#go:enabled')")
    assert page.evaluate("document.querySelector('.sameness').dataset.same") == "24"
    plain, fast = page.evaluate(LANES)
    assert plain == fast
    assert plain
    assert page.problems == []


def test_a_scene_of_learn_takes_a_guess_and_measures(page: FirefoxPage, server: Server) -> None:
    page.open(f"{server.url}/learn")
    page.wait_for("document.querySelector('#lab-7 .experiment')")
    page.evaluate(SLIDE % ("guess-tokens", 6))
    page.evaluate("document.querySelector('#lab-2 .go button').click()")
    page.wait_for("document.querySelector('#lab-2 .found[data-measured]')")
    assert page.evaluate("document.querySelector('#lab-2 .guessed').textContent").startswith("Your guess was 6.0")
    assert page.evaluate("document.querySelectorAll('#lab-2 .tree').length") == 1
    assert page.problems == []


@pytest.mark.parametrize("path", ["/", "/learn"])
def test_nothing_is_cut_off(page: FirefoxPage, server: Server, path: str) -> None:
    page.open(server.url + path)
    page.wait_for("document.querySelector('#go:enabled, #lab-7 .experiment')")
    for width in (390, 1280):
        page.size(width, 900)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
    assert page.problems == []


def test_an_error_of_the_console_is_seen(page: FirefoxPage) -> None:
    page.evaluate("console.error('planted')")
    page.wait_for("true")
    assert page.problems == ["planted"]

"""The Learn page in a headless browser: its scenes, its questions and its score."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import pytest

from tests.server.browser import Watch, browsing
from tests.server.running import Server, running
from tests.server.test_pages import WIDTHS, check

#: Places of the right answers.
RIGHT = {1: 1, 2: 1, 3: 2, 4: 1, 5: 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--max-n", "8") as server:
        yield server


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with browsing() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        page.set_default_timeout(60_000)
        page.watch = Watch(page)
        page.goto(f"{server.url}/learn")
        page.wait_for_selector("#lab-5 .experiment")
        yield page


def measure(page: Any, scene: int, number: int = 0) -> list[dict[str, Any]]:
    """Press a button of a scene; returns the answers of the server to what it asked."""
    before = len(page.watch.answers())
    experiment = page.locator(f"#lab-{scene} .experiment >> nth={number}")
    experiment.locator(".go button").click()
    experiment.locator(".found > *").first.wait_for()
    experiment.locator(".go button:enabled").wait_for()
    assert experiment.locator(".problem:visible").count() == 0
    found: list[dict[str, Any]] = page.watch.answers()[before:]
    assert found
    return found


def told(page: Any, name: str) -> float:
    return float(page.locator(f"[data-name={name}]").get_attribute("data-value"))


def rounds_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Behind the prompt's own round."""
    return list(answer["trace"]["rounds"][1:])


def test_memory_shows_the_passes_that_were_measured(page: Any) -> None:
    answers = measure(page, 1)[1:]  # the first warms up
    seconds: dict[int, list[float]] = {}
    for found in (found for answer in answers for found in rounds_of(answer)):
        seconds.setdefault(len(found["token_ids"]) + 1, []).append(found["seconds"]["forward"])
    want = {rows: median(values) for rows, values in sorted(seconds.items()) if len(values) >= 3}
    shown = page.locator("#lab-1 td.number").evaluate_all("all => all.map(e => Number(e.dataset.value))")
    assert shown == pytest.approx(list(want.values()))
    assert told(page, "ratio") == pytest.approx(want[max(want)] / want[1])


def test_verify_steps_through_its_text(page: Any) -> None:
    (answer,) = measure(page, 2)
    assert told(page, "passes") == answer["speculation"]["target_passes"]
    for _ in range(3):
        page.click("#lab-2 .round-buttons button:last-child")
    assert page.inner_text("#lab-2 [aria-current=step]") == "Repair"


def test_rejection_draws_what_the_trace_holds(page: Any) -> None:
    (answer,) = measure(page, 3)
    assert answer["asked"]["speculation"]["rule"] == "token"
    tested = [
        (found, node)
        for found in rounds_of(answer)
        for node in range(len(found["token_ids"]))
        if node <= len(found["accepted"])
    ]
    shares = [found["rows"][found["parents"][node] + 1]["overlap"] for found, node in tested]
    assert told(page, "overlap") == pytest.approx(fmean(shares))
    assert told(page, "stood") == pytest.approx(fmean(node in found["accepted"] for found, node in tested))
    title = page.inner_text("#lab-3 .round-title")
    assert title.endswith(f"of {len(tested)}")
    found, node = tested[int(title.split()[1]) - 1]
    row = found["rows"][found["parents"][node] + 1]
    bars = {
        kind: page.locator(f"#lab-3 span[data-kind={kind}]").evaluate_all("all => all.map(e => Number(e.dataset.value))")
        for kind in ("target", "draft", "owed")
    }
    likely = row["likely"][:9]
    assert bars["target"] == [each["target"] for each in likely]
    assert bars["draft"] == [each["draft"] for each in likely]
    assert bars["owed"] == ([] if node in found["accepted"] else [each["residual"] for each in likely])


def test_speed_shows_the_formula_and_the_measured_points(page: Any) -> None:
    answers = measure(page, 4)[1:]
    assert [answer["asked"]["speculation"] == "off" for answer in answers] == [True, False, True, False]
    chances = []
    for answer in answers[1::2]:
        drafted = [found for found in rounds_of(answer) if found["token_ids"]]
        stood = sum(len(found["accepted"]) for found in drafted)
        fell = sum(len(found["accepted"]) < len(found["token_ids"]) and found["token_id"] is not None for found in drafted)
        chances.append(stood / (stood + fell))
    assert told(page, "chance") == pytest.approx(fmean(chances))
    assert page.locator("#lab-4 .curve > svg .point").count() == 2
    chance = fmean(chances)
    expected = [sum(chance**i for i in range(k + 1)) / (1 + 0.5 * k) for k in range(13)]
    assert told(page, "small") == pytest.approx(max(expected))


def test_limits_measures_all_three(page: Any) -> None:
    plain, fast = measure(page, 5, 0)
    assert told(page, "first-plain") == plain["trace"]["rounds"][0]["at"]
    assert told(page, "first-fast") == fast["trace"]["rounds"][0]["at"]
    many = measure(page, 5, 1)
    assert [answer["asked"].get("n") for answer in many] == [None, 1, 1, 8, 8]
    assert told(page, "gain-many") > 0
    assert len(measure(page, 5, 2)) == 2
    assert 0 <= told(page, "chance-hard") <= 1


def test_questions_tell_right_from_wrong_and_count_the_first_answer(page: Any) -> None:
    assert page.inner_text(".score .big") == "0 of 5"
    page.click("#question-1 button")
    assert "Choose" in page.inner_text("#question-1 .feedback")
    for scene, right in RIGHT.items():
        options = page.locator(f"#question-{scene} input").count()
        for place in range(options):
            page.check(f"#answer-{scene}-{place}")
            page.click(f"#question-{scene} button")
            word = "Right." if place == right else "Not quite."
            assert page.inner_text(f"#question-{scene} .feedback").startswith(word)
        first = sum(RIGHT[done] == 0 for done in range(1, scene + 1))
        assert page.inner_text(".score .big") == f"{first} of 5"
    page.reload()
    page.wait_for_selector("#lab-5 .experiment")
    for scene, right in RIGHT.items():
        page.locator(f"#answer-{scene}-{right}").focus()
        page.keyboard.press("Space")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.inner_text(f"#question-{scene} .feedback").startswith("Right.")
    assert page.inner_text(".score .big") == "5 of 5"
    assert page.watch.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_is_cut_off(page: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    measure(page, 1)
    measure(page, 2)
    measure(page, 3)
    measure(page, 4)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        check(axe, page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width

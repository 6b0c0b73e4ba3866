"""The Learn page in a headless browser: its toys, its measurements, its questions and its score."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import pytest

from tests.server.pages.browser import WINDOWS, Watch, check
from tests.server.pages.expected import WORDS
from tests.server.running import Server, running

#: A guess for every experiment, at least one in each scene.
GUESSES = {
    "guess-pass": 0.5,
    "guess-tokens": 6,
    "guess-stood": 1,
    "guess-gain": 4,
    "guess-shape": 2,
    "guess-members": 1,
    "guess-first": 4,
    "guess-many": 4,
    "guess-hard": 0,
}
#: Places of the right answers.
RIGHT = {1: 1, 2: 1, 3: 2, 4: 1, 5: 1, 6: 1, 7: 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--max-n", "4", "--allow", "merge") as server:
        yield server


@pytest.fixture(scope="module")
def page(browser: Any, server: Server) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(60_000)
    page.watch = Watch(page)
    page.goto(f"{server.url}/learn")
    page.wait_for_selector("#lab-7 .experiment")
    yield page
    page.close()


def measure(page: Any, scene: int, number: int = 0) -> list[dict[str, Any]]:
    """Press a button of a scene; returns the answers of the server to what it asked."""
    before = len(page.watch.answers())
    experiment = page.locator(f"#lab-{scene} .experiment >> nth={number}")
    experiment.locator(".found").evaluate("e => delete e.dataset.measured")
    experiment.locator(".go button").click()
    experiment.locator(".found[data-measured]").wait_for()
    experiment.locator(".go button:enabled").wait_for()
    assert experiment.locator(".problem:visible").count() == 0
    found: list[dict[str, Any]] = page.watch.answers()[before:]
    assert found
    return found


def guess(page: Any, name: str, value: float) -> None:
    """Move the slider of a guess."""
    page.locator(f"#{name}").evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')) }", str(value))


def judged(page: Any, name: str) -> tuple[float, float, str]:
    """The guess, what was measured, and the word about both."""
    line = page.locator(f"[data-guess={name}]")
    mine, measured = line.locator("b").evaluate_all("all => all.map(e => Number(e.dataset.value))")
    return mine, measured, line.inner_text().rpartition(": ")[2]


def told(page: Any, name: str, *, text: bool = False) -> float:
    found = page.locator(f"[data-name={name}]")
    return float(found.inner_text().rstrip("%")) / 100 if text else float(found.get_attribute("data-value"))


def rounds_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Behind the prompt's own round."""
    return list(answer["trace"]["rounds"][1:])


def test_every_scene_is_alive_before_a_click(page: Any) -> None:
    assert page.watch.answers() == []
    for scene in (2, 6):
        assert page.locator(f"#lab-{scene} .recorded").count() == 1
        assert page.locator(f"#lab-{scene} .tree").count() > 0
    for scene in (1, 3, 4, 5, 7):
        assert page.locator(f"#lab-{scene} .toy").count() > 0
    page.click("#lab-6 .round-buttons button:last-child")
    assert page.inner_text("#lab-6 [aria-current=step]") == "Verify"
    assert page.watch.problems == []


def test_memory_shows_the_passes_that_were_measured(page: Any) -> None:
    guess(page, "guess-pass", 0.5)
    answers = measure(page, 1)[1:]  # the first warms up
    seconds: dict[int, list[float]] = {}
    for found in (found for answer in answers for found in rounds_of(answer)):
        seconds.setdefault(len(found["token_ids"]) + 1, []).append(found["seconds"]["forward"])
    want = {rows: median(values) for rows, values in sorted(seconds.items()) if len(values) >= 3}
    shown = page.locator("#lab-1 td.number").evaluate_all("all => all.map(e => Number(e.dataset.value))")
    assert shown == pytest.approx(list(want.values()))
    ratio = want[max(want)] / want[1]
    assert told(page, "ratio") == pytest.approx(ratio)
    assert judged(page, "guess-pass") == (0.5, pytest.approx(ratio), "too little.")
    words = "hardly longer" if ratio < 1.3 else "far less than" if ratio < 0.6 * max(want) else "That is nearly"
    assert words in page.inner_text("#lab-1 .finding")
    assert page.locator("#lab-1 .pass").count() >= 0.9 * sum(len(values) for values in seconds.values() if len(values) >= 3)


def test_verify_steps_through_its_text(page: Any) -> None:
    guess(page, "guess-tokens", 6)
    (answer,) = measure(page, 2)
    passes = answer["speculation"]["target_passes"]
    assert told(page, "passes") == passes
    assert judged(page, "guess-tokens") == (6, pytest.approx(len(answer["token_ids"]) / passes), "too much.")
    for _ in range(3):
        page.click("#lab-2 .round-buttons button:last-child")
    assert page.inner_text("#lab-2 [aria-current=step]") == "Repair"


def test_rejection_draws_what_the_trace_holds(page: Any) -> None:
    guess(page, "guess-stood", 1)
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
    assert judged(page, "guess-stood") == (1, told(page, "stood"), "too much.")
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


def test_coins_settle_on_p_with_the_repair_and_beside_it_without(page: Any) -> None:
    page.locator("#lab-3 .toy").evaluate("e => e.scrollIntoView()")
    for repair in (True, False):
        page.set_checked("#repair", repair)
        for _ in range(5):
            page.click("#lab-3 .toy button:has-text('10,000')")
        rows = page.locator("#lab-3 [data-share]").evaluate_all(
            "all => all.map(e => [+e.dataset.share, +e.dataset.wanted])"
        )
        wanted = [p for _, p in rows]
        assert wanted == pytest.approx([0.4, 0.25, 0.2, 0.1, 0.05])
        draft = [0.15, 0.45, 0.1, 0.1, 0.2]
        shared = [min(pair) for pair in zip(wanted, draft, strict=True)]
        law = wanted if repair else [each + (1 - sum(shared)) * p for each, p in zip(shared, wanted, strict=True)]
        assert [share for share, _ in rows] == pytest.approx(law, abs=0.012)  # more than five standard errors
        assert max(abs(p - each) for p, each in zip(wanted, law, strict=True)) > 0.05 or repair
        assert told(page, "stood-share", text=True) == pytest.approx(sum(shared), abs=0.012)
    words = page.inner_text("#lab-3 .toy .finding")
    assert "self settles on 29.0%, and the target wants 40.0%" in words


def test_shares_follow_the_hand(page: Any) -> None:
    page.locator("#lab-3 input.draft").first.evaluate("e => { e.value = 60; e.dispatchEvent(new Event('input')) }")
    shares = page.locator("#lab-3 input.draft").evaluate_all("all => all.map(e => +e.value)")
    assert shares[0] == 60
    assert sum(shares) == pytest.approx(100, abs=2)
    assert "Throw" in page.inner_text("#lab-3 .toy .finding")


def test_the_curve_follows_its_sliders(page: Any) -> None:
    for chance, cost, texts, room in ((0.8, 0.1, 1, 64), (0.5, 0.3, 8, 16), (0.9, 0.0, 32, 1)):
        for name, value in (("chance", chance), ("cost", cost), ("texts", texts), ("room", room)):
            page.locator(f"#knob-{name}").evaluate(
                "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')) }", str(value)
            )
        gains = [expected_gain(chance, cost, texts, room, length) for length in range(13)]
        assert told(page, "best") == gains.index(max(gains))
        if told(page, "best"):
            assert told(page, "best-gain") == pytest.approx(max(gains))
        assert told(page, "here") == pytest.approx(gains[int(page.input_value("#knob-length"))])


@pytest.mark.parametrize("room", [2, 24, 128])
def test_the_gain_melts_with_the_texts_of_a_pass(page: Any, room: int) -> None:
    page.locator("#batch-room").evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')) }", str(room))
    gains = {texts: expected_gain(0.75, 0.08, texts, room, 5) for texts in (1, 2, 4, 8, 16)}
    shown = page.locator("#lab-7 .toy td.number").evaluate_all("all => all.map(e => Number(e.dataset.value))")
    assert shown == pytest.approx(list(gains.values()))
    assert told(page, "crossing") == next((texts for texts, gain in gains.items() if gain < 1), 0)


def expected_gain(chance: float, cost: float, texts: int, room: int, length: int) -> float:
    """Leviathan et al. 2023, where a pass takes as long as the larger of its weights and its rows."""
    checking = max(1, texts * (length + 1) / room) / max(1, texts / room)
    return sum(chance**i for i in range(length + 1)) / (checking + cost * length)


def test_speed_pins_this_server_and_compares_the_guess(page: Any) -> None:
    guess(page, "guess-gain", 4)
    answers = measure(page, 4)[1:]
    sides = [answer["asked"]["speculation"] == "off" for answer in answers]
    assert sides == [True, False, False, True, True, False]
    chances = []
    for answer in (each for each, plain in zip(answers, sides, strict=True) if not plain):
        drafted = [found for found in rounds_of(answer) if found["token_ids"]]
        stood = sum(len(found["accepted"]) for found in drafted)
        fell = sum(len(found["accepted"]) < len(found["token_ids"]) and found["token_id"] is not None for found in drafted)
        chances.append(stood / (stood + fell))
    assert told(page, "chance") == pytest.approx(fmean(chances))
    assert float(page.input_value("#knob-chance")) == pytest.approx(fmean(chances), abs=0.006)
    assert page.locator("#lab-4 .curve > svg .point").count() == 1
    assert page.locator("#lab-4 .curve > svg .whisker").count() == 1
    assert judged(page, "guess-gain") == (4, told(page, "gain"), "too much.")


def test_trees_are_measured_beside_chains(page: Any) -> None:
    for chance, word in ((0.1, "tree"), (0.95, "chain")):
        page.locator("#tree-chance").evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')) }", str(chance))
        assert f"The {word} brings more" in page.inner_text("#lab-5 .toy")
        chain, tree = page.locator("#lab-5 .shape").evaluate_all(
            "all => all.map(e => [...e.querySelectorAll('.share')].map(t => Number(t.dataset.value)))"
        )
        assert chain == pytest.approx([chance**place for place in range(1, 7)])
        assert len(tree) == 6
        assert told(page, "shape") == pytest.approx(sum(chain) - sum(tree))
        assert tree[3:] == pytest.approx([stands * chance for stands in tree[:3]])
    guess(page, "guess-shape", 2)
    answers = [answer for answer in measure(page, 5) if answer["asked"]["max_tokens"] > 2]
    brought: dict[str, list[float]] = {"chain": [], "tree": []}
    for answer in answers:
        if answer["asked"]["speculation"] != "off":
            rounds = rounds_of(answer)
            tokens = sum(len(found["accepted"]) + (found["token_id"] is not None) for found in rounds)
            brought["tree" if "tree" in answer["asked"]["speculation"] else "chain"].append(tokens / len(rounds))
    assert {name: len(values) for name, values in brought.items()} == {"chain": 3, "tree": 3}
    for name, values in brought.items():
        assert told(page, f"tokens-{name}") == pytest.approx(fmean(values))
    ratio = fmean(brought["tree"]) / fmean(brought["chain"])
    assert judged(page, "guess-shape") == (2, pytest.approx(ratio), "too much.")


def test_members_tell_who_guessed(page: Any) -> None:
    guess(page, "guess-members", 1)
    (answer,) = measure(page, 6)
    rounds = rounds_of(answer)
    names = list(dict.fromkeys(part["method"] for found in rounds for part in found["drafted_by"]))
    rows = page.locator("#lab-6 .chart tr").evaluate_all(
        "all => all.map(e => [e.cells[0].textContent, e.cells[2].textContent])"
    )
    for name, (shown, text) in zip(names, rows, strict=True):
        proposed = [
            node in found["accepted"]
            for found in rounds
            for node in range(len(found["token_ids"]))
            if any(found["drafted_by"][draw["member"]]["method"] == name for draw in found["draws"] if draw["node"] == node)
        ]
        assert shown == WORDS[name]
        assert text.endswith(f"of {len(proposed)}")
    stood = fmean(node in found["accepted"] for found in rounds for node in range(len(found["token_ids"])))
    assert judged(page, "guess-members") == (1, pytest.approx(stood), "too much.")


def test_limits_measures_all_three(page: Any) -> None:
    guess(page, "guess-first", 4)
    plain, fast = measure(page, 7, 0)
    assert told(page, "first-plain") == plain["trace"]["rounds"][0]["at"]
    assert told(page, "first-fast") == fast["trace"]["rounds"][0]["at"]
    longer = told(page, "first-fast") / told(page, "first-plain")
    assert judged(page, "guess-first")[:2] == (4, pytest.approx(longer))
    guess(page, "guess-many", 4)
    many = [answer["asked"] for answer in measure(page, 7, 1) if answer["asked"]["max_tokens"] > 2]
    assert [asked["n"] for asked in many] == [1] * 6 + [2] * 6 + [4] * 6
    assert [asked["speculation"] == "off" for asked in many] == [True, False, False, True, True, False] * 3
    assert judged(page, "guess-many") == (4, told(page, "gain-many"), "too much.")
    guess(page, "guess-hard", 0)
    assert len(measure(page, 7, 2)) == 2
    assert judged(page, "guess-hard")[:2] == (0, told(page, "chance-hard"))


def test_questions_tell_right_from_wrong_and_count_the_first_answer(page: Any) -> None:
    assert page.inner_text(".score .big") == "0 of 7"
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
        assert page.inner_text(".score .big") == f"{first} of 7"
    for name, value in GUESSES.items():
        guess(page, name, value)
    page.reload()
    page.wait_for_selector("#lab-7 .experiment")
    assert page.inner_text(".score .big") == "0 of 7", "the first answers count, also on the next visit"
    assert page.locator("[data-answered]").count() == 7
    guesses = dict(page.locator(".predict input").evaluate_all("all => all.map(e => [e.id, Number(e.value)])"))
    assert guesses == GUESSES
    page.click("#forget")
    assert page.locator("[data-answered]").count() == 0
    assert page.input_value("#guess-gain") == "2.1", "in the middle again"
    for scene, right in RIGHT.items():
        page.locator(f"#answer-{scene}-{right}").focus()
        page.keyboard.press("Space")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.inner_text(f"#question-{scene} .feedback").startswith("Right.")
    assert page.inner_text(".score .big") == "7 of 7"
    assert page.watch.problems == []


def test_axe_finds_nothing_and_nothing_is_cut_off(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    measure(page, 1)
    measure(page, 2)
    measure(page, 3)
    measure(page, 4)
    measure(page, 6)
    # The texts are drawn, so what is long in them comes seldom: no token of the vocabulary is longer than this one.
    page.locator("#lab-3 .distribution code").evaluate_all("all => all.forEach(e => e.textContent = '#'.repeat(32))")
    page.locator("#lab-3 .round-said").evaluate("e => e.textContent = `The draft drew “${'#'.repeat(32)}”.`")
    for width, scheme in WINDOWS:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": 900})
        check(axe, page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width

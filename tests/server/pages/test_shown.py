"""What the playground shows of a run is what the server answered: texts, figures, notes, rounds and choices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.pages.expected import REASONS, WORDS, boxes, notes_of, residuals, words_of
from tests.server.pages.playground import BACK, NEXT, asking_for, open_playground, run, set_slider, value
from tests.server.running import Server


def as_shown(page: Any, number: float, digits: int) -> str:
    """Return a number as the browser writes it, which rounds a half up (3.125) where Python rounds to even."""
    return str(page.evaluate("([number, digits]) => number.toFixed(digits)", [number, digits]))


@pytest.mark.core
def test_both_texts_are_shown_with_the_numbers_of_the_api(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.fill("#prompt", "def read(path):\n")
    page.select_option("#method", "draft_model")
    plain, fast = run(page)
    assert plain["asked"]["prompt"] == fast["asked"]["prompt"] == "def read(path):\n"
    assert plain["asked"]["speculation"] == "off"
    for lane, answer in enumerate((plain, fast)):
        tokens = page.locator(f".lane >> nth={lane}").locator(".token")
        texts = tokens.evaluate_all(
            "all => all.map(e => [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join(''))"
        )
        assert len(texts) == len(answer["token_ids"])
        assert "".join(answer["trace"]["texts"]) == answer["text"]
        assert [text.lstrip() for text in texts] == [text.lstrip() for text in answer["trace"]["texts"]]
        assert tokens.evaluate_all("all => all.map(e => e.dataset.origin)") == answer["origins"]
    seen = (
        page.locator(".lane >> nth=1")
        .locator(".token:not(.blank)")
        .evaluate_all("all => all.map(e => [e.dataset.origin, getComputedStyle(e).boxShadow])")
    )
    pairs = {tuple(each) for each in seen}
    assert 1 < len(pairs) == len({origin for origin, _ in pairs}) == len({colour for _, colour in pairs})
    told, rounds = fast["speculation"], fast["trace"]["rounds"]
    assert value(page, "[data-name=tau]") == told["mean_acceptance_length"]
    assert page.inner_text("[data-name=tau]") == as_shown(page, told["mean_acceptance_length"], 2)
    assert value(page, "[data-name=rate]") == told["acceptance_rate"]
    assert value(page, "[data-name=passes]") == told["target_passes"]
    assert value(page, "[data-name=first]") == rounds[0]["at"]
    shares = page.locator("#figures td.number[data-value]").evaluate_all("all => all.map(e => Number(e.dataset.value))")
    pairs = zip(told["accepted_per_position"], told["drafted_per_position"], strict=True)
    assert shares == pytest.approx([accepted / drafted for accepted, drafted in pairs])
    parts = page.locator("#figures b[data-part]").all_inner_texts()
    mean = sum(found["seconds"]["propose"] for found in rounds[1:]) / len(rounds[1:])
    assert parts[0] == as_shown(page, mean * 1000, 1 if mean < 0.1 else 0) + " ms"
    assert page.watch.problems == []


@pytest.mark.parametrize(
    ("method", "shape", "temperature", "rule"),
    [
        ("draft_model", "chain", 0.9, "same dice"),
        ("draft_model", "3,2,1", 1, "traversal"),
    ],
)
def test_every_note_equals_its_trace(
    page: Any, server: Server, method: str, shape: str, temperature: float, rule: str | None
) -> None:
    open_playground(page, server)
    page.fill("#prompt", "x = [1, 2, 3]\nx = [1, 2, 3]\nx = [")
    page.select_option("#method", method)
    page.select_option("#shape", shape)
    set_slider(page, "temperature", temperature)
    set_slider(page, "tokens", 32)
    same = rule == "same dice"
    page.set_checked("#dice", same)
    plain, fast = run(page)
    rounds = fast["trace"]["rounds"]
    rules = {found["rule"] for found in rounds if found["token_ids"]}
    assert rules
    assert rule is None or rules == {"walk" if same else rule}
    assert [seed is not None for seed in (plain["asked"].get("seed"), fast["asked"].get("seed"))] == [same, same]
    assert plain["asked"].get("seed") == fast["asked"].get("seed")
    wanted = [note for found in rounds for note in notes_of(found)]
    tokens = page.locator(".lane >> nth=1").locator(".token")
    assert tokens.count() == len(wanted)
    tokens.first.focus()
    for place, want in enumerate(wanted):
        facts = page.locator("#note dd").evaluate_all("all => all.map(e => Number(e.dataset.value))")
        assert facts == want["facts"], place
        assert page.inner_text("#note .badge") == fast["origins"][place]
        assert page.inner_text("#note .note-where").startswith(f"Round {want['round'] + 1}")
        assert REASONS[fast["origins"][place]] in page.inner_text("#note .note-why")
        for guess in want["fallen"]:
            assert guess.strip() in page.inner_text("#note .note-why")
        page.keyboard.press("ArrowRight")


def test_the_pointer_shows_a_note_too(page: Any, server: Server) -> None:
    open_playground(page, server)
    set_slider(page, "tokens", 24)
    _, fast = run(page)
    wanted = [note for found in fast["trace"]["rounds"] for note in notes_of(found)]
    for place in (0, len(wanted) // 2, len(wanted) - 1):
        page.locator(".lane >> nth=1").locator(".token").nth(place).hover()
        facts = page.locator("#note dd").evaluate_all("all => all.map(e => Number(e.dataset.value))")
        assert facts == wanted[place]["facts"]
    page.locator("#race-title").hover()
    assert page.locator("#note:visible").count() == 0
    page.locator(".lane >> nth=1").locator(".token").last.click()
    last = fast["trace"]["rounds"][-1]["round"]
    assert page.inner_text(".round-title") == f"Round {last + 1} of {last + 1}"


@pytest.mark.parametrize("shape", ["chain", "3,2,1"])
def test_rounds_are_stepped_to_the_end(page: Any, server: Server, shape: str) -> None:
    open_playground(page, server)
    page.select_option("#method", "draft_model")
    page.select_option("#shape", shape)
    set_slider(page, "tokens", 32)
    set_slider(page, "temperature", 1.2)
    page.set_checked("#dice", False)  # with the same dice nothing is drawn from a residual
    for _ in range(6):  # a text in which no residual is drawn is rare, and comes
        _, fast = run(page)
        rounds = fast["trace"]["rounds"]
        if any(residuals(found) for found in rounds):
            break
    assert any(residuals(found) for found in rounds)
    while page.locator(BACK).is_enabled():
        page.click(BACK)
    for number, found in enumerate(rounds):
        for stage, name in enumerate(("Draft", "Verify", "Accept", "Repair")):
            assert page.inner_text(".round-title").startswith(f"Round {number + 1} ")
            assert page.inner_text("[aria-current=step]") == name
            kinds = page.locator(".tree .box").evaluate_all("all => all.map(e => e.classList[1])")
            assert kinds == boxes(found, stage), (number, name)
            marked = page.locator(".token.marked").count()
            assert marked == len(found["accepted"]) + (found["token_id"] is not None)
            if stage == 3:
                assert owed(page) == residuals(found), number
            if number < len(rounds) - 1 or stage < 3:
                page.click(NEXT)
    assert page.locator(NEXT).is_disabled()
    assert page.watch.problems == []


def owed(page: Any) -> list[float]:
    """What the page draws as what the target still owed."""
    bars = page.locator(".decisive span[data-kind=owed]")
    found: list[float] = bars.evaluate_all("all => all.map(e => Number(e.dataset.value))")
    return found


def test_what_the_engine_chose_is_shown_with_its_reasons(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.select_option("#method", "auto")
    set_slider(page, "tokens", 64)
    _, fast = run(page)
    rounds = fast["trace"]["rounds"]
    drafters = [words_of(found) for found in rounds]
    reasons = dict(zip(drafters, (reason_of(found) for found in rounds), strict=True))  # the last of each
    assert all(found["reason"] for found in rounds)
    rows = page.locator(".choices tr[data-name]")
    shown = rows.evaluate_all("all => all.map(e => [e.dataset.name, +e.dataset.value, e.cells[2].textContent])")
    assert shown == [[name, drafters.count(name), reasons[name]] for name in dict.fromkeys(drafters)]
    while page.locator(BACK).is_enabled():
        page.click(BACK)
    assert reason_of(rounds[0]) in page.inner_text(".round-said") or "nothing is guessed" in page.inner_text(".round-said")
    for _ in range(4):
        page.click(NEXT)
    assert reason_of(rounds[1]) in page.inner_text(".round-said")


def reason_of(found: dict[str, Any]) -> str:
    """Why the engine chose so, as the page says it."""
    reason: str = found["reason"]
    name, asked, rest = reason.partition(" was asked ")
    return f"{WORDS[name]} had no guess {rest.removesuffix(', and had no guess')}" if asked else reason


TEXTS = {
    "markup": '<img src=x onerror="alert(1)"><script>alert(2)</script> &amp; <b>bold</b>',
    "right to left": "שלום עולם, مرحبا بالعالم",
    "emoji": "print('🎉👩‍👩‍👧‍👦🇨🇭')\n# é",
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_all_kinds_are_shown_as_they_are(page: Any, server: Server, name: str) -> None:
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    # The model would hardly write such a text by itself, so the server is asked for it: the answer is real in all else.
    page.route("**/v1/completions", lambda route: route.continue_(post_data=asking_for(TEXTS[name], route.request)))
    open_playground(page, server)
    page.fill("#prompt", TEXTS[name])
    set_slider(page, "tokens", 256)
    plain, fast = run(page)
    assert fast["asked"]["prompt"] == TEXTS[name]
    assert plain["text"] == fast["text"] == TEXTS[name]
    shown = page.locator(".lane >> nth=1").locator(".token").evaluate_all("all => all.map(e => e.textContent)")
    assert all(shown), "a token that cannot be seen cannot be pointed at"
    read = "".join(shown).replace("·", "").replace("␣", "").replace("↵", "")
    assert read.replace(" ", "") == TEXTS[name].replace(" ", "")
    page.locator(".lane >> nth=1").locator(".token").last.focus()
    page.click(NEXT)
    assert page.locator("main img, main script, .tokens b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert dialogs == []
    assert page.watch.problems == []

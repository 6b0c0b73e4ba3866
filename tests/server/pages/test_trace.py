"""What the playground says of a run equals its trace: notes, residuals and the result, over methods and rules.

The texts are the server's own. They come to the page as a saved run, as a reader would open it, so that any request can be
shown, and any speeds.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

import pytest

from outrider.propose import settings
from outrider.results import FORCED
from tests.server.pages.browser import Watch
from tests.server.pages.expected import STUDENT, WORDS, notes_of, residuals, words_of
from tests.server.pages.playground import open_playground
from tests.server.pages.playground import run as play
from tests.server.running import Server, running

PROMPT = "x = [1, 2, 3]\nx = [1, 2, 3]\nx = ["
#: Settings, and what is drawn: nothing, by a seed, or freely.
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 5},
    "free": {"temperature": 1},
}
MODEL = {"method": "draft_model", "num_draft_tokens": 4}
TREE = {"method": "draft_model", "tree": [3, 2, 1]}
METHODS: dict[str, dict[str, Any]] = {
    "token": {**MODEL, "rule": "token"},
    "block": {**MODEL, "rule": "block"},
    "walk": {**MODEL, "rule": "walk"},
    "recursive": {**TREE, "rule": "token"},
    "traversal": {**TREE, "rule": "block"},
    "best first": {"method": "draft_model", "tree": "best_first"},
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram"},
    "token recycling": {"method": "token_recycling"},
    "early exit": {"method": "early_exit"},
    "lookahead": {"method": "lookahead"},
    "merge": {"method": "merge"},
    "then": {"method": "then"},
    "staged": {"method": "staged"},
}
#: Read in one go: every note, and what every round draws as owed at its last stage, with the names beside the boxes.
READ = """() => {
  const lane = document.querySelectorAll(".lane")[1], note = document.querySelector("#note");
  const notes = [...lane.querySelectorAll(".token")].map(token => {
    token.focus();
    return { facts: [...note.querySelectorAll("dd")].map(e => +e.dataset.value), by: token.dataset.by ?? null,
             badge: note.querySelector(".badge").textContent, why: note.querySelector(".note-why").textContent,
             where: note.querySelector(".note-where").textContent };
  });
  const slider = document.querySelector("#round"), rounds = [];
  for (let round = 1; round <= +slider.max; round++) {
    slider.value = round;
    slider.dispatchEvent(new Event("input"));
    const boxes = [...document.querySelectorAll(".tree .box:not(.root)")];
    const labels = boxes.map(e => e.querySelector(".small").textContent.replace(/^draft .*/, "draft"));
    const colours = boxes.map(e => e.dataset.by ?? null);
    const told = document.querySelector(".round-said").textContent;
    document.querySelectorAll(".stage")[3].click();
    const owed = [...document.querySelectorAll(".decisive span[data-kind=owed]")].map(e => +e.dataset.value);
    rounds.push({ labels, colours, told, owed });
  }
  return { notes, rounds };
}"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    names = ("suffix", "ngram", "token_recycling", "early_exit", "lookahead", "merge", "then")
    staged = json.dumps({"method": "staged", "drafter": "ngram"})
    with running("--method", "auto", *(part for name in (*names, staged) for part in ("--allow", name))) as server:
        yield server


@pytest.fixture(scope="module")
def page(browser: Any, server: Server) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(60_000)
    page.watch = Watch(page)
    page.goto(f"{server.url}/")
    page.wait_for_selector("#go:enabled")
    yield page
    page.close()
    assert page.watch.problems == []


def written(server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    """One text, as a saved run holds it."""
    body = server.post("/v1/completions", {**asked, "trace": True}).json()
    (choice,) = body["choices"]
    trace = choice["trace"]
    return {
        "text": choice["text"],
        "tokenIds": trace["token_ids"],
        "origins": trace["origins"],
        "texts": trace["texts"],
        "rounds": trace["rounds"],
        "speculation": body["speculation"],
        "finishReason": choice["finish_reason"],
    }


def saved(server: Server, speculation: Any, draws: dict[str, Any], max_tokens: int = 24) -> dict[str, Any]:
    """A run of one turn."""
    asked = {"prompt": PROMPT, "max_tokens": max_tokens, "speculation": speculation, **draws}
    plain, fast = written(server, {**asked, "speculation": "off"}), written(server, asked)
    named = {"model": "embedded", "dtype": "bfloat16", "made": "2026-11-23T00:00:00.000Z", "asked": asked}
    return {"format": "outrider-run-1", **named, "plain": plain, "fast": fast, "speeds": [{"plain": 1, "fast": 2}]}


def show(page: Any, run: dict[str, Any]) -> None:
    page.evaluate("document.querySelector('#verdict').replaceChildren()")
    file = {"name": "run.json", "mimeType": "application/json", "buffer": json.dumps(run).encode()}
    page.set_input_files("#file", files=[file])
    page.wait_for_selector("#verdict [data-turns], .problem:visible")
    assert page.locator(".problem:visible").count() == 0, page.inner_text(".problem")


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("method", METHODS)
def test_notes_and_residuals_are_those_of_the_trace(page: Any, server: Server, method: str, draws: str) -> None:
    speculation = {name: value for name, value in METHODS[method].items() if name != "rule" or draws == "free"}
    run = saved(server, speculation, DRAWS[draws])
    show(page, run)
    found, rounds = page.evaluate(READ), run["fast"]["rounds"]
    drafted = [each for each in rounds if each["token_ids"]]
    assert drafted or method in ("suffix", "ngram", "token recycling", "lookahead", "then"), "nothing was tried"
    if draws == "free" and method in ("token", "block", "recursive", "traversal"):
        assert {each["rule"] for each in drafted} == {method}
    wanted = [each for round_ in rounds for each in told_of(round_, run)]
    assert len(found["notes"]) == len(wanted) == len(run["fast"]["tokenIds"])
    for seen, want, origin in zip(found["notes"], wanted, run["fast"]["origins"], strict=True):
        assert (seen["facts"], seen["badge"]) == (want["facts"], origin)
        assert all(words in seen["why"] for words in want["words"]), (seen["why"], want["words"])
        assert seen["where"].startswith(f"Round {want['round'] + 1}")
    for seen, round_ in zip(found["rounds"], rounds, strict=True):
        assert seen["owed"] == residuals(round_)
        assert seen["labels"] == labels(round_)


def told_of(found: dict[str, Any], run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Facts of the notes of a round, and words that they must have."""
    greedy = run["asked"]["temperature"] == 0
    for want in notes_of(found):
        if want["node"] is None:
            row = found["rows"][found["accepted"][-1] + 1 if found["accepted"] else 0]
            owed = any(each["residual"] is not None for each in row["likely"])
            repaired = "most likely token stands" if greedy else "target gives more" if owed else "had drawn this token"
            own = "its most likely token here" if greedy else "drawn from its own probabilities"
            words = ["fell.", repaired, *want["fallen"]] if want["is_repair"] else [own]
        else:
            coins = [coin for coin in found["coins"] if coin["node"] == want["node"] and coin["stands"]]
            words = ["It stands", *(["coin fell for it"] if coins and found["rule"] == "recursive" else [])]
        yield {**want, "words": words}


def labels(found: dict[str, Any]) -> list[str]:
    """What the boxes say before anything is checked: a token that was drawn behind siblings had what these left."""
    said = []
    for node in range(len(found["token_ids"])):
        own = next(draw for draw in found["draws"] if draw["node"] == node)
        elders = [
            draw
            for draw in found["draws"][: found["draws"].index(own)]
            if (draw["member"], draw["law"]) == (own["member"], own["law"])
            and found["parents"][draw["node"]] == found["parents"][node]
        ]
        share = int((own["draft_prob"] or 0) * 100 + 0.5)
        said.append("guess" if own["draft_prob"] is None else f"{share}% of the rest" if elders else "draft")
    return said


def test_members_have_colours_and_names(page: Any, server: Server) -> None:
    run = saved(server, {"method": "merge"}, DRAWS["seeded"], 48)
    show(page, run)
    found, rounds = page.evaluate(READ), run["fast"]["rounds"]
    names = list(dict.fromkeys(part["method"] for each in rounds for part in each["drafted_by"]))
    assert set(names) == {"draft_model", "suffix"}
    for seen, each in zip(found["rounds"], rounds, strict=True):
        owner = [
            next(draw["member"] for draw in each["draws"] if draw["node"] == node) for node in range(len(each["token_ids"]))
        ]
        assert seen["colours"] == [str(names.index(each["drafted_by"][member]["method"])) for member in owner]
    assert page.locator(".members .token").all_inner_texts()[:2] == [WORDS[name] for name in names]
    accepted = [note for note in found["notes"] if note["badge"] == "accepted"]
    assert accepted
    assert all(note["by"] is not None and any(WORDS[name] in note["where"] for name in names) for note in accepted)


@pytest.mark.core
def test_every_method_goes_by_words() -> None:
    built_in = {name for name in settings.names() if settings.find(name).__module__.startswith("outrider.")}
    assert {*built_in, FORCED} <= WORDS.keys()


@pytest.mark.parametrize("method", ["merge", "auto", "forced", "early exit"])
def test_a_round_says_in_words_what_its_guesses_come_from(page: Any, server: Server, method: str) -> None:
    draws = {**DRAWS["free"], **({"guided_choice": ["def the_only_answer(): pass"]} if method == "forced" else {})}
    run = saved(server, {"method": "auto"} if method == "auto" else METHODS.get(method, MODEL), draws, 48)
    show(page, run)
    found, rounds = page.evaluate(READ), run["fast"]["rounds"]
    if method == "forced":
        assert any(part["method"] == FORCED for each in rounds for part in each["drafted_by"])
    for seen, each in zip(found["rounds"], rounds, strict=True):
        if each["token_ids"]:
            assert f" from {words_of(each)}" in seen["told"]
    raw = [name for name in WORDS if "_" in name]
    said = page.locator("#results").inner_text() + "".join(seen["told"] for seen in found["rounds"])
    said = said.replace(page.locator(".lanes").inner_text(), "")
    assert [name for name in raw if name in said] == []


# -- the result --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(server: Server) -> dict[str, Any]:
    """A run in which guesses stood."""
    found = saved(server, MODEL, DRAWS["seeded"])
    assert len(found["fast"]["rounds"]) < len(found["plain"]["rounds"])
    return found


def speeds(*factors: float) -> list[dict[str, float]]:
    return [{"plain": 10.0, "fast": 10.0 * factor} for factor in factors]


@pytest.mark.parametrize(
    ("factors", "outcome", "words"),
    [
        ((2.6,), "unknown", "Not known yet"),
        ((2.5, 2.7), "unknown", "Not known yet"),
        ((2.4, 2.6, 2.5), "faster", "2.3 to 2.8× as fast"),
        ((1.1, 0.95, 1.0, 1.05), "none", "No difference seen"),
        ((0.5, 0.52, 0.51), "slower", "Slower: 0.49 to 0.54× as fast"),
    ],
)
def test_the_result_is_what_the_turns_allow(
    page: Any, run: dict[str, Any], factors: tuple[float, ...], outcome: str, words: str
) -> None:
    show(page, {**run, "speeds": speeds(*factors)})
    big = page.locator("#verdict .big")
    assert (big.get_attribute("data-outcome"), big.inner_text()) == (outcome, words)
    assert big.get_attribute("data-turns") == str(len(factors))
    if len(factors) > 2:
        logs = [log(factor) for factor in factors]
        half = STUDENT[len(logs) - 1] * stdev(logs) / sqrt(len(logs))
        assert float(big.get_attribute("data-low")) == pytest.approx(exp(fmean(logs) - half))
    colour = "getComputedStyle(document.querySelector('#verdict .big')).color"
    victory = page.evaluate(
        "() => { const e = document.body.appendChild(document.createElement('a')); e.href = '#';"
        " const c = getComputedStyle(e).color; e.remove(); return c; }"
    )
    assert (page.evaluate(colour) == victory) == (outcome == "faster")


def test_no_gain_is_told_where_no_pass_was_saved(page: Any, run: dict[str, Any]) -> None:
    told = {**run["plain"]["speculation"], "accepted_tokens": 0}
    fell = [{**each, "accepted": []} for each in run["fast"]["rounds"]]
    rounds = (fell * len(run["plain"]["rounds"]))[: len(run["plain"]["rounds"])]
    same = {**run, "fast": {**run["plain"], "rounds": rounds, "speculation": told}}
    show(page, {**same, "speeds": speeds(1.17, 1.17, 1.18)})
    assert page.inner_text("#verdict .big") == "No difference seen"
    assert "No guess stood" in page.inner_text("#verdict")


@pytest.mark.parametrize(
    ("method", "reason", "why"),
    [
        ("ngram", "", "what was written did not occur before"),
        ("draft_model", "", "a small model had no guess"),
        ("auto", "plain, since no draft is expected to pay", "plain, since no draft is expected to pay"),
    ],
)
def test_where_nobody_guessed_no_share_of_guesses_is_told(
    page: Any, run: dict[str, Any], method: str, reason: str, why: str
) -> None:
    told = {**run["plain"]["speculation"], "method": method, "accepted_tokens": 0, "drafted_per_position": []}
    rounds = [{**each, "reason": reason} for each in run["plain"]["rounds"]]
    show(page, {**run, "fast": {**run["plain"], "rounds": rounds, "speculation": told}})
    assert page.inner_text("[data-name=nobody]") == "Nobody guessed"
    assert page.locator("[data-name=rate], [data-name=tau]").count() == 0
    for place in ("#verdict .verdict-why", ".numbers", "#figures"):
        assert why in page.inner_text(place)
    assert "0%" not in page.inner_text("#verdict") + page.inner_text("#figures")


def test_a_run_opens_on_a_round_in_which_something_was_guessed(page: Any, run: dict[str, Any]) -> None:
    silent = [{**each, "token_ids": []} for each in run["fast"]["rounds"][:3]]
    texts = {"token_ids": [], "accepted": [], "parents": [], "texts": [], "coins": [], "draws": [], "drafted_by": []}
    rounds = [{**each, **texts} for each in silent] + run["fast"]["rounds"][3:]
    first = next(place for place, each in enumerate(rounds) if each["token_ids"])
    assert first > 1
    show(page, {**run, "fast": {**run["fast"], "rounds": rounds}})
    assert page.inner_text(".round-title") == f"Round {first + 1} of {len(rounds)}"


def test_a_guess_costs_what_rounds_with_guesses_took(page: Any, server: Server) -> None:
    found = saved(server, {"method": "ngram"}, DRAWS["seeded"], 48)
    plain, rounds = found["plain"]["rounds"], found["fast"]["rounds"]
    took = [(each, each["at"] - before["at"]) for before, each in itertools.pairwise(rounds)]
    drafted = [(each, seconds) for each, seconds in took if each["token_ids"]]
    assert 0 < len(drafted) < len(took), "some rounds have guesses, and some have none"
    # A machine with other work may have rounds with guesses that were no longer, so these are made longer.
    for each, _ in drafted:
        for later in rounds[rounds.index(each) :]:
            later["at"] += 0.05
    step = (plain[-1]["at"] - plain[0]["at"]) / (len(plain) - 1)
    length = fmean(len(each["token_ids"]) for each, _ in drafted)
    cost = (fmean(seconds + 0.05 for _, seconds in drafted) / step - 1) / length
    show(page, found)
    said = page.inner_text("#figures")
    shown = re.search(r"one more guess costs ([0-9.]+)% of a plain step", said)
    assert shown
    assert float(shown[1]) / 100 == pytest.approx(cost, rel=0.01, abs=0.001)
    assert f"in {len(took) - len(drafted)} of {len(took)} nothing was guessed" in said


def test_other_texts_in_flight_are_warned_of(page: Any, run: dict[str, Any]) -> None:
    show(page, run)
    assert page.locator(".warning").count() == 0
    shared = [{**each, "num_sequences": 1 + (place % 2)} for place, each in enumerate(run["fast"]["rounds"])]
    show(page, {**run, "fast": {**run["fast"], "rounds": shared}})
    assert page.locator(".warning").get_attribute("data-value") == str(len(shared) // 2)


@pytest.mark.core
def test_the_trace_counts_the_texts_of_a_step(server: Server) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 8, "n": 3, "temperature": 1, "trace": True, "ignore_eos": True}
    choices = server.post("/v1/completions", asked).json()["choices"]
    assert {each["num_sequences"] for choice in choices for each in choice["trace"]["rounds"][1:-1]} <= {1, 2, 3}
    assert any(each["num_sequences"] == 3 for choice in choices for each in choice["trace"]["rounds"])
    alone = server.post("/v1/completions", {**asked, "n": 1}).json()["choices"][0]["trace"]["rounds"]
    assert {each["num_sequences"] for each in alone} == {1}


@pytest.mark.parametrize(
    ("seed", "temperature", "why"), [(5, 1, "rounds differently"), (None, 1, "two draws"), (None, 0, "rounds differently")]
)
def test_where_texts_part_is_told(page: Any, run: dict[str, Any], seed: int | None, temperature: float, why: str) -> None:
    asked = {**run["asked"], "temperature": temperature, "seed": seed}
    asked = {name: value for name, value in asked.items() if value is not None}
    show(page, {**run, "asked": asked})
    assert page.locator(".sameness").get_attribute("data-same") == "24"
    assert page.inner_text(".sameness").startswith("24 of 24 tokens identical.")
    tokens = [*run["plain"]["tokenIds"][:7], -1, *run["plain"]["tokenIds"][8:]]
    show(page, {**run, "asked": asked, "plain": {**run["plain"], "tokenIds": tokens}})
    assert page.inner_text(".sameness").startswith("The first 7 tokens of 24 are identical.")
    assert why in page.inner_text(".sameness")
    places = page.locator(".token.parting").evaluate_all("all => all.map(e => e.dataset.place)")
    assert places == ["7", "7"]


@pytest.mark.core
def test_a_method_without_a_guess_is_no_expected_gain(server: Server) -> None:
    rounds = written(server, {"prompt": PROMPT, "max_tokens": 64, "temperature": 1, "speculation": "auto"})["rounds"]
    for each in rounds:
        if not each["token_ids"] and "expected)" in each["reason"]:
            assert each["reason"].endswith("and had no guess")
        assert each["token_ids"] or not each["reason"].endswith("expected")


def test_what_happened_inside_a_stage_is_counted(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.fill("#prompt", PROMPT)
    page.select_option("#method", "staged")
    _, fast = play(page)
    ((name, counts),) = fast["speculation"]["stages"].items()
    cells = page.locator(f"#figures tr[data-stage='{name}'] td")
    shown = cells.evaluate_all("all => all.map(e => Number(e.dataset.value))")
    assert shown == [counts["passes"], counts["draft_tokens"], counts["accepted_tokens"]]
    assert page.inner_text(f"#figures tr[data-stage='{name}'] th") == WORDS["ngram"]
    page.select_option("#method", "suffix")
    play(page)
    assert page.locator("#figures tr[data-stage]").count() == 0

"""The playground in a headless browser, against the real server and the real pair."""

from __future__ import annotations

import json
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.server.browser import WIDTHS, Watch, browsing, check
from tests.server.running import Server, running

NEXT, BACK = ".round-buttons button:last-child", ".round-buttons button:first-child"
#: What the note of a token says, by its origin.
REASONS = {"accepted": "It stands", "recovered": " fell.", "bonus": "one token more", "plain": "wrote it alone"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--allow", "suffix", "--max-n", "8") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.watch = Watch(page)
    yield page
    context.close()


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


def speed(rounds: list[dict[str, Any]]) -> float:
    """Tokens a second behind the first token."""
    tokens = sum(len(found["accepted"]) + (found["token_id"] is not None) for found in rounds[1:])
    return tokens / (rounds[-1]["at"] - rounds[0]["at"])


def value(page: Any, selector: str) -> float:
    return float(page.locator(selector).get_attribute("data-value"))


# -- what is shown is what the API said --------------------------------------------------------------------------------


def test_both_texts_are_shown_with_the_numbers_of_the_api(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.fill("#prompt", "def read(path):\n")
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
    told, rounds = fast["speculation"], fast["trace"]["rounds"]
    assert value(page, "[data-name=tau]") == told["mean_acceptance_length"]
    assert page.inner_text("[data-name=tau]") == f"{told['mean_acceptance_length']:.2f}"
    assert value(page, "[data-name=rate]") == told["acceptance_rate"]
    assert value(page, "[data-name=passes]") == told["target_passes"]
    assert value(page, "[data-name=first]") == rounds[0]["at"]
    shares = page.locator("#figures td.number[data-value]").evaluate_all("all => all.map(e => Number(e.dataset.value))")
    pairs = zip(told["accepted_per_position"], told["drafted_per_position"], strict=True)
    assert shares == pytest.approx([accepted / drafted for accepted, drafted in pairs])
    parts = page.locator("#figures b[data-part]").all_inner_texts()
    mean = sum(found["seconds"]["propose"] for found in rounds[1:]) / len(rounds[1:])
    assert parts[0] == (f"{mean * 1000:.1f} ms" if mean < 0.1 else f"{mean * 1000:.0f} ms")
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


def notes_of(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the notes of a round's tokens must say, from its trace alone."""
    rows = {row["node"]: {each["token_id"]: each for each in row["likely"]} for row in found["rows"]}
    end = -1
    for node in found["accepted"]:
        likely = rows[found["parents"][node]][found["token_ids"][node]]
        assert likely["target"] == found["target_probs"][node]
        coins = [coin for coin in found["coins"] if coin["node"] == node]
        decisive = [coin for coin in coins if coin["stands"]] or coins[-1:]
        yield note(found["round"], likely, node, coin=decisive[0]["probability"] if decisive else None)
        end = node
    if found["token_id"] is not None:
        fallen = [found["texts"][node] for node, parent in enumerate(found["parents"]) if parent == end]
        names = [text.strip() for text in fallen if text.strip().isalnum()]
        yield note(found["round"], rows[end][found["token_id"]], None, fallen=names, is_repair=bool(fallen))


def note(
    number: int,
    likely: dict[str, Any],
    node: int | None,
    *,
    coin: float | None = None,
    fallen: list[str] | None = None,
    is_repair: bool = False,
) -> dict[str, Any]:
    facts = [each for each in (likely["target"], likely["draft"], coin) if each is not None]
    return {"round": number, "facts": facts, "node": node, "fallen": fallen or [], "is_repair": is_repair}


def owed(page: Any) -> list[float]:
    """What the page draws as what the target still owed."""
    bars = page.locator(".decisive span[data-kind=owed]")
    found: list[float] = bars.evaluate_all("all => all.map(e => Number(e.dataset.value))")
    return found


def residuals(found: dict[str, Any]) -> list[float]:
    """What a token was drawn from behind the last token that stood, where something was refused there."""
    row = found["rows"][found["accepted"][-1] + 1 if found["accepted"] else 0]
    return [each["residual"] for each in row["likely"][:9] if found["token_ids"] and each["residual"] is not None]


@pytest.mark.parametrize("shape", ["chain", "3,2,1"])
def test_rounds_are_stepped_to_the_end(page: Any, server: Server, shape: str) -> None:
    open_playground(page, server)
    page.select_option("#method", "draft_model")
    page.select_option("#shape", shape)
    set_slider(page, "tokens", 32)
    set_slider(page, "temperature", 1.2)
    page.set_checked("#dice", False)  # with the same dice nothing is drawn from a residual
    _, fast = run(page)
    rounds = fast["trace"]["rounds"]
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


def test_what_the_engine_chose_is_shown_with_its_reasons(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.select_option("#method", "auto")
    set_slider(page, "tokens", 64)
    _, fast = run(page)
    rounds = fast["trace"]["rounds"]
    drafters = [" and ".join(dict.fromkeys(part["method"] for part in found["drafted_by"])) or "nobody" for found in rounds]
    reasons = dict(zip(drafters, (found["reason"] for found in rounds), strict=True))  # the last of each
    assert all(found["reason"] for found in rounds)
    rows = page.locator(".choices tr[data-name]")
    shown = rows.evaluate_all("all => all.map(e => [e.dataset.name, +e.dataset.value, e.cells[2].textContent])")
    assert shown == [[name, drafters.count(name), reasons[name]] for name in dict.fromkeys(drafters)]
    while page.locator(BACK).is_enabled():
        page.click(BACK)
    assert rounds[0]["reason"] in page.inner_text(".round-said") or "nothing is guessed" in page.inner_text(".round-said")
    for _ in range(4):
        page.click(NEXT)
    assert rounds[1]["reason"] in page.inner_text(".round-said")


def boxes(found: dict[str, Any], stage: int) -> list[str]:
    """The kinds of boxes of the drawn tree: the root, the draft, and what the target wrote."""
    nodes = range(len(found["token_ids"]))
    if stage < 2:
        draft = ["guess" for _ in nodes]
    else:
        draft = ["accepted" if node in found["accepted"] else "fallen" for node in nodes]
    end = found["accepted"][-1] if found["accepted"] else -1
    kind = "plain" if not draft else "recovered" if end in found["parents"] else "bonus"
    return ["root", *draft, *([kind] if stage == 3 and found["token_id"] is not None else [])]


# -- prompts and failures ----------------------------------------------------------------------------------------------

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


def asking_for(text: str, request: Any) -> str:
    """A request whose answer can only be this text."""
    return json.dumps({**json.loads(request.post_data), "guided_choice": [text]})


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


def test_a_key_is_asked_for(page: Any) -> None:
    name = "<b>not</b> markup"
    with running("--served-model-name", name, OUTRIDER_API_KEYS="team:secret") as server:
        assert httpx.get(f"{server.url}/").status_code == 200
        assert httpx.get(f"{server.url}/pages/facts").status_code == 401
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


# -- everybody can use it ----------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(page: Any, server: Server) -> None:
    open_playground(page, server)
    press = page.keyboard.press
    press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    focus(page, "prompt")
    press("Control+a")
    page.keyboard.type("import os")
    focus(page, "tokens")
    press("Home")
    assert page.inner_text("output[for=tokens]") == "16"
    focus(page, "go")
    press("Enter")
    page.wait_for_selector("#verdict [data-turns]")
    assert page.evaluate("document.activeElement.id") == "stop"
    press("Enter")
    page.wait_for_selector("#go:enabled")
    fast = page.watch.answers()[2]
    assert fast["asked"]["prompt"] == "import os"
    assert page.evaluate("document.activeElement.id") == "results"
    for _ in range(40):
        press("Tab")
        if page.evaluate(
            "document.activeElement.classList.contains('token') && !!document.activeElement.closest('.lane:nth-child(2)')"
        ):
            break
    press("End")
    assert page.locator("#note:visible").count() == 1
    described = page.evaluate("document.activeElement.getAttribute('aria-describedby')")
    assert described == "note"
    press("Escape")
    assert page.locator("#note:visible").count() == 0
    press("Enter")
    rounds = len(fast["trace"]["rounds"])
    assert page.inner_text(".round-title") == f"Round {rounds} of {rounds}"
    focus_selector(page, NEXT)
    press("Enter")
    assert page.inner_text("[aria-current=step]") == "Verify"
    assert page.evaluate("document.activeElement.matches('.round-buttons button')")


def focus(page: Any, name: str) -> None:
    """Go on with the tab key until the element has the focus."""
    focus_selector(page, f"#{name}")


def focus_selector(page: Any, selector: str) -> None:
    for _ in range(60):
        if page.evaluate("(s) => document.activeElement.matches(s)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the tab key does not come to {selector}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_is_cut_off(browser: Any, server: Server, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.watch = Watch(page)
    open_playground(page, server)
    check(axe, page)
    page.select_option("#method", "draft_model")
    set_slider(page, "tokens", 48)
    run(page)
    for _ in range(6):
        page.click(NEXT)
    page.locator(".lane >> nth=1").locator(".token.recovered, .token.accepted").first.focus()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_selector("#note", state="hidden")
        page.keyboard.press("ArrowRight")
        assert page.locator("#note:visible").count() == 1
        check(axe, page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
    context.close()


def test_a_page_is_light_and_loads_nothing_from_elsewhere(page: Any, server: Server) -> None:
    for path in ("/", "/learn"):
        page.goto(server.url + path)
        page.wait_for_load_state("networkidle")
        sent = "['resource', 'navigation'].flatMap(kind => performance.getEntriesByType(kind)).map(e => e.encodedBodySize)"
        assert 10_000 < sum(page.evaluate(sent)) < 50_000
        assert page.evaluate("performance.getEntriesByName('first-contentful-paint').length") == 1
        response = httpx.get(server.url + path)
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "'unsafe" not in response.headers["content-security-policy"]
    assert {url.startswith((server.url, "data:")) for url in page.watch.urls} == {True}
    plain = httpx.get(server.url, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.text == httpx.get(server.url).text
    assert httpx.get(f"{server.url}/assets/digests.json").status_code == 404
    assert httpx.get(f"{server.url}/assets/..%2Ffiles.py").status_code == 404


# -- while texts are written -------------------------------------------------------------------------------------------


def test_both_texts_can_be_read_while_they_are_written_and_stopped(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.select_option("#method", "draft_model")
    set_slider(page, "tokens", 256)
    page.click("#go")
    for lane in (1, 2):
        page.wait_for_selector(f".lane:nth-child({lane}) .token")
        assert page.locator("#go:disabled").count() == 1
    page.click("#stop")
    page.wait_for_selector("#go:enabled")
    assert page.locator("#stop:visible").count() == 0
    assert page.locator(".lane .token").count() > 2, "what was written stays"
    set_slider(page, "tokens", 16)
    assert run(page)[1]["token_ids"]
    assert server.rests()
    assert page.watch.problems == []


def test_turns_alternate_until_the_interval_is_known(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.select_option("#method", "draft_model")
    set_slider(page, "tokens", 48)
    found = turns(page)
    sides = [answer["asked"]["speculation"] == "off" for answer in found]
    assert 6 <= len(sides) <= 14
    assert sides == [True, False, False, True] * (len(sides) // 4) + [True, False] * (len(sides) % 4 // 2)
    seeds = [answer["asked"]["seed"] for answer in found]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == len(seeds) // 2, "a later turn must not repeat a text that a lookup may know by now"
    gains = [log(speed(fast) / speed(plain)) for plain, fast in pairs_of(found)]
    middle, half = fmean(gains), STUDENT[len(gains) - 1] * stdev(gains) / sqrt(len(gains))
    assert value(page, ".big") == pytest.approx(exp(middle))
    low, high = (float(page.locator(".big").get_attribute(f"data-{name}")) for name in ("low", "high"))
    assert [low, high] == pytest.approx([exp(middle - half), exp(middle + half)])
    assert len(gains) == 7 or half <= 0.1
    assert page.locator(".sameness.same").inner_text().startswith("48 of 48 tokens identical")


#: Student's t at 97.5%, by degrees of freedom.
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}


def pairs_of(found: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Rounds of the plain text and of the other, turn by turn."""
    for one, other in zip(found[::2], found[1::2], strict=True):
        pair = (one, other) if one["asked"]["speculation"] == "off" else (other, one)
        yield pair[0]["trace"]["rounds"], pair[1]["trace"]["rounds"]


def test_whoever_listens_hears_little(page: Any, server: Server) -> None:
    open_playground(page, server)
    set_slider(page, "tokens", 96)
    page.evaluate(
        """() => {
          window.heard = [];
          new MutationObserver(() => {
            for (const e of document.querySelectorAll("[role=status], [role=alert], [aria-live]")) {
              if (e.textContent && e.textContent !== e.heardLast) heard.push(e.heardLast = e.textContent);
            }
          }).observe(document.body, { subtree: true, childList: true, characterData: true });
        }"""
    )
    turns(page)
    heard = page.evaluate("heard")
    assert any("finished" in each for each in heard)
    assert len(heard) <= 6, heard


def test_a_tap_shows_the_note_and_stays_where_it_is(browser: Any, server: Server) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.watch = Watch(page)
    open_playground(page, server)
    page.select_option("#method", "draft_model")
    set_slider(page, "tokens", 24)
    run(page)
    lanes = page.locator(".lanes").bounding_box()
    assert lanes["height"] < 844 - 100, "both texts are in sight at once"
    token = page.locator(".lane >> nth=1").locator(".token").nth(3)
    token.scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    token.tap()
    assert page.locator("#note:visible").count() == 1
    assert page.evaluate("scrollY") == before
    page.locator(".lane >> nth=1").locator(".token").last.scroll_into_view_if_needed()
    page.locator(".lane >> nth=1").locator(".token").last.tap()
    page.locator(".lane >> nth=1").locator(".token").last.tap()
    number = page.locator("#round").get_attribute("max")
    assert page.inner_text(".round-title") == f"Round {number} of {number}"
    context.close()


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


# -- what is kept ------------------------------------------------------------------------------------------------------


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
    assert page.locator(".lane:nth-child(2) .token").count() == 16
    (tmp_path / "other.json").write_text("[]")
    page.set_input_files("#file", tmp_path / "other.json")
    page.wait_for_selector(".problem:visible")
    assert "no run" in page.inner_text(".problem")


class openai_client:
    """What the shown program uses of OpenAI's package: it posts its arguments."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.completions, self._url = self, base_url

    def create(self, extra_body: dict[str, Any], **body: Any) -> Any:
        answer = httpx.post(f"{self._url}/completions", json={**body, **extra_body}, timeout=60).json()
        return SimpleNamespace(choices=[SimpleNamespace(text=each["text"]) for each in answer["choices"]])


# -- what can be seen --------------------------------------------------------------------------------------------------


def test_underscores_stand_above_the_line_of_their_origin(page: Any, server: Server) -> None:
    open_playground(page, server)
    page.route("**/v1/completions", lambda route: route.continue_(post_data=asking_for("a ____ b", route.request)))
    page.select_option("#method", "draft_model")
    run(page)
    box = page.locator(".lane:nth-child(2) .token").evaluate_all(
        """all => { const e = all.find(e => e.textContent.includes("_"));
                    e.classList.add("accepted"); e.textContent = "____"; const b = e.getBoundingClientRect();
                    scrollTo(0, scrollY + b.top - 200); const c = e.getBoundingClientRect();
                    return { x: c.x + 4, y: c.y, width: 4, height: c.height + 2 }; }"""
    )
    kinds = page.evaluate(COLUMN, b64encode(page.screenshot(clip=box)).decode())
    assert kinds[-3:] == ["ink", "paper", "edge"]


#: The runs of colours down the middle of a picture: pale ones are paper, dark ones ink, and green ones the edge.
COLUMN = """async data => {
  const image = await createImageBitmap(new Blob([Uint8Array.from(atob(data), c => c.charCodeAt(0))]));
  const canvas = new OffscreenCanvas(image.width, image.height), pen = canvas.getContext("2d");
  pen.drawImage(image, 0, 0);
  const found = [];
  for (let y = 0; y < image.height; y++) {
    const [r, g, b] = pen.getImageData(image.width >> 1, y, 1, 1).data;
    const kind = g > r + 60 ? "edge" : r > 150 ? "paper" : "ink";
    if (kind !== found.at(-1)) found.push(kind);
  }
  return found.slice(0, found.lastIndexOf("edge") + 1);
}"""


def test_forced_colours_still_tell_the_origins_apart(page: Any, server: Server) -> None:
    page.emulate_media(forced_colors="active", reduced_motion="reduce")
    open_playground(page, server)
    page.select_option("#method", "draft_model")
    set_slider(page, "tokens", 48)
    run(page)
    style = "e => { const s = getComputedStyle(e); return [s.borderBottomStyle, s.borderBottomWidth].join(' '); }"
    lines = {page.locator(f".legend .{origin}").evaluate(style) for origin in ("accepted", "recovered", "bonus")}
    assert len(lines) == 3
    assert "none 0px" not in lines
    back = "e => getComputedStyle(e).backgroundColor"
    bars = {page.locator(f".fill.{part} >> nth=0").evaluate(back) for part in ("pass", "draft", "check", "rest")}
    assert len(bars) == 4, "the parts of a bar can be told apart"
    assert page.locator(".chart:has(.rail.wide)").evaluate(back) not in bars

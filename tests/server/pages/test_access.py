"""Everybody can use the playground: by keyboard, by touch, by ear, on small screens and with forced colours."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from tests.server.pages.browser import WINDOWS, Watch, check
from tests.server.pages.playground import NEXT, asking_for, open_playground, run, set_slider, turns
from tests.server.running import Server


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
    press("End")  # long texts: the turns go on while the focus is looked at
    assert page.inner_text("output[for=tokens]") == "256"
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


def test_axe_finds_nothing_and_nothing_is_cut_off(page: Any, server: Server) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    open_playground(page, server)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        check(axe, page)
    page.select_option("#method", "draft_model")
    set_slider(page, "tokens", 48)
    run(page)
    for _ in range(6):
        page.click(NEXT)
    page.locator(".lane >> nth=1").locator(".token.recovered, .token.accepted").first.focus()
    for width, scheme in WINDOWS:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_selector("#note", state="hidden")
        page.keyboard.press("ArrowRight")
        assert page.locator("#note:visible").count() == 1
        check(axe, page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width


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
    for part in ("pass", "draft", "check", "rest"):
        assert page.locator(f".fill.{part} >> nth=0").evaluate(back) == page.locator(f".key.{part} >> nth=0").evaluate(back)


@pytest.mark.parametrize("path", ["/", "/learn"])
def test_forced_colours_are_the_only_ones(page: Any, server: Server, path: str) -> None:
    page.emulate_media(forced_colors="active", reduced_motion="reduce")
    if path == "/":
        open_playground(page, server)
        page.select_option("#method", "draft_model")
        set_slider(page, "tokens", 24)
        run(page)
        page.locator(".stage").last.click()
    else:
        page.goto(server.url + path)
        page.wait_for_selector("#lab-7 .experiment")
    assert page.evaluate(NOT_FORCED) == []


#: What is drawn in another colour than those of the system.
NOT_FORCED = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.forcedColorAdjust = "none";
  const system = ["Canvas", "CanvasText", "Highlight", "GrayText", "LinkText", "ButtonText"].map(name => {
    probe.style.color = name;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  const seen = new Set(["none", "rgba(0, 0, 0, 0)", ...system]), found = new Set();
  const note = (e, name) => {
    const colour = getComputedStyle(e)[name];
    if (!seen.has(colour)) found.add(`${e.tagName}.${e.getAttribute("class")} ${name}: ${colour}`);
  };
  for (const e of document.querySelectorAll("main svg *:not(title):not(g)")) {
    note(e, "fill");
    note(e, "stroke");
  }
  for (const e of document.querySelectorAll(".fill, .key, .bar, .track, .wanted, .key-dot")) note(e, "backgroundColor");
  return [...found];
}"""

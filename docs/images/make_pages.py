"""Makes the pictures of the playground and of the Learn page: docs/images/playground.png and docs/images/learn.png.

    outrider serve --wide        in another terminal
    python docs/images/make_pages.py http://127.0.0.1:8000

The numbers on them are those of the machine that the server runs on. Needs Chromium and the extra `dev`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parent
VIEW = {"width": 1240, "height": 1080}


def playground(page: Page, url: str) -> None:
    page.goto(f"{url}/")
    page.wait_for_selector("#go:enabled")
    page.select_option("#method", "draft_model")
    page.click("#go")
    page.wait_for_selector("#verdict [data-turns]")
    page.wait_for_selector("#go:enabled")
    page.locator("#verdict").evaluate("e => e.scrollIntoView()")
    fallen = page.locator(".lane >> nth=1").locator(".token.recovered:not(.blank)")
    fallen.nth(min(4, fallen.count() - 1)).hover()
    page.screenshot(path=FOLDER / "playground.png")


def learn(page: Page, url: str) -> None:
    page.goto(f"{url}/learn")
    page.click("#lab-3 .toy button:has-text('10,000')")
    page.locator("#scene-3").evaluate("e => e.scrollIntoView()")
    page.screenshot(path=FOLDER / "learn.png")


def main(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=VIEW, reduced_motion="reduce")
        page.set_default_timeout(180_000)
        playground(page, url)
        learn(page, url)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])

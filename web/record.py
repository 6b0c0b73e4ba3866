"""Writes the record that the Learn page shows where nothing was measured: web/src/recorded.json.

    outrider serve --wide --allow merge        in another terminal
    python web/record.py http://127.0.0.1:8000 "two cores"
    make pages

It presses every button of the Learn page of that server, and keeps what was measured. So the record is what a reader would
have seen. Needs Chromium and the extra `dev`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, sync_playwright

RECORD = Path(__file__).parent / "src" / "recorded.json"
#: What no scene shows.
DROPPED = ("position", "num_scratch_rows", "schedule", "reason", "draft_probs", "laws", "speculation")
LISTEN = "window.found = {}; addEventListener('measured', ({ detail }) => (window.found[detail.name] = detail.found))"
FACTS = "fetch('/pages/facts').then(answer => answer.json())"


def measure(page: Page) -> dict[str, Any]:
    """Press the buttons of all scenes, one after the other; the text of several methods is the best of some."""
    page.evaluate(LISTEN)
    for box in page.locator(".experiment").all():
        press(box)
    found: dict[str, Any] = page.evaluate("window.found")
    for _ in range(12):
        press(page.locator("#lab-6 .experiment"))
        found["members"] = max(found["members"], page.evaluate("window.found.members"), key=variety)
    return found


def press(box: Locator) -> None:
    """Press the button of an experiment, and wait for what it shows."""
    box.locator(".found").evaluate("e => delete e.dataset.measured")
    box.locator(".go button").click()
    box.locator(".found[data-measured], .problem:visible").first.wait_for()
    if box.locator(".problem:visible").count():
        sys.exit(f"nothing is recorded: {box.locator('.problem').inner_text()}")


def variety(text: dict[str, Any]) -> int:
    """How many methods guessed in one round; of as many, the fewer rounds."""
    return max(len({draw["member"] for draw in each["draws"]}) for each in text["rounds"]) * 100 - len(text["rounds"])


def short(value: Any) -> Any:
    """The same with three digits a number, and without what no scene shows."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, list):
        return [short(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: short(each) for name, each in value.items() if name not in DROPPED}
    if "token_ids" in value and "rows" in value:
        found |= {"laws": value["laws"], "reason": "", "draft_probs": short(value["draft_probs"])}
        end = value["accepted"][-1] if value["accepted"] else -1
        needed = {*value["token_ids"], value["token_id"]}
        for row in found["rows"]:
            most = 5 if row["node"] == end else 0
            row["likely"] = [each for place, each in enumerate(row["likely"]) if place < most or each["token_id"] in needed]
    return found


def main(url: str, machine: str) -> None:
    """Write the file."""
    chromium = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(600_000)
        page.goto(f"{url}/learn")
        page.wait_for_selector("#lab-7 .experiment")
        facts = page.evaluate(FACTS)
        found = short(measure(page))
        browser.close()
    told = f"{machine} with {facts['model']} ({facts['dtype']}, {facts['weight_bytes'] / 1e9:.2f} GB of weights)"
    RECORD.write_text(json.dumps({"machine": told, **found}, separators=(",", ":"), ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

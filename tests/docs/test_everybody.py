"""Everybody can read the pages of the site: no rule of accessibility is broken, and no page is wider than the screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.server.pages.browser import browsing, check

PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md"))
#: Pages that hold nearly every kind of thing between them: code, wide tables, and what is made of the command.
QUICK = ("tutorial", "explanation/performance", "reference/command")


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with browsing() as browser:
        page = browser.new_page(reduced_motion="reduce")
        page.set_default_timeout(60_000)
        yield page


def read(page: Any, address: str, name: str) -> None:
    """Look at a page in both colour schemes, on a phone and on a desk."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    for scheme, width in (("light", 390), ("dark", 1280)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{address}/{name}/")
        page.wait_for_load_state("networkidle")
        check(axe, page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, width)


@pytest.mark.parametrize("name", QUICK)
def test_a_page_of_every_kind(page: Any, address: str, name: str) -> None:
    read(page, address, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PAGES) - set(QUICK)))
def test_every_other_page(page: Any, address: str, site: Path, name: str) -> None:
    assert (site / name / "index.html").exists()
    read(page, address, name)

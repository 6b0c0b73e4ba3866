"""The server, the browser and a page of it, as the tests of the playground share them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.pages.browser import Watch, browsing
from tests.server.running import Server, running


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with running("--allow", "suffix", "--max-n", "8") as server:
        yield server


@pytest.fixture(scope="package")
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

"""While texts are written: both can be read and stopped, and turns alternate until the gain is known."""

from __future__ import annotations

from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.server.pages.expected import STUDENT, pairs_of, speed
from tests.server.pages.playground import open_playground, run, set_slider, turns, value
from tests.server.running import Server


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

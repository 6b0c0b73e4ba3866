"""Stop strings: the automaton finds what the plain search finds, and its cost does not grow with their number."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import outrider
from outrider.config import default_model
from outrider.engine.text import StopStrings, TextStream, stop_strings
from outrider.params import TokenOrigin

PACKAGE = str(Path(outrider.__file__).parent)


def plain_search(text: str, before: int, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Start and name of the first stop string that what follows `before` completes: string by string."""
    hits = [(text.find(s, max(0, before - len(s) + 1)), s) for s in stop]
    return min((hit for hit in hits if hit[0] >= 0), default=None)


def plain_tail(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest tail that a stop string might go on from: string by string, length by length."""
    sizes = (n for s in stop for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n]))
    return max(sizes, default=0)


letters = st.text("ab", max_size=6) | st.text("abc😀", max_size=4)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    stop=st.lists(letters.filter(bool), max_size=8).map(tuple),
    pieces=st.lists(letters, max_size=12),
)
def test_the_automaton_finds_what_a_search_of_every_string_finds(stop: tuple[str, ...], pieces: list[str]) -> None:
    strings, node, text = StopStrings(stop), 0, ""
    for piece in pieces:
        before, text = len(text), text + piece
        node, hit = strings.scan(node, piece)
        want = plain_search(text, before, stop)
        assert (None if hit is None else (before + hit.start, text[before + hit.start :][: hit.length])) == want
        assert strings.held_back(node) == plain_tail(text, stop)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5), st.text("ab", max_size=30), st.integers(0, 29)
)
def test_pieces_are_found_wherever_the_text_is_cut(stop: list[str], text: str, cut: int) -> None:
    strings = StopStrings(tuple(stop))
    whole, _ = strings.scan(0, text)
    first, _ = strings.scan(0, text[:cut])
    assert strings.scan(first, text[cut:])[0] == whole


def test_texts_that_live_together_share_an_automaton() -> None:
    first = stop_strings(("abc", "def"))
    assert stop_strings(("abc", "def")) is first
    assert stop_strings(("def", "abc")) is not first
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None, "it outlives the texts"


def lines_of_ours(stop: tuple[str, ...], tokens: list[int], tokenizer: Any) -> int:
    """How many lines of the package run while the tokens become text."""
    stream, count = TextStream(tokenizer, stop), 0

    def watch(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        count += event == "line"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        for token in tokens:
            assert stream.push(token, TokenOrigin.PLAIN, watch=True) is None
            stream.release()
    finally:
        sys.settrace(before)
    return count


def test_the_cost_of_a_token_does_not_grow_with_the_number_of_stop_strings() -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    tokens = tokenizer("class Reader:\n    def read(self, path):\n        return open(path).read()\n")["input_ids"]
    few, many = (lines_of_ours(tuple(f"read({i})" for i in range(count)), tokens, tokenizer) for count in (3, 3000))
    assert few > 100
    assert many <= 1.2 * few


def test_an_automaton_holds_each_beginning_once() -> None:
    assert len(StopStrings(())) == 1
    assert len(StopStrings(("abc", "abd", "b", "abc"))) == 6  # "", a, ab, abc, abd, b

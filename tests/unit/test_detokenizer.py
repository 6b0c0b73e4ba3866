"""Tokens to text: whole characters only, stop strings cut, and nothing shown that must be taken back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.config import default_model
from outrider.engine.text import TextStream
from outrider.params import TokenOrigin

PLAIN, ACCEPTED, RECOVERED, BONUS = TokenOrigin
EASY = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(default_model("target"))


class Stream:
    """A TextStream fed one token at a time, with what it showed."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.text = TextStream(tokenizer, stop)
        self.pieces: list[str] = []
        self.spans: list[tuple[str, TokenOrigin]] = []
        self.stopped: str | None = None

    def push(self, token: int, origin: TokenOrigin = PLAIN, *, watch: bool = True) -> str:
        """What this token made visible."""
        assert self.stopped is None
        self.stopped = self.text.push(token, origin, watch=watch)
        if self.stopped is not None:
            self.text.finish()
        return self._show()

    def finish(self) -> str:
        self.text.finish()
        return self._show()

    def _show(self) -> str:
        spans = self.text.release()
        self.spans += spans
        self.pieces.append("".join(text for text, _ in spans))
        return self.pieces[-1]

    @property
    def shown(self) -> str:
        return "".join(self.pieces)


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text)["input_ids"]
    return found


def single(tokenizer: Any, text: str) -> list[int]:
    """One token a character."""
    tokens = [token for character in text for token in ids(tokenizer, character)]
    assert len(tokens) == len(text)
    return tokens


@pytest.fixture(scope="module")
def bytes_too() -> Any:
    """A tokenizer whose vocabulary has a token for each byte, as SentencePiece's have; token i is byte i."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a", "b", "\u2581", "</s>"]
    model = models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[], byte_fallback=True)
    backend = Tokenizer(model)
    first = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), first])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


# -- characters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["🙂", "中文", "é", " 👩‍👩‍👧!", "naïve → café", "def f(x):\n    return x\n"])
def test_only_whole_characters_are_shown(tokenizer: Any, text: str) -> None:
    stream = Stream(tokenizer)
    for token in ids(tokenizer, text):
        piece = stream.push(token)
        assert "\ufffd" not in piece
        assert text.startswith(stream.shown)
    assert stream.shown == text
    assert stream.finish() == ""


def test_a_character_appears_with_the_token_that_completes_it(tokenizer: Any) -> None:
    tokens = ids(tokenizer, "🙂")
    assert len(tokens) == 4
    stream = Stream(tokenizer)
    assert [stream.push(token) for token in tokens] == ["", "", "", "🙂"]


def test_a_character_that_never_became_whole_shows_at_the_end(tokenizer: Any) -> None:
    stream = Stream(tokenizer)
    for token in [*ids(tokenizer, "a"), *ids(tokenizer, "🙂")[:2]]:
        stream.push(token)
    assert stream.shown == "a"
    assert set(stream.finish()) == {"\ufffd"}
    assert stream.shown == stream.text.text


def test_special_tokens_are_not_shown(tokenizer: Any) -> None:
    stream = Stream(tokenizer)
    for token in [*ids(tokenizer, "a"), tokenizer.eos_token_id, *ids(tokenizer, "b"), tokenizer.eos_token_id]:
        stream.push(token)
    stream.finish()
    assert stream.shown == "ab"


tokens_lists = st.lists(st.integers(0, 255) | st.integers(0, 4095), max_size=25)
origins = st.sampled_from(list(TokenOrigin))


@EASY
@given(tokens_lists, st.data())
def test_what_is_shown_adds_up_to_the_decoded_text(tokenizer: Any, tokens: list[int], data: st.DataObject) -> None:
    stream = Stream(tokenizer)
    for token in tokens:
        stream.push(token, data.draw(origins))
    stream.finish()
    assert stream.shown == stream.text.text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert all(text for text, _ in stream.spans), "no empty spans"


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        ([0xC3, 0x80, 257], "\u00c0b"),
        ([256, 0xE2, 0x82, 0xAC, 256], "a\u20ac a"),
        ([0xC3, 0x80, 0x82, 257, 257], "\u00c0\ufffdbb"),  # the third byte makes the first two no character any more
        ([0xC3, 0x80, 0x82, 0xC3, 256], "\u00c0\ufffd\ufffd a"),
        ([257, 0xC3, 0x80, 0x82], "b\u00c0\ufffd"),
    ],
)
def test_bytes_that_are_no_text_end_nothing(bytes_too: Any, tokens: list[int], shown: str) -> None:
    stream = Stream(bytes_too)
    for token in tokens:
        stream.push(token)
    stream.finish()
    assert stream.shown == stream.text.text == shown


@EASY
@given(tokens=st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0x41, 256, 257, 258, 259]), max_size=24))
def test_bytes_are_shown_as_decoded_where_they_are_text(bytes_too: Any, tokens: list[int]) -> None:
    stream = Stream(bytes_too)
    for token in tokens:
        stream.push(token)
    stream.finish()
    whole = bytes_too.decode(tokens, skip_special_tokens=True)
    assert stream.shown == stream.text.text
    assert len(stream.text.texts()) == len(tokens)
    if "\ufffd" not in whole:
        assert stream.shown == whole
    kept = [letter for letter in stream.shown if letter in "ab "]
    assert kept == [letter for letter in whole if letter in "ab "], "no token of text is lost"


def test_without_a_tokenizer_the_text_stays_empty() -> None:
    stream = Stream(None)
    assert [stream.push(7), stream.push(8), stream.finish()] == ["", "", ""]
    assert stream.text.text == ""


# -- origins -----------------------------------------------------------------------------------------------------------


def test_each_span_carries_the_origin_of_the_token_that_wrote_it(tokenizer: Any) -> None:
    stream = Stream(tokenizer)
    for token, origin in zip(single(tokenizer, "abcd"), (PLAIN, ACCEPTED, RECOVERED, BONUS), strict=True):
        stream.push(token, origin)
    assert stream.spans == [("a", PLAIN), ("b", ACCEPTED), ("c", RECOVERED), ("d", BONUS)]


def test_tokens_of_one_step_come_as_one_span_each(tokenizer: Any) -> None:
    text = TextStream(tokenizer, ())
    for token, origin in zip(single(tokenizer, "abc"), (ACCEPTED, ACCEPTED, BONUS), strict=True):
        text.push(token, origin, watch=True)
    assert text.release() == [("a", ACCEPTED), ("b", ACCEPTED), ("c", BONUS)]
    assert text.release() == []


def test_a_split_character_belongs_to_the_token_that_completes_it(tokenizer: Any) -> None:
    stream = Stream(tokenizer)
    for token, origin in zip(ids(tokenizer, "🙂"), (PLAIN, ACCEPTED, ACCEPTED, RECOVERED), strict=True):
        stream.push(token, origin)
    assert stream.spans == [("🙂", RECOVERED)]


def test_held_back_text_keeps_its_origins_when_it_comes(tokenizer: Any) -> None:
    stream = Stream(tokenizer, ("abX",))
    for token, origin in zip(single(tokenizer, "abc"), (ACCEPTED, RECOVERED, BONUS), strict=True):
        stream.push(token, origin)
    assert stream.pieces == ["", "", "abc"]
    assert stream.spans == [("a", ACCEPTED), ("b", RECOVERED), ("c", BONUS)]


# -- stop strings ------------------------------------------------------------------------------------------------------


def run(tokenizer: Any, text: str, *stop: str) -> Stream:
    stream = Stream(tokenizer, stop)
    for token in single(tokenizer, text):
        stream.push(token)
        if stream.stopped is not None:
            break
    else:
        stream.finish()
    assert stream.shown == stream.text.text
    return stream


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("hello world", ("lo w",), "hel", "lo w"),  # spans tokens
        ("hello", ("h",), "", "h"),
        ("aXb", ("X",), "a", "X"),
        ("aaab", ("aab",), "a", "aab"),  # overlaps its own beginning
        ("ababac", ("abac",), "ab", "abac"),
        ("abcd", ("bcx", "cd"), "ab", "cd"),  # one candidate fails, another succeeds inside it
        ("abcd", ("abcd", "bc"), "a", "bc"),  # completed first, though begun later
        ("abc", ("c", "bc"), "a", "bc"),  # completed together: the one that began first
        ("abcd", ("xyz",), "abcd", None),
        ("abc", ("cd",), "abc", None),  # the held-back tail comes at the end
    ],
)
def test_the_text_ends_before_the_stop_string(
    tokenizer: Any, text: str, stop: tuple[str, ...], shown: str, stopped: str | None
) -> None:
    stream = run(tokenizer, text, *stop)
    assert (stream.shown, stream.stopped) == (shown, stopped)


def test_a_prefix_of_a_stop_string_is_held_back_until_it_cannot_be_one(tokenizer: Any) -> None:
    stream = Stream(tokenizer, ("bcd",))
    assert [stream.push(token) for token in single(tokenizer, "abcbcx")] == ["a", "", "", "bc", "", "bcx"]


def test_a_stop_string_inside_one_token_cuts_the_token(tokenizer: Any) -> None:
    (token,) = ids(tokenizer, " return")
    stream = Stream(tokenizer, ("tur",))
    assert stream.push(token, ACCEPTED) == " re"
    assert stream.stopped == "tur"
    assert stream.spans == [(" re", ACCEPTED)]


def test_a_stop_string_of_split_characters(tokenizer: Any) -> None:
    stream = Stream(tokenizer, ("🙂",))
    for token in ids(tokenizer, "a🙂"):
        stream.push(token)
    assert (stream.shown, stream.stopped) == ("a", "🙂")


def test_stop_strings_do_not_count_while_unwatched(tokenizer: Any) -> None:
    stream = Stream(tokenizer, ("b",))
    a, b, c = single(tokenizer, "abc")
    for token in (a, b, c):
        stream.push(token, watch=False)
    assert (stream.shown, stream.stopped) == ("abc", None)
    stream.push(b)
    assert (stream.shown, stream.stopped) == ("abc", "b")


def test_an_old_stop_string_does_not_end_a_text_once_watching_begins(tokenizer: Any) -> None:
    stream = Stream(tokenizer, ("b", "some longer one"))
    a, b, c = single(tokenizer, "abc")
    stream.push(a, watch=False)
    stream.push(b, watch=False)
    stream.push(c, watch=True)
    assert (stream.shown, stream.stopped) == ("abc", None)


def test_a_stop_string_completed_while_watching_counts_from_its_first_letter(tokenizer: Any) -> None:
    stream = Stream(tokenizer, ("bc",))
    a, b, c = single(tokenizer, "abc")
    stream.push(a, watch=False)
    stream.push(b, watch=False)
    assert stream.shown == "a", "it may still become a stop string"
    stream.push(c, watch=True)
    assert (stream.shown, stream.stopped) == ("a", "bc")


def _expected(pieces: list[str], stop: tuple[str, ...], watch_from: int) -> tuple[str, str | None]:
    """By definition: the first watched token that completes a stop string ends the text before it."""
    text = ""
    for index, piece in enumerate(pieces):
        before, text = len(text), text + piece
        if index >= watch_from:
            ends = [(i, s) for s in stop for i in range(len(text)) if text.startswith(s, i) and i + len(s) > before]
            if ends:
                start, found = min(ends)
                return text[:start], found
    return text, None


@EASY
@given(
    st.lists(st.sampled_from(["a", "b", "c", "ab", "aa", "bc"]), max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3, unique=True),
    st.integers(0, 6),
    st.data(),
)
def test_stopping_equals_its_definition(
    tokenizer: Any, pieces: list[str], stop: list[str], watch_from: int, data: st.DataObject
) -> None:
    known = [token for piece in pieces for token in ids(tokenizer, piece)]
    pieces = [tokenizer.decode([token]) for token in known]
    stream = Stream(tokenizer, tuple(stop))
    text, stopped = _expected(pieces, tuple(stop), watch_from)
    for index, token in enumerate(known):
        stream.push(token, data.draw(origins), watch=index >= watch_from)
        assert text.startswith(stream.shown), "showed what had to be taken back"
        if stream.stopped is not None:
            break
    stream.finish()
    assert (stream.shown, stream.text.text, stream.stopped) == (text, text, stopped)
    assert all(text for text, _ in stream.spans)


def test_pieces_only_ever_add(tokenizer: Any) -> None:
    stream = Stream(tokenizer, ("def", "\n\n"))
    seen = [""]
    for token in ids(tokenizer, "class A:\n    de = 1\n    x = 'déf'\n"):
        stream.push(token)
        seen.append(stream.shown)
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))


def test_special_tokens_that_are_asked_for_stand_in_the_text() -> None:
    """Behind half a character, between words, and at the end; others do not stand there."""
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    special, (half, rest) = tokenizer.eos_token_id, tokenizer.encode("é")
    tokens = [*tokenizer.encode("a b"), special, half, special, *tokenizer.encode(" c"), half, rest, special]
    mark = tokenizer.decode([special])
    for shown, want in ((frozenset({special}), f"a b{mark}\ufffd{mark} cé{mark}"), (frozenset[int](), "a b\ufffd cé")):
        text = TextStream(tokenizer, (), shown)
        for token in tokens:
            text.push(token, 0, watch=True)
        text.finish()
        assert text.text == want
        assert "".join(text.texts()) == want

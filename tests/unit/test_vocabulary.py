"""What tokens write, which tokens write given bytes, and how a text reads in the tokens of another model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.config import default_model
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.model.vocabulary import ModelVocabulary, whole_characters
from outrider.propose.bridge import SameVocabulary, SharedTokens, report
from tests.model.vocabularies import sentencepiece_like, words_alone
from tests.unit.builders import make_sequence

ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEXT = "def héllo(wörld): return 'the 世界 🎉 accomplishment'\n\n\tthe end"


def byte_level() -> ModelVocabulary:
    return ModelVocabulary(AutoTokenizer.from_pretrained(default_model("target")), "byte-level")


def spaced() -> ModelVocabulary:
    return ModelVocabulary(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like(), **ENDS), "spaced")


VOCABULARIES = {"byte-level": byte_level(), "spaced": spaced()}


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
@given(data=st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
@settings(max_examples=80, deadline=None)
def test_any_bytes_are_spelled(vocabulary: ModelVocabulary, data: bytes) -> None:
    assert vocabulary.written(vocabulary.spell(data)) == data


@given(st.text(max_size=12), st.integers(0, 60), st.integers(0, 60))
def test_whole_characters(text: str, cut: int, end: int) -> None:
    data = text.encode()[cut:end]
    start, stop = whole_characters(data)
    assert data[start:stop].decode() in text
    assert max(start, len(data) - stop) <= 3
    assert (start, stop) == (0, len(data)) or not _is_text(data)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_pieces_of_a_byte_level_tokenizer_are_those_that_another_library_reads() -> None:
    hf = pytest.importorskip("llguidance.hf")
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    theirs = hf.from_tokenizer(tokenizer)
    ours = VOCABULARIES["byte-level"].pieces
    assert ours[0] is None
    assert theirs.is_special_token(0)
    read = {id: theirs.decode_bytes([id]) for id in range(1, len(ours))}
    assert {id for id in read if read[id] != ours[id]} == {ours.index(b"\xff")}, "with that byte it marks special tokens"


def test_spaces_and_bytes_of_a_tokenizer_that_writes_marks_for_spaces() -> None:
    vocabulary = VOCABULARIES["spaced"]
    ids = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like(), **ENDS).get_vocab()
    assert vocabulary.pieces[ids["▁the"]] == b" the"
    assert vocabulary.pieces[ids["<0x0A>"]] == b"\n"
    assert vocabulary.pieces[ids["<0x61>"]] == vocabulary.pieces[ids["a"]] == b"a"
    assert vocabulary.writer[b"a"] == ids["a"], "the one that the tokenizer itself takes"
    assert vocabulary.pieces[ids["</s>"]] is None
    assert vocabulary.spell(b"the") == [ids["the"]], "without the space that the tokenizer puts before a text"
    assert vocabulary.spell(b" the") == [ids["▁the"]]


def test_tokens_that_the_model_has_no_logits_for_are_never_taken() -> None:
    narrow = ModelVocabulary(AutoTokenizer.from_pretrained(default_model("target")), "narrow", 2000)
    full = VOCABULARIES["byte-level"]
    for id in range(3000, 3100):
        piece = full.written([id])
        assert max(narrow.spell(piece)) < 2000
        assert narrow.written(narrow.spell(piece)) == piece
    assert any(max(full.spell(full.written([id]))) >= 2000 for id in range(3000, 3100))


def test_an_added_token_is_as_it_is_written() -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    tokenizer.add_tokens(["né", "<role>"])
    vocabulary = ModelVocabulary(tokenizer, "added")
    assert vocabulary.pieces[-2:] == ["né".encode(), b"<role>"]


def test_ends_are_twins_and_no_token_is_the_twin_of_two() -> None:
    bridge = SharedTokens(VOCABULARIES["byte-level"], VOCABULARIES["spaced"])
    assert bridge.twins[0] == VOCABULARIES["spaced"].eos
    found = [twin for twin in bridge.twins if twin >= 0]
    assert len(found) == len(set(found))
    for id, twin in enumerate(bridge.twins):
        if id and twin >= 0:
            assert bridge.target.pieces[id] == bridge.draft.pieces[twin]


def test_logits_go_where_the_tokens_are() -> None:
    bridge = SharedTokens(VOCABULARIES["spaced"], VOCABULARIES["byte-level"])
    logits = torch.randn(3, bridge.draft.size, dtype=torch.float64)
    wide = bridge.logits(logits)
    assert wide.shape == (3, bridge.target.size)
    for id, twin in enumerate(bridge.twins):
        if twin >= 0:
            assert torch.equal(wide[:, id], logits[:, twin])
    outside = [id for id, twin in enumerate(bridge.twins) if twin < 0]
    assert outside
    probs = wide.softmax(-1)
    assert float(probs[:, outside].sum()) == 0.0
    assert torch.allclose(wide[:, outside].softmax(-1), torch.full((3, len(outside)), 1 / len(outside), dtype=wide.dtype))


def test_logits_of_one_vocabulary_are_padded_or_left_alone() -> None:
    logits = torch.randn(2, 5)
    assert SameVocabulary(5).logits(logits) is logits
    assert SameVocabulary(7).logits(logits)[:, 5:].tolist() == [[float("-inf")] * 2] * 2
    assert torch.equal(SameVocabulary(3).logits(logits), logits[:, :3])


# -- reading -----------------------------------------------------------------------------------------------------------


def cut_bridge(*, by_text: bool = False) -> SharedTokens:
    return SharedTokens(VOCABULARIES["byte-level"], VOCABULARIES["spaced"], by_text=by_text)


def read(bridge: SharedTokens, tokens: list[int], path: tuple[int, ...] = ()) -> tuple[list[int], list[int]]:
    settled, loose = bridge.text(make_sequence(tokens).view, path)
    return list(settled), list(loose)


@pytest.mark.parametrize("by_text", [False, True])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_text_reads_the_same_however_it_was_asked_for(by_text: bool, data: st.DataObject) -> None:
    """Token by token, in leaps, or late; and what is settled stays."""
    bridge = cut_bridge(by_text=by_text)
    target, draft = bridge.target, bridge.draft
    tokens = data.draw(st.lists(st.integers(1, 400) | st.integers(1, target.size - 1), min_size=1, max_size=60))
    seq = make_sequence(tokens[:1])
    before: list[int] = []
    while True:
        path = tuple(data.draw(st.lists(st.integers(1, target.size - 1), max_size=3)))
        text = list(seq.token_ids)
        settled, loose = bridge.text(seq.view, path)
        settled = list(settled)
        assert (settled, list(loose)) == read(bridge, text, path)
        assert settled[: len(before)] == before
        assert draft.written([*settled, *loose]) == target.written([*text, *path]), "no text is lost"
        if len(text) == len(tokens):
            break
        before = settled
        seq.token_ids += tokens[len(text) : len(text) + data.draw(st.integers(1, 5))]


def test_shared_tokens_read_as_they_are_and_others_as_the_drafts_own_tokenizer_writes_them() -> None:
    bridge = cut_bridge()
    draft, target = bridge.draft, bridge.target
    shared = target.writer[b" the"]
    assert bridge.twins[shared] >= 0
    outside = target.writer[b" import"]
    assert bridge.twins[outside] < 0
    settled, loose = read(bridge, [shared, outside])
    assert [*settled, *loose] == [bridge.twins[shared], *draft.spell(b" import")]
    assert read(cut_bridge(by_text=True), target.spell(b"re") + target.spell(b"t"))[1] == draft.spell(b"ret")


def test_a_drafted_token_that_the_draft_lacks_stands_as_the_last_that_writes_it() -> None:
    bridge = cut_bridge()
    outside = bridge.target.writer[b" import"]
    assert bridge.token(outside) == bridge.draft.spell(b" import")[-1]
    assert all(0 <= bridge.token(id) < bridge.draft.size for id in range(bridge.target.size))


def test_a_character_in_pieces_becomes_whole() -> None:
    bridge = cut_bridge()
    first, second = (bridge.target.writer[byte] for byte in ("é".encode()[:1], "é".encode()[1:]))
    half, whole = read(bridge, [first]), read(bridge, [first, second])
    assert bridge.draft.written(half[1]) == "é".encode()[:1]
    assert whole == ([], [bridge.draft.writer["é".encode()]])


def test_a_step_costs_the_same_however_long_the_text_is() -> None:
    for by_text in (False, True):
        bridge = cut_bridge(by_text=by_text)
        tokens = bridge.target.spell(TEXT.encode() * 40)
        settled, loose = read(bridge, tokens)
        assert len(settled) > 1000
        assert len(bridge.draft.written(loose)) <= 96


def test_what_the_drafts_tokenizer_puts_before_a_text_comes_first_and_once() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = sentencepiece_like()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    opening = ModelVocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ENDS), "opening")
    token = VOCABULARIES["byte-level"].writer[b" the"]
    assert opening.opening == [1]
    assert read(SharedTokens(VOCABULARIES["byte-level"], opening), [token])[0][0] == 1
    same = SharedTokens(opening, opening)
    assert read(same, [1, opening.writer[b"a"]])[0] == [1, opening.writer[b"a"]]


def test_special_tokens_that_the_draft_lacks_read_as_their_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<the>"]})
    target = ModelVocabulary(tokenizer, "with a role")
    bridge = SharedTokens(target, VOCABULARIES["spaced"])
    settled, loose = read(bridge, [target.size - 1])
    assert bridge.draft.written([*settled, *loose]) == b"<the>"


# -- what is kept of a text that may still change -----------------------------------------------------------------------


def test_what_may_still_change_stays_ahead_of_the_text() -> None:
    state = StateMemory(BlockManager(16, 4)).state()
    state.open([1, 2])
    assert state.reserve(12)
    state.commit(0, range(2))
    state.run_ahead([3, 4, 5, 6])
    state.roll_back([1, 2, 3], [4, 5, 9, 9])
    assert (state.num_computed, state.ahead) == (3, [4, 5])
    state.roll_back([1, 2, 3, 4], [5])
    assert (state.num_computed, state.ahead) == (4, []), "the last row is needed again"
    state.roll_back([1, 2, 3, 4, 5, 6])
    assert (state.num_computed, state.ahead) == (4, [])


# -- bad input and reports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [None, SimpleNamespace(bos_token_id=None)])
def test_no_tokenizer_is_an_error_that_says_so(tokenizer: Any) -> None:
    with pytest.raises(ContradictionError, match="compared by what their tokens write"):
        ModelVocabulary(tokenizer, "mute")


def test_the_report() -> None:
    target, draft = VOCABULARIES["byte-level"], VOCABULARIES["spaced"]
    found = report(target, draft, " the import the import the accomplishment")
    assert found.num_shared == sum(twin >= 0 for twin in SharedTokens(target, draft).twins)
    assert found.outside[0] == " import"
    assert 0 < found.share_of_bytes < found.share_of_text < 1
    assert found.match == "tokens"
    assert not found.same_ids
    same = report(target, target, TEXT)
    assert (same.share_of_target, same.share_of_text, same.share_of_bytes, same.outside) == (1.0, 1.0, 1.0, ())
    assert same.same_ids


def test_the_report_of_a_pair_that_shares_little_or_nothing() -> None:
    def words(*texts: str) -> ModelVocabulary:
        return ModelVocabulary(PreTrainedTokenizerFast(tokenizer_object=words_alone(*texts), unk_token="<unk>"), "words")

    target = VOCABULARIES["byte-level"]
    assert report(target, words("zzzzzzzzz"), "the").match == "text"
    assert report(words("aa", "bb"), words("cc"), " aa bb").match is None
    with pytest.raises(InvalidParameterError, match="no text"):
        report(target, target, "")

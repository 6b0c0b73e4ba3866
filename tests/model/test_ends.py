"""Where a text ends, also in the middle of a draft, and what a stream may show before it does."""

from __future__ import annotations

import pytest

from outrider import LLM, Ngram, SamplingParams, SpeculationConfig, TokenOrigin
from outrider.config import default_model
from outrider.engine.admission import MAX_STOP_CHARACTERS
from outrider.engine.text import TextStream
from outrider.errors import InvalidParameterError
from tests.model.core import core

PROMPT = "def read(self):\n    return self."


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculation="draft_model", dtype="float64")


def speculations() -> list[SpeculationConfig | str]:
    return ["none", SpeculationConfig(method=Ngram(min_match=1)), SpeculationConfig(method="draft_model")]


@pytest.mark.parametrize("seed", core(range(3), [0]))
def test_stop_tokens_end_the_text_inside_a_draft(llm: LLM, seed: int) -> None:
    whole = llm.generate(PROMPT, SamplingParams(seed=seed, max_tokens=30), speculation="none")[0].token_ids
    for stop in (whole[9], whole[20]):
        want = whole[: whole.index(stop) + 1]
        for speculation in speculations():
            params = SamplingParams(seed=seed, max_tokens=30, stop_token_ids=(stop,))
            output = llm.generate(PROMPT, params, speculation=speculation)[0]
            assert output.token_ids == want
            assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
            assert len(output.origins) == len(want)


def test_end_of_sequence_ends_the_text_unless_ignored(llm: LLM) -> None:
    eos = next(iter(llm.engine.runner.loaded.eos_token_ids))
    params = SamplingParams(seed=1, max_tokens=300, temperature=1.2, top_k=0)
    prompt = "if __name__ == '__main__':\n    unittest.main()\n"
    for seed in range(12):
        ended = llm.generate(prompt, params.replace(seed=seed, max_tokens=40))[0]
        if ended.finish_reason == "stop":
            break
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == eos
    assert "<|end|>" not in ended.text
    longer = llm.generate(prompt, params.replace(seed=seed, max_tokens=40, ignore_eos=True))[0]
    assert longer.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert longer.finish_reason == "length"


@pytest.mark.parametrize("speculation", speculations())
def test_stop_strings_that_span_tokens_and_rounds(llm: LLM, speculation: SpeculationConfig | str) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    whole = llm.generate(PROMPT, params, speculation="none")[0].text
    stop = whole[11:19]
    output = llm.generate(PROMPT, params.replace(stop=stop), speculation=speculation)[0]
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_the_texts_of_a_trace_are_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=3.0, seed=1)  # hot enough for parts of characters
    for stop in ((), ("e",)):
        output = llm.generate("x = 'é", params.replace(stop=stop), trace=True)[0].outputs[0]
        assert output.texts is not None
        assert "".join(output.texts) == output.text
        assert len(output.texts) == len(output.token_ids)


@pytest.mark.parametrize("stop", [(), ("self.", "\n\n"), ("zzz",)])
def test_streamed_pieces_add_up(llm: LLM, stop: tuple[str, ...]) -> None:
    params = SamplingParams(seed=4, max_tokens=50, stop=stop)
    pieces = list(llm.stream(PROMPT, params))
    final = pieces[-1].output
    assert final is not None
    assert "".join(p.text for p in pieces) == final.text
    assert "".join(text for p in pieces for text, _ in p.spans) == final.text
    assert tuple(t for p in pieces for t in p.token_ids) == final.token_ids
    assert tuple(o for p in pieces for o in p.origins) == final.origins
    assert final.text == llm.generate(PROMPT, params)[0].text
    assert not any(s in final.text for s in stop)


def test_origins_agree_with_the_counts(llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(seed=2, max_tokens=40))[0]
    stats = output.stats
    accepted = sum(o is TokenOrigin.ACCEPTED for o in output.origins)
    assert accepted == stats.num_accepted_tokens
    assert output.origins[0] is TokenOrigin.PLAIN
    assert stats.num_drafts == sum(stats.acceptance_histogram)
    assert stats.num_draft_tokens == sum(stats.drafted_per_position)
    assert stats.num_accepted_tokens == sum(stats.accepted_per_position)
    assert stats.mean_acceptance_length == pytest.approx(1 + accepted / stats.num_drafts)


@pytest.mark.parametrize("speculation", speculations())
def test_min_tokens_holds_along_the_draft(llm: LLM, speculation: SpeculationConfig | str) -> None:
    whole = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20), speculation="none")[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=tuple(set(whole[:6])), min_tokens=4)
    output = llm.generate(PROMPT, params, speculation=speculation)[0]
    assert not set(output.token_ids[:4]) & set(whole[:6])
    assert output.token_ids == llm.generate(PROMPT, params, speculation="none")[0].token_ids


def stream(*stop: str) -> TextStream:
    from transformers import AutoTokenizer

    return TextStream(AutoTokenizer.from_pretrained(default_model("target")), stop)


def push_all(text: TextStream, token_ids: list[int]) -> list[str]:
    shown = []
    for token in token_ids:
        if text.push(token, TokenOrigin.PLAIN, watch=True):
            text.finish()
            break
        shown.append("".join(piece for piece, _ in text.release()))
    text.finish()
    shown.append("".join(piece for piece, _ in text.release()))
    return shown


def test_split_characters_are_held_back() -> None:
    text = stream()
    ids = text._tokenizer("x = '日本語 🎉 é'")["input_ids"]  # type: ignore[misc]
    assert len(ids) > 15, "bytes of one character must lie in several tokens"
    shown = push_all(text, ids)
    assert "".join(shown) == "x = '日本語 🎉 é'"
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_that_never_becomes_whole_shows_at_the_end() -> None:
    text = stream()
    ids = text._tokenizer("ok 🎉")["input_ids"][:-1]  # type: ignore[misc]
    shown = push_all(text, ids)
    assert "\ufffd" not in "".join(shown[:-1])
    assert "".join(shown) == text._tokenizer.decode(ids)  # type: ignore[union-attr]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    text = stream("return None")
    ids = text._tokenizer("    return Not\n    return None")["input_ids"]  # type: ignore[misc]
    shown = push_all(text, ids)
    assert "".join(shown) == "    return Not\n    "
    assert not any(piece.endswith("return ") for piece in shown)


def test_more_stop_strings_than_are_reasonable_fail_their_own_request(llm: LLM) -> None:
    most = SamplingParams(seed=1, max_tokens=3, stop=["\0" * MAX_STOP_CHARACTERS])
    more = most.replace(stop=["\0" * MAX_STOP_CHARACTERS, "a"])
    written, refused = llm.generate([PROMPT, PROMPT], [most, more])
    assert len(written.token_ids) == 3
    assert isinstance(refused.error, InvalidParameterError)
    assert (refused.error.field, refused.error.value) == ("stop", more.stop)
    assert "100,001 characters" in refused.error.problem
    assert "100,000 characters" in refused.error.remedy

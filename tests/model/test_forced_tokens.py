"""Forced tokens: texts are the same with and without them, in fewer passes, whoever drafts behind them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from outrider import LLM, CompletionOutput, Ngram, SamplingParams, StructuredOutputs, Suffix
from outrider.engine.drafting import planning
from outrider.errors import NoTokenLeftError
from outrider.model import keeping
from outrider.params import TokenOrigin

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "temperature": {"type": "integer", "minimum": 0, "maximum": 99},
        "weather_report": {"enum": ["sunny", "cloudy"]},
        "place": {"type": "string", "maxLength": 5},
    },
    "required": ["temperature", "weather_report", "place"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
STRUCTURE = StructuredOutputs(json_schema=SCHEMA)
PROMPTS = ["def weather():\n    return ", "x = "]
METHODS: dict[str, Any] = {
    "none": "none",
    "draft_model": {"method": "draft_model", "num_draft_tokens": 3},
    "tree": {"method": "draft_model", "tree": (2, 2)},
    "ngram": {"method": Ngram(min_match=1), "num_draft_tokens": 3},
    "suffix": {"method": Suffix(min_match=1, branches=True)},
    "token_recycling": "token_recycling",
    "lookahead": {"method": "lookahead", "window": 2, "ngram": 3},
    "early_exit": {"method": "early_exit", "num_draft_tokens": 2},
    "merge": {"method": "merge", "methods": ["suffix", "draft_model"]},
    "then": {"method": "then", "methods": ["suffix", "draft_model"]},
    "auto": "auto",
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 3},
    "three samples, seeded": {"seed": 3, "n": 3},
    "penalties": {"seed": 3, "frequency_penalty": 0.7, "logit_bias": {16: 3.0}},
    "a stop string among them": {"seed": 3, "stop": ("ther_rep",)},
    "an end among them": {"seed": 3, "max_tokens": 9},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(keeping.VARIABLE, "off")
        with LLM(dtype="float64", block_size=4, max_num_batched_tokens=64) as made:
            yield made


def texts(llm: LLM, method: str, sampling: dict[str, Any]) -> list[CompletionOutput]:
    params = SamplingParams(**{"structured_outputs": STRUCTURE, "max_tokens": 40, **sampling})
    return [sample for output in llm.generate(PROMPTS, params, speculation=METHODS[method]) for sample in output.outputs]


def without_forced(llm: LLM, patch: pytest.MonkeyPatch, sampling: dict[str, Any]) -> list[CompletionOutput]:
    """Plain decoding with a pass for each token."""
    patch.setattr(planning, "MOST_FORCED", 0)
    found = texts(llm, "none", sampling)
    patch.undo()
    assert all(set(sample.origins) == {TokenOrigin.PLAIN} for sample in found)
    return found


@pytest.mark.parametrize("name", SAMPLINGS)
def test_texts_are_the_same_with_forced_tokens(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = without_forced(llm, monkeypatch, SAMPLINGS[name])
    for method in METHODS if name == "seeded" else ("none", "draft_model"):
        for before, after in zip(plain, texts(llm, method, SAMPLINGS[name]), strict=True):
            assert (after.token_ids, after.text) == (before.token_ids, before.text), method
            assert (after.finish_reason, after.stop_reason) == (before.finish_reason, before.stop_reason), method
            assert after.stats.num_proposer_faults == 0
            stats = after.stats
            assert stats.accepted_by_method["forced"] > 0, method
            assert stats.num_target_passes == len(after.token_ids) - stats.num_accepted_tokens + _lost(after), method
    llm.engine.check_integrity()
    llm.engine.check_rest()


def _lost(output: CompletionOutput) -> int:
    """A text may end with an accepted token, and then its last pass has written one token less."""
    return int(output.origins[-1] is TokenOrigin.ACCEPTED)


def test_a_whole_text_needs_a_pass_for_each_choice(llm: LLM) -> None:
    for output in texts(llm, "none", {"seed": 1}):
        json.loads(output.text)
        stats = output.stats
        assert stats.drafted_by_method == stats.accepted_by_method == {"forced": stats.num_accepted_tokens}
        assert stats.num_accepted_tokens > 0.5 * len(output.token_ids)
        assert output.origins[0] is TokenOrigin.ACCEPTED, "the last pass over the prompt verifies what begins the text"
        assert output.origins[-1] is TokenOrigin.BONUS, "the end needs no row"


@pytest.mark.parametrize("method", ["merge", "auto", "none"])
def test_every_token_has_the_member_that_drafted_it(llm: LLM, method: str) -> None:
    params = SamplingParams(structured_outputs=STRUCTURE, max_tokens=40, seed=3)
    pieces = list(llm.stream(PROMPTS[0], params, speculation=METHODS[method]))
    assert pieces[-1].output is not None
    final = pieces[-1].output
    drafted = Counter(member for member in final.members if member is not None)
    assert [member is not None for member in final.members] == [o is TokenOrigin.ACCEPTED for o in final.origins]
    assert drafted["forced"] == final.stats.accepted_by_method["forced"] > 0
    assert drafted.keys() <= final.stats.accepted_by_method.keys()
    shown = {member for piece in pieces for member in piece.span_members}
    assert shown == set(final.members)
    assert all(len(piece.spans) == len(piece.span_members) for piece in pieces)


def test_what_something_else_forbids_is_not_written(llm: LLM) -> None:
    """Forced by the structure, and forbidden by another parameter: no token is left, as without drafts."""
    text = texts(llm, "none", {"seed": 1})[0]
    forced = text.token_ids[text.origins.index(TokenOrigin.ACCEPTED)]
    params = SamplingParams(structured_outputs=STRUCTURE, max_tokens=60, bad_words_ids=((forced,),))
    (output,) = llm.generate(PROMPTS[:1], params, speculation="none")
    assert isinstance(output.error, NoTokenLeftError)


def test_rows_and_memory_bound_what_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted, in few rows and in little memory, the texts are the same."""
    monkeypatch.setenv(keeping.VARIABLE, "off")
    params = SamplingParams(structured_outputs=STRUCTURE, max_tokens=60, seed=2, n=2)
    few = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 100, "kv_cache_tokens": 160}
    with LLM(dtype="float64", block_size=4, **few) as tight:
        found = [s for o in tight.generate(PROMPTS * 2, params, speculation="none") for s in o.outputs]
        assert tight.stats.finished.num_preemptions > 0
        tight.engine.check_rest()
    with LLM(dtype="float64", block_size=4) as wide:
        wanted = [s for o in wide.generate(PROMPTS * 2, params, speculation="none") for s in o.outputs]
    assert [s.token_ids for s in found] == [s.token_ids for s in wanted]


def test_a_trace_names_what_was_forced(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=STRUCTURE, max_tokens=60, seed=1)
    output = llm.generate(PROMPTS[0], params, speculation=METHODS["draft_model"], trace=True)[0].first
    assert output.rounds is not None
    named = [
        (by.method, draw) for found in output.rounds for by in found.drafted_by for draw in found.draws[by.first : by.end]
    ]
    forced = [draw for method, draw in named if method == "forced"]
    assert len(forced) == output.stats.drafted_by_method["forced"] > 0
    assert {draw.law for draw in forced} == {"opaque"}
    assert {draw.law for method, draw in named if method == "draft_model"} == {"coupled"}

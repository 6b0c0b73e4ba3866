"""Merged and chained methods over real models: what members share, and what is said of each."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import InputError
from outrider.propose.draft_model import DraftModelProposer
from outrider.results import RoundTrace

PROMPTS = ["def main(", "x = [1, 2, 3, 1, 2, 3,"]
MODEL = {"method": "draft_model", "num_draft_tokens": 3}
SURE = {**MODEL, "min_confidence": 0.2}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float64", block_size=8, kv_cache_tokens=2000)


def rounds(outputs: list) -> list[RoundTrace]:
    return [found for output in outputs for found in output.outputs[0].rounds]


def test_members_with_one_model_load_it_once_and_share_its_memory(llm: LLM) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=12), speculation={"method": "merge", "methods": [MODEL, SURE, "ngram"]})
    models = [each for each in llm.proposers if isinstance(each, DraftModelProposer)]
    assert len(models) == 2
    assert len({id(each.runner) for each in models}) == 1
    llm.engine.check_rest()


def test_counts_and_traces_are_by_member(llm: LLM) -> None:
    asked = {"method": "merge", "methods": [MODEL, {"method": "suffix", "min_match": 1}]}
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, seed=3), speculation=asked, trace=True)
    stats = [output.stats for output in outputs]
    assert set(stats[1].drafted_by_method) == {"draft_model", "suffix"}
    for each in stats:
        assert all(each.accepted_by_method[name] <= each.drafted_by_method[name] for name in each.drafted_by_method)
        assert sum(each.accepted_by_method.values()) >= each.num_accepted_tokens
        assert sum(each.drafted_by_method.values()) >= each.num_draft_tokens
        assert each.num_proposer_faults == 0
    both = [found for found in rounds(outputs) if len(found.drafted_by) == 2]
    assert any(len(found.draws) > len(found.token_ids) for found in both), "some tokens were proposed by both"
    for found in both:
        assert [part.first for part in found.drafted_by] == [0, found.drafted_by[0].end]
        assert found.drafted_by[-1].end == len(found.draws)
        assert {draw.node for draw in found.draws} == set(range(len(found.token_ids)))
        assert len(set(zip(found.parents, found.token_ids, strict=True))) == len(found.token_ids)


def test_a_model_that_is_missing_is_named_by_its_place(llm: LLM) -> None:
    asked = {"method": "merge", "methods": ["ngram", {"method": "draft_model", "model": "/no/such/folder"}]}
    with pytest.raises(InputError) as raised:
        llm.load_method(asked)
    assert raised.value.field.startswith("methods.1.")

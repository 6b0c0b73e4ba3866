"""The engine chooses among methods that are made of others: what it drafts, loads and learns, by member."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.engine.drafting import choosing
from outrider.errors import InputError
from outrider.govern.costs import CostModel, CostTable, StepTimes, StepWork
from outrider.govern.decision import Decision
from outrider.govern.exploration import ExplorationBudget
from outrider.govern.governor import HOLDS, Governor
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.model import keeping
from outrider.model.runner import ModelRunner
from outrider.propose.draft_model import DraftModelProposer

COPY = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
LOOKUP = {"method": "ngram", "min_match": 1}
#: Rows cost nothing, so that whatever stands pays.
FREE = CostTable(dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 1.0), 0.0, {"draft_model": {1: 0.001, 64: 0.001}})


def steady(work: StepWork, times: StepTimes) -> StepTimes:
    return StepTimes(0.01 if work.texts else 0.0001, 1.0, 0.01)


@pytest.fixture(autouse=True)
def _no_costs_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keeping.VARIABLE, "off")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("tiny")
    yield save_tiny_llama(folder / "target", 1), save_tiny_llama(folder / "draft", 2)
    torch.set_num_threads(threads)


def merge(*members: Any, **more: Any) -> dict[str, Any]:
    return {"method": "merge", "methods": list(members), **more}


def chosen_for(target: str, *choices: Any) -> LLM:
    llm = LLM(target, dtype="float64", block_size=8, speculation={"method": "auto", "methods": list(choices)})
    llm.engine.drafting.script(FREE, steady)
    return llm


def governor_of(llm: LLM) -> Governor:
    return llm.engine.drafting._choice._sets.alive[-1].governor


@pytest.mark.parametrize("params", [{"seed": 3}, {"temperature": 0.0}], ids=["seeded", "greedy"])
@pytest.mark.parametrize("kind", ["merge", "then", "staged beside a merge"], ids=["merge", "then", "staged beside a merge"])
def test_it_writes_what_plain_decoding_writes(pair: tuple[str, str], kind: str, params: dict[str, float]) -> None:
    model = {"method": "draft_model", "model": pair[1]}
    stage = {**model, "method": "staged", "drafter": LOOKUP}
    choices = {
        "merge": [merge(LOOKUP, model)],
        "then": [{"method": "then", "methods": [{**LOOKUP, "num_draft_tokens": 1}, model]}],
        "staged beside a merge": [stage, merge(LOOKUP, {**stage, "num_draft_tokens": 2})],
    }
    with chosen_for(pair[0], *choices[kind]) as llm:
        sampling = SamplingParams(max_tokens=40, **params)
        prompts = [COPY, COPY[1:], [0]]
        chosen = llm.generate(prompts, sampling)
        assert sum(llm.stats.chosen[name, rows] for name, rows in llm.stats.chosen if name in (kind, "staged", "merge"))
        plain = llm.generate(prompts, sampling, speculation="none")
        assert [output.token_ids for output in chosen] == [output.token_ids for output in plain]
        assert sum(output.stats.num_proposer_faults for output in chosen) == 0
        models = [each for each in governor_of(llm).candidates.values() if each.composite is None and not each.lookup]
        assert models
        assert all(each.scored for each in models)
        llm.engine.check_integrity()
        llm.engine.check_rest()


def test_the_time_of_a_draft_model_that_drafts_with_the_rows_of_a_lookup_is_its_own(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookup has all rows of a step and finds nothing, so the draft model has them."""
    model, silent = {"method": "draft_model", "model": pair[1]}, {**LOOKUP, "min_match": 5}
    works, planned = list[StepWork](), list[StepWork]()
    observe, begin = Governor.observe_step, ExplorationBudget.begin_step

    def note(self: Governor, work: StepWork, times: StepTimes) -> None:
        works.append(work)
        observe(self, work, times)

    def note_plan(self: ExplorationBudget, work: StepWork, costs: CostModel, *, promises_much: bool) -> bool:
        planned.append(work)
        return begin(self, work, costs, promises_much=promises_much)

    monkeypatch.setattr(Governor, "observe_step", note)
    monkeypatch.setattr(ExplorationBudget, "begin_step", note_plan)
    members = [{**member, "num_draft_tokens": 3} for member in (silent, model)]
    with chosen_for(pair[0], {"method": "then", "methods": members, "num_draft_tokens": 3}) as llm:
        llm.generate([[0]], SamplingParams(max_tokens=30, temperature=0.0))
    for found in (works, planned):
        drafted = [{each.method: each.levels for each in work.drafts} for work in found if work.drafts]
        assert drafted[0] == {"ngram": 3, "draft_model": 3}
    assert all(len(work.drafts) == 2 for work in planned if work.drafts), "a lookup may find nothing in any step"


def test_one_draft_model_is_loaded_once_and_has_one_memory(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in a merge, behind a lookup and in a stage: one model, one KV memory, as many blocks as one has."""
    made, build = list[weakref.ref[ModelRunner]](), ModelRunner.__init__

    def count(self: ModelRunner, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(self))
        build(self, *args, **options)

    monkeypatch.setattr(ModelRunner, "__init__", count)
    model = {"method": "draft_model", "model": pair[1]}
    stage = {"method": "staged", "model": pair[1], "drafter": LOOKUP}
    sure = {**model, "min_confidence": 0.2}
    with chosen_for(pair[0], model, merge(LOOKUP, model), {"method": "then", "methods": [LOOKUP, sure]}, stage) as llm:
        llm.generate([COPY], SamplingParams(max_tokens=30))
        proposers = [each for each in llm.proposers if isinstance(each, DraftModelProposer)]
        assert len(proposers) == 3, "alone and in the merge they are one; confidence and the stage make others"
        gc.collect()  # those with which passes were timed
        assert sum(each() is not None for each in made) == 2, "the target's and the draft model's"
        assert len({id(each.runner) for each in proposers}) == 1
        weights = {id(each.runner.loaded.model.lm_head.weight) for each in proposers}
        assert len(weights) == 1
        draft = proposers[0].runner
        assert len({id(each.runner.blocks) for each in proposers}) == 1
        assert draft.blocks.num_blocks == llm.engine.runner.blocks.num_blocks
        assert draft.blocks.num_free == draft.blocks.num_blocks, "what texts took is given back, once"


def test_members_that_a_request_may_choose_alone_are_learnt_of_in_the_merge_too(pair: tuple[str, str]) -> None:
    model = {"method": "draft_model", "model": pair[1]}
    with chosen_for(pair[0], merge(LOOKUP, model, num_draft_tokens=4), {**model, "num_draft_tokens": 3}) as llm:
        governor = governor_of(llm)
        assert set(governor.candidates) == {"merge", "draft_model", "ngram"}
        assert [name for name, each in governor.candidates.items() if each.alone] == ["draft_model", "merge"]
        llm.generate([COPY] * 2, SamplingParams(max_tokens=60, seed=1))
        assert sum(count for (name, _), count in llm.stats.chosen.items() if name == "merge") > 10
        assert governor.acceptance.version("ngram") > 10
        assert governor.acceptance.version("draft_model") > 10
        assert governor.acceptance.version("merge") == 0
        drafted = llm.stats.finished.drafted_by_method
        assert drafted["ngram"] > 0
        assert drafted["draft_model"] > 0


def scored(llm: LLM, monkeypatch: pytest.MonkeyPatch, member: str, **params: Any) -> list[float]:
    """What a member of a merge was found to be worth, text position by text position."""
    found: list[float] = []
    real = Governor.observe_members
    monkeypatch.setattr(Governor, "_decision", lambda *args, measuring: Decision("merge", 4, "for the test"))

    def observe(governor: Governor, request: int, method: str, drafts: Any, accepted: int) -> None:
        found.extend(score for draft in drafts if draft.member == member for score in draft.scores)
        real(governor, request, method, drafts, accepted)

    monkeypatch.setattr(Governor, "observe_members", observe)
    llm.generate([COPY] * 3, SamplingParams(max_tokens=60, **params))
    return found


def two_drawn(pair: tuple[str, str]) -> LLM:
    """The second member is the target: alone all that it draws stands. In the merge the other is tested first."""
    models = [{"method": "draft_model", "model": model, "num_draft_tokens": 2} for model in reversed(pair)]
    return chosen_for(pair[0], merge(*models))


def test_a_drawn_member_is_worth_what_it_is_alone(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with two_drawn(pair) as llm:
        scores = scored(llm, monkeypatch, "draft_model 2")
    assert len(scores) > 50
    assert scores == pytest.approx([1.0] * len(scores))


def test_planted_whether_a_contested_token_stood(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_is_contested", lambda *args: False)
    with two_drawn(pair) as llm:
        assert min(scored(llm, monkeypatch, "draft_model 2")) == 0.0


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3}], ids=["greedy", "seeded"])
def test_guesses_are_worth_what_stood(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    model = {"method": "draft_model", "model": pair[1], "num_draft_tokens": 1}
    with chosen_for(pair[0], merge(LOOKUP, model, num_draft_tokens=4)) as llm:
        scores = {name: scored(llm, monkeypatch, name, **params) for name in ("ngram", "draft_model")}
    assert scores["ngram"]
    assert scores["draft_model"]
    assert {score for found in scores.values() for score in found} == {0.0, 1.0}


def test_a_merge_whose_member_always_fails_is_left_alone(pair: tuple[str, str]) -> None:
    with chosen_for(pair[0], merge(LOOKUP, {"method": "draft_model", "model": pair[1]}), LOOKUP) as llm:
        (broken,) = (each for each in llm.proposers if isinstance(each, DraftModelProposer))
        broken.propose = None  # type: ignore[method-assign, assignment]
        (output,) = llm.generate([COPY], SamplingParams(max_tokens=80, seed=1))
        assert output.error is None
        assert 3 <= output.stats.num_proposer_faults <= 3 + HOLDS
        assert sum(count for (name, _), count in llm.stats.chosen.items() if name == "ngram") > 5


def test_shadows_are_of_members(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is drafted, each member is scored by itself, also one that nobody may choose alone."""
    with chosen_for(pair[0], merge(LOOKUP, {"method": "draft_model", "model": pair[1]})) as llm:
        steep = CostTable({1: 1.0, 2: 50.0, 64: 50.0}, 0.0, {"draft_model": {1: 1e-5, 64: 1e-5}})
        llm.engine.drafting.script(steep, steady)
        llm.generate([COPY], SamplingParams(max_tokens=80, seed=1))
        assert {name for name, _ in llm.stats.chosen} == {"none"}
        acceptance = governor_of(llm).acceptance
        assert acceptance.version("ngram") > 0
        assert acceptance.version("draft_model") > 0


def test_what_cannot_be_used_is_named_by_its_place(pair: tuple[str, str]) -> None:
    other = {"method": "draft_model", "model": "/no/such/folder"}
    with LLM(pair[0], dtype="float64", speculation="none") as llm:
        with pytest.raises(InputError) as raised:
            llm.load_method({"method": "auto", "methods": ["ngram", merge("ngram", other)]})
        assert raised.value.field == "methods.1.methods.1.model"
        with pytest.raises(InputError) as alone:
            llm.load_method({"method": "auto", "methods": ["ngram", {**other, "method": "staged", "drafter": "suffix"}]})
        assert alone.value.field == "methods.1.model"

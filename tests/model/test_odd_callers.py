"""Planners, processors and proposers that do what nobody should: it costs them a draft or their own request, and nobody
else a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from outrider import LLM, Ngram, SamplingParams, SpeculationConfig
from outrider.draft import Draft, Law
from outrider.engine.drafting.planning import as_requested
from outrider.errors import EngineBusyError, InvalidParameterError, ProcessingError, ProposerError
from outrider.propose.base import DraftNoise, ObservedRows, Proposer, ProposeRequest, Requirements
from outrider.propose.settings import Method, ProposerContext
from tests.model import checkpoints

PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 9, 9, 4], [5, 6], [7, 7, 7, 7, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LOOKUP = SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = checkpoints.save("llama", tmp_path_factory.mktemp("target"), seed=1)
    return LLM(path, dtype="float64", block_size=4, prefix_caching=False, speculation="none")


@pytest.fixture(autouse=True)
def nothing_is_lost(llm: LLM) -> Iterator[None]:
    yield
    llm.engine.drafting.planner = as_requested
    llm.engine.check_integrity()
    assert not llm.engine.has_work
    assert llm.engine.runner.blocks.num_free == llm.engine.runner.blocks.num_blocks


@pytest.mark.parametrize("answer", [ValueError("planted"), None, LOOKUP, "ngram", {"method": "ngram"}, ((LOOKUP,),)])
def test_a_planner_that_fails_costs_drafts_and_no_token(llm: LLM, answer: Any) -> None:
    """Also where samples have just forked, and their blocks are about to be copied."""
    want = [[o.token_ids for o in out.outputs] for out in llm.generate(PROMPTS, GREEDY.replace(n=3))]
    calls = []

    def planner(seq: Any) -> Any:
        calls.append(seq)
        if isinstance(answer, Exception):
            raise answer
        return answer

    llm.engine.drafting.planner = planner
    outputs = llm.generate(PROMPTS, GREEDY.replace(n=3))
    assert calls
    assert [[o.token_ids for o in out.outputs] for out in outputs] == want
    assert all(o.stats.num_proposer_faults > 0 for out in outputs for o in out.outputs)


def test_a_planner_cannot_break_the_promise_of_a_seed(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=16)
    plain = [out.token_ids for out in llm.generate(PROMPTS, params)]
    llm.engine.drafting.planner = lambda seq: (LOOKUP.replace(rule="block"), LOOKUP)
    assert [out.token_ids for out in llm.generate(PROMPTS, params)] == plain


class Deep(Method):
    """A chain as long as the budget and the depth allow, whatever shape was asked for."""

    name: ClassVar[str] = "deep"

    def build(self, context: ProposerContext) -> Proposer:
        return DeepProposer()


class DeepProposer(Proposer):
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [Draft.chain([1] * min(r.budget, r.max_depth), Law.OPAQUE) for r in requests]


@pytest.mark.parametrize("family", ["longrope", "gpt2"])
def test_turns_together_stay_within_what_the_model_can_compute(family: str, tmp_path: Any) -> None:
    """On both sides of the length where rotary factors change, and at the end of learned positions."""
    path = checkpoints.save(family, tmp_path, seed=2)
    llm = LLM(path, dtype="float64", speculation="none")
    params = SamplingParams(temperature=0, max_tokens=170, ignore_eos=True)
    plain = [out.token_ids for out in llm.generate(PROMPTS, params)]
    wide = SpeculationConfig(method=Deep(), tree=(2,), num_draft_tokens=10)
    llm.engine.drafting.planner = lambda seq: (wide, wide.replace(num_draft_tokens=12), wide)
    assert [out.token_ids for out in llm.generate(PROMPTS, params)] == plain


@pytest.mark.parametrize("use", ["generate", "stream", "close", "step"])
def test_a_processor_that_uses_the_llm_that_calls_it_fails_its_own_request(llm: LLM, use: str) -> None:
    def meddling(ids: Any, scores: Any) -> Any:
        if use == "generate":
            llm.generate([1, 2], GREEDY)
        elif use == "stream":
            next(llm.stream([1, 2], GREEDY))
        elif use == "close":
            llm.close()
        else:
            llm.engine.step()
        return scores

    want = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    good, bad = llm.generate(PROMPTS[:2], [GREEDY, GREEDY.replace(logits_processors=(meddling,))])
    assert good.token_ids == want
    assert isinstance(bad.error, ProcessingError)
    assert isinstance(bad.error.__cause__, EngineBusyError)


class Odd(Method):
    """Does one odd thing.

    Attributes:
        deed: Which.
    """

    name: ClassVar[str] = "odd"

    deed: str

    def build(self, context: ProposerContext) -> Proposer:
        return OddProposer(self.deed)


class OddProposer(Proposer):
    def __init__(self, deed: str) -> None:
        self.deed = deed
        if deed == "asks for layer 99":
            self.requires = Requirements(aux_layers=(99,))
        elif deed == "asks for a word":
            self.requires = Requirements(aux_layers=("a",))  # type: ignore[arg-type]
        elif deed == "asks for nothing known":
            self.requires = True  # type: ignore[assignment]
        elif deed == "asks for more later":
            self.requires = Requirements(aux_layers=(0,))

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        if self.deed == "frees the target's blocks":
            requests[0].sequence.kv.free()  # type: ignore[attr-defined]
        if self.deed == "empties the block table":
            requests[0].sequence.kv.block_table.clear()  # type: ignore[attr-defined]
        return [Draft.chain([1], Law.OPAQUE) for _ in requests]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        self.requires = Requirements(aux_layers=(99,))


@pytest.mark.parametrize("deed", ["asks for layer 99", "asks for a word", "asks for nothing known"])
def test_what_the_target_cannot_show_is_refused_when_the_proposer_is_built(llm: LLM, deed: str) -> None:
    want = llm.generate(PROMPTS[1], GREEDY)[0].token_ids
    bad, good = llm.generate(PROMPTS[:2], GREEDY, speculation=[Odd(deed=deed), "none"])
    assert isinstance(bad.error, ProposerError)
    assert good.token_ids == want


@pytest.mark.parametrize("deed", ["asks for more later", "frees the target's blocks", "empties the block table"])
def test_an_odd_proposer_costs_no_token(llm: LLM, deed: str) -> None:
    want = [out.token_ids for out in llm.generate(PROMPTS, GREEDY)]
    outputs = llm.generate(PROMPTS, GREEDY, speculation=[Odd(deed=deed), "none", LOOKUP])
    assert [out.token_ids for out in outputs] == want


def test_a_planner_that_names_a_new_method_in_every_round_keeps_few_alive(llm: LLM) -> None:
    want = llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=40))[0].token_ids
    most = [0]

    def planner(seq: Any) -> tuple[SpeculationConfig, ...]:
        most[0] = max(most[0], len(seq.drafters))
        return (SpeculationConfig(method=Ngram(max_match=5 + seq.view.round), num_draft_tokens=1),)

    llm.engine.drafting.planner = planner
    assert llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=40))[0].token_ids == want
    assert 4 < most[0] <= 9
    assert len(list(llm.proposers)) <= 9


def test_an_endless_lookup_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="Use 1 to 64"):
        Ngram(max_match=10**12)

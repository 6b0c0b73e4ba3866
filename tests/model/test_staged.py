"""Staged drafts over real models: what a stage drafts, what its drafter saves, and what a drafter's fault costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.config import default_model
from outrider.draft import EMPTY, Draft, Law
from outrider.engine.thread import Health
from outrider.errors import HeadMismatchError, InputError, VocabularyMismatchError
from outrider.govern.costs import CostTable
from outrider.lab.prove.engine import ScriptedClock
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.lab.prove.tiny_heads import HEAD_METHODS, save_random_heads
from outrider.model.target import Target
from outrider.propose import settings
from outrider.propose.base import DraftNoise, Proposer, ProposerSequence
from outrider.propose.draft_model import DraftModelProposer
from outrider.propose.row_heads import RowHeadsProposer
from outrider.propose.settings import Method, ProposerContext
from outrider.propose.staged import StagedProposer
from outrider.propose.trees.growth import Growth
from outrider.results import RequestStats
from outrider.server.metrics import EngineState, ServerMetrics
from tests.model.core import DRAFTING, core

PROMPTS = ["def main(", "x = [1, 2, 3, 1, 2, 3,", "class Reader:\n    def __init__(self, path):\n"]
ALONE = {"method": "draft_model", "num_draft_tokens": 6}
#: The draft model again, with other weights in memory: it agrees with the draft model almost always.
TWIN = {"method": "draft_model", "dtype": "float32", "num_draft_tokens": 4}
DRAFTERS: dict[str, Any] = {
    "a lookup": {"method": "suffix", "min_match": 1},
    "a lookup with branches": {"method": "suffix", "min_match": 1, "branches": True},
    "a draft model": TWIN,
    "a tree": {**TWIN, "tree": [2, 2, 1]},
    "what the draft model held likely": "token_recycling",
    "layers of the draft model": "early_exit",
    "another stage": {"method": "staged", "dtype": "float32", "drafter": "ngram"},
}
#: What always runs: a lookup, and what drafts by itself in the stage.
FEW = ("a lookup", "another stage")


def staged(drafter: Any, **more: Any) -> dict[str, Any]:
    return {"method": "staged", "drafter": drafter, "num_draft_tokens": 6, **more}


class _Spoilt(Proposer):
    """Raises wherever it is told to."""

    def __init__(self, where: str) -> None:
        self._where = where

    def begin(self, sequence: ProposerSequence) -> None:
        if self._where == "begin":
            raise RuntimeError("planted in begin")

    def propose(self, requests: Any, noise: DraftNoise) -> list[Draft]:
        if self._where == "propose" and any(request.length > 20 for request in requests):
            raise RuntimeError("planted in propose")
        if self._where == "answer":
            return [Draft((5, -3), (-1, 0), (Law.DETERMINISTIC,) * 2) for _ in requests]
        return [EMPTY for _ in requests]


class Spoilt(Method):
    name: ClassVar[str] = "test_spoilt_drafter"

    where: str

    def build(self, context: ProposerContext) -> Proposer:
        return _Spoilt(self.where)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings.register(Spoilt)
    yield LLM(dtype="float64", block_size=8, kv_cache_tokens=4000)
    del settings._registered[Spoilt.name]


def drafted(llm: LLM, speculation: Any, **params: Any) -> list[list[tuple[int, ...]]]:
    """The draft of each round of each text."""
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=18, **params), speculation=speculation, trace=True)
    assert sum(output.stats.num_proposer_faults for output in outputs) == 0
    llm.engine.check_rest()
    return [[found.token_ids for found in output.outputs[0].rounds] for output in outputs]


#: With these nothing is left to chance of a stage's own.
CERTAIN: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"seed": 3}, {"seed": 4, "frequency_penalty": 0.7})


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[list[tuple[int, ...]]]]:
    """What the draft model drafts alone."""
    return [drafted(llm, ALONE, **params) for params in CERTAIN]


@pytest.mark.parametrize("name", core(DRAFTERS, FEW, *DRAFTING))
def test_a_stage_drafts_what_its_draft_model_drafts_alone(llm: LLM, alone: Any, name: str) -> None:
    """Token for token: what stood of a guess is computed as it should be."""
    assert [drafted(llm, staged(DRAFTERS[name]), **params) for params in CERTAIN] == alone


def test_most_likely_drafts_of_a_drawn_text(llm: LLM) -> None:
    asked = staged(TWIN, draft_sampling="greedy")
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24), speculation=asked, trace=True)
    laws = {law for output in outputs for found in output.outputs[0].rounds for law in found.laws}
    assert laws == {"deterministic"}


def test_a_good_drafter_saves_passes_of_the_draft_model(llm: LLM) -> None:
    passes = {}
    for name, asked in (("alone", ALONE), ("staged", staged(TWIN)), ("tree", staged({**TWIN, "tree": [2, 2, 1]}))):
        (proposer,) = llm.engine.proposers.prepare(llm.resolve(asked))
        assert isinstance(proposer, DraftModelProposer)
        before = proposer.runner.num_passes
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=40), speculation=asked)
        passes[name] = (proposer.runner.num_passes - before) / sum(output.stats.num_drafts for output in outputs)
    assert passes["staged"] < 0.6 * passes["alone"]
    assert passes["tree"] < 0.6 * passes["alone"]


def test_a_stage_shares_its_model_with_others(llm: LLM) -> None:
    asked = {"method": "merge", "methods": [staged("ngram", num_draft_tokens=3), {**ALONE, "num_draft_tokens": 3}]}
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24), speculation=asked)
    assert all(output.stats.num_proposer_faults == 0 for output in outputs)
    found = llm.engine.proposers.prepare(llm.resolve(asked))
    assert {type(proposer) for proposer in found} == {StagedProposer, DraftModelProposer}
    assert len({id(proposer.runner) for proposer in found if isinstance(proposer, DraftModelProposer)}) == 1
    llm.engine.check_rest()


def test_the_engine_may_choose_a_stage() -> None:
    """With costs by which drafts always pay, whatever this machine does."""
    llm = LLM(dtype="float64", block_size=8)
    asked = {"method": "auto", "methods": [staged(DRAFTERS["a lookup"]), "suffix"]}
    plain = llm.generate(PROMPTS, SamplingParams(seed=3, max_tokens=40), speculation="none")
    llm.load_method(asked)
    llm.engine.drafting.script(CostTable({1: 1.0, 8: 1.01}, 0.0, {"staged": {1: 0.01, 8: 0.011}}), ScriptedClock())
    outputs = llm.generate(PROMPTS, SamplingParams(seed=3, max_tokens=40), speculation=asked)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(output.stats.drafted_by_method.get("staged", 0) for output in outputs) > 0
    assert sum(output.stats.num_proposer_faults for output in outputs) == 0


@pytest.mark.parametrize("where", core(["begin", "propose", "answer"], ["answer"], *DRAFTING))
def test_a_drafters_fault_costs_its_own_guesses(llm: LLM, where: str) -> None:
    asked = staged({"method": Spoilt.name, "where": where})
    plain = llm.generate(PROMPTS, SamplingParams(seed=3, max_tokens=40), speculation=ALONE, trace=True)
    outputs = llm.generate(PROMPTS, SamplingParams(seed=3, max_tokens=40), speculation=asked, trace=True)
    for one, other in zip(plain, outputs, strict=True):
        assert [r.token_ids for r in one.outputs[0].rounds] == [r.token_ids for r in other.outputs[0].rounds]
        assert {law for r in other.outputs[0].rounds for law in r.laws} == {"coupled"}, "the stage itself is believed"
        assert other.stats.num_proposer_faults == 1, "it is told once for each text"
    llm.engine.check_rest()


def test_samples_and_short_memory() -> None:
    llm = LLM(dtype="float64", block_size=8, kv_cache_tokens=320)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=40, n=2), speculation=staged({**TWIN, "tree": [2, 1]}))
    assert sum(output.stats.num_draft_tokens for output in outputs) > 0
    assert sum(output.stats.num_proposer_faults for output in outputs) == 0
    llm.engine.check_rest()


def test_a_drafter_that_cannot_be_built_is_named_by_its_place(llm: LLM, tmp_path: Any) -> None:
    asked = {"method": "then", "methods": ["ngram", staged({"method": "draft_model", "model": "/no/such/folder"})]}
    with pytest.raises(InputError) as raised:
        llm.load_method(asked)
    assert raised.value.field == "methods.1.drafter.model"
    other = save_tiny_llama(tmp_path / "other", 1)
    for place, asked in (
        ("methods.1.drafter.model", {"method": "merge", "methods": ["ngram", staged({**ALONE, "model": other})]}),
        ("methods.1.model", {"method": "merge", "methods": ["ngram", {**ALONE, "model": other}]}),
        ("drafter.model", staged({**ALONE, "model": other})),
    ):
        with pytest.raises(VocabularyMismatchError) as mismatch:
            llm.load_method(asked)
        assert str(mismatch.value).startswith(f"{place}: ")


def hand_count(text: list[int], draft: tuple[int, ...]) -> tuple[int, int, int]:
    """Passes, guessed and kept tokens of a stage behind a lookup of the last token, where the stage drafts `draft` behind
    `text`: each pass keeps what agrees, and brings the token behind it."""
    passes = guessed = kept = place = 0
    while place < len(draft):
        last = draft[place - 1] if place else text[-1]
        found = [end for end, token in enumerate(text[:-1]) if token == last]
        first = found[-1] + 1 if found else len(text)
        guess = text[first : first + min(4, len(draft) - place - 1)]
        stood = 0
        while stood < len(guess) and guess[stood] == draft[place + stood]:
            stood += 1
        passes, guessed, kept, place = passes + 1, guessed + len(guess), kept + stood, place + stood + 1
    return passes, guessed, kept


def stage_counts(stats: RequestStats) -> dict[str, tuple[int, int, int]]:
    """By stage: passes of its model, and tokens that its drafter guessed and its model kept."""
    assert stats.passes_by_stage.keys() == stats.drafted_by_stage.keys() == stats.accepted_by_stage.keys()
    return {
        stage: (passes, stats.drafted_by_stage[stage], stats.accepted_by_stage[stage])
        for stage, passes in stats.passes_by_stage.items()
    }


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 3}], ids=["greedy", "seeded"])
def test_the_counts_of_a_stage_are_those_of_a_hand_count(llm: LLM, params: dict[str, Any]) -> None:
    lookup = {"method": "ngram", "max_match": 1, "min_match": 1, "num_draft_tokens": 4}
    sampling = SamplingParams(max_tokens=40, **params)
    kept = guessed = 0
    for output in llm.generate(PROMPTS, sampling, speculation=staged(lookup), trace=True):
        (text,), length = output.outputs, len(output.prompt_token_ids)
        whole, rounds, counts = [*output.prompt_token_ids, *text.token_ids], text.rounds or (), list[tuple[int, int, int]]()
        for found in rounds:
            counts.append(hand_count(whole[:length], found.token_ids))
            length += len(found.accepted) + (found.token_id is not None)
        assert length == len(whole)
        passes, drafted, accepted = (sum(column) for column in zip(*counts, strict=True))
        assert stage_counts(output.stats) == {"staged.ngram": (passes, drafted, accepted)}
        guessed, kept = guessed + drafted, kept + accepted
    assert 0 < kept < guessed, "some guesses stand, and some do not"


@pytest.mark.parametrize("name", core(DRAFTERS, FEW, *DRAFTING))
def test_each_pass_of_a_stage_adds_what_it_keeps_and_one_token(llm: LLM, name: str) -> None:
    """So passes and kept tokens add up to what the stage drafts, for the target or for the stage around it."""
    drafter = DRAFTERS[name]
    method = drafter if isinstance(drafter, str) else drafter["method"]
    for params in ({"temperature": 0}, {}):
        for output in llm.generate(PROMPTS, SamplingParams(max_tokens=24, **params), speculation=staged(drafter)):
            found = stage_counts(output.stats)
            passes, drafted, accepted = found.pop(f"staged.{method}")
            assert passes + accepted == output.stats.num_draft_tokens
            assert 0 <= accepted <= drafted
            for inner, (inner_passes, inner_drafted, inner_accepted) in found.items():
                assert (method, inner) == ("staged", "staged.staged.ngram")
                assert inner_passes + inner_accepted == drafted
                assert 0 <= inner_accepted <= inner_drafted
            assert len(found) == (method == "staged")


def test_no_token_counts_as_kept_behind_the_end_of_an_unsure_draft(llm: LLM) -> None:
    asked = staged(TWIN, min_confidence=0.5)
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0), speculation=asked):
        ((_, (passes, drafted, accepted)),) = stage_counts(output.stats).items()
        assert output.stats.num_draft_tokens - passes <= accepted <= output.stats.num_draft_tokens < drafted


def test_the_server_tells_the_counts_of_stages_by_method(llm: LLM) -> None:
    asked = {"method": "then", "methods": ["ngram", staged("suffix")]}
    llm.stats.reset()
    stats = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24), speculation=asked)[0].stats
    told = ServerMetrics("m").text(EngineState.of(llm.engine, Health()), {}).decode()
    counts = stage_counts(stats)["staged.suffix"]
    assert counts[0] > 0
    for name, count in zip(("passes", "draft_tokens", "accepted_tokens"), counts, strict=True):
        assert f'outrider:stage_{name}_total{{method="then",model_name="m",stage="staged.suffix"}} {count}.0' in told


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of heads of the draft model, with random weights, by method."""
    folder = tmp_path_factory.mktemp("heads")
    return {name: save_random_heads(folder / name, default_model("draft"), name, scale=0.05) for name in HEAD_METHODS}


@pytest.mark.parametrize("method", core(HEAD_METHODS, ["medusa"], *DRAFTING))
def test_heads_in_a_stage_are_those_of_the_draft_model(llm: LLM, alone: Any, heads: dict[str, str], method: str) -> None:
    asked = staged({"method": method, "model": heads[method], "num_draft_tokens": 3})
    assert [drafted(llm, asked, **params) for params in CERTAIN] == alone
    stats = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24), speculation=asked)[0].stats
    assert stats.drafted_by_stage[f"staged.{method}"] > 0
    other = {"method": method, "model": heads[method]}
    with pytest.raises(HeadMismatchError):
        llm.load_method(other)


def test_heads_in_a_stage_read_the_draft_models_row_behind_which_the_last_token_came(
    llm: LLM, heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was accepted and rejected meanwhile, by the draft model and by the target."""
    read: list[tuple[list[int], int, Tensor]] = []
    num_begun = num_drafts = 0
    stock = RowHeadsProposer._logits

    def noted(self: RowHeadsProposer, growths: Sequence[Growth]) -> dict[int, Tensor]:
        nonlocal num_begun
        for growth in growths:
            num_begun += not growth.request.path
            feature = self._features[growth.request.sequence.seq_id]
            read.append((growth.request.text(0), feature.position, feature.hidden))
        return stock(self, growths)

    monkeypatch.setattr(RowHeadsProposer, "_logits", noted)
    asked = staged({"method": "medusa", "model": heads["medusa"], "num_draft_tokens": 2})
    for params in ({"temperature": 0}, {"temperature": 1.3}):
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, **params), speculation=asked)
        num_drafts += sum(output.stats.num_drafts - 1 for output in outputs)
    (proposer,) = llm.engine.proposers.prepare(llm.resolve(asked))
    assert isinstance(proposer, StagedProposer)
    draft, last = Target(proposer.runner), Target(proposer.runner).num_layers
    for text, position, hidden in read:
        stock_hidden = draft.run_apart(text[: position + 1], aux_layers=(last,)).aux_hidden_states[last][-1]
        assert torch.allclose(hidden, stock_hidden, atol=1e-9)
    behind = Counter(len(text) - 2 - position for text, position, _ in read)
    assert behind.keys() == {0, 1}, "where the whole draft stood, the row of its last token is not computed yet"
    assert num_begun > 0.8 * num_drafts, "the last row that stands is shown again where the target took another token"


def test_a_head_in_a_stage_that_does_not_fit_is_named_by_its_place(llm: LLM, tmp_path: Any) -> None:
    of_target = save_random_heads(tmp_path / "heads", default_model("target"), "medusa")
    asked = staged({"method": "medusa", "model": of_target})
    for place, nested in (
        ("drafter.model", asked),
        ("methods.1.drafter.model", {"method": "merge", "methods": ["ngram", asked]}),
    ):
        with pytest.raises(HeadMismatchError) as raised:
            llm.load_method(nested)
        assert str(raised.value).startswith(f"{place}: ")

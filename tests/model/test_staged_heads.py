"""Published heads inside a stage: their layers lie beside the draft model's KV, which runs ahead of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider import LLM, SamplingParams
from outrider.cache.state import SequenceState
from outrider.lab.prove.own_model import CacheAudit
from outrider.lab.prove.tiny import raise_engine_norms
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle, save_random_mtp, save_random_peagle
from outrider.model.runner import ModelRunner
from outrider.propose import eagle
from outrider.propose.base import ObservedRows
from outrider.propose.beside_target import LastFeatures
from outrider.propose.draft_model import DraftModelProposer
from outrider.propose.eagle import HeadProposer
from outrider.propose.trees import growth
from tests.model import checkpoints
from tests.model.block_reference import BlockReference
from tests.model.eagle_reference import Eagle1Reference, EagleReference
from tests.model.parallel_reference import ParallelReference
from tests.model.test_feature_heads import BOUND, GREEDY, PROMPTS, SEEDED, Watch, faults, texts
from tests.model.test_target import Oracle

#: How each head guesses what the draft model writes.
GUESSES: dict[str, dict[str, Any]] = {
    "eagle3": {"num_draft_tokens": 2},
    "eagle1": {"tree": (2, 2)},
    "dflash": {"num_draft_tokens": 3},
    "mtp": {"num_draft_tokens": 3},
    "peagle": {"num_draft_tokens": 3},
}
REFERENCES: dict[str, Any] = {
    "eagle3": EagleReference,
    "eagle1": Eagle1Reference,
    "dflash": BlockReference,
    "peagle": ParallelReference,
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=10),
    SamplingParams(seed=3, n=2, max_tokens=10),
    SamplingParams(max_tokens=10),
]


class Pair(NamedTuple):
    """A target, a draft model of another law, and heads of the draft model."""

    target: str
    draft: str
    heads: dict[str, str]

    def way(self, method: str) -> dict[str, Any]:
        drafter = {"method": method, "model": self.heads[method], **GUESSES[method]}
        return {"method": "staged", "model": self.draft, "drafter": drafter, "num_draft_tokens": 5}

    @property
    def alone(self) -> dict[str, Any]:
        return {"method": "draft_model", "model": self.draft, "num_draft_tokens": 5}

    def load(self, *ways: dict[str, Any], **how: Any) -> tuple[LLM, ModelRunner]:
        """An engine that drafts in these ways, and its draft model."""
        llm = LLM(self.target, speculation="none", dtype="float64", block_size=4, **how)
        for way in ways:
            llm.load_method(way)
        raise_engine_norms(llm)
        (runner,) = {id(p.runner): p.runner for p in llm.proposers if isinstance(p, DraftModelProposer)}.values()
        return llm, runner


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(tmp_path_factory.mktemp("staged"))


def make(folder: Path) -> Pair:
    """Models and heads with random weights."""
    target, draft = (checkpoints.save("llama", folder / str(seed), seed=seed, layers=3) for seed in (3, 4))
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    heads = {
        "eagle3": save_random_eagle(folder / "eagle3", draft, "speculators", scale=0.1, **layers),
        "eagle1": save_random_eagle(folder / "eagle1", draft, "safeailab1", scale=0.1),
        "dflash": save_random_dflash(folder / "dflash", draft, scale=0.1, inputs=(1, 2)),
        "mtp": save_random_mtp(folder / "mtp", draft, "deepseek_v3", 2, scale=0.1),
        "peagle": save_random_peagle(folder / "peagle", draft, scale=0.1, **layers),
    }
    return Pair(target, draft, heads)


def audited(llm: LLM, runner: ModelRunner, *ways: dict[str, Any]) -> CacheAudit:
    """What the draft model and its heads keep after each step, ahead of the texts too, beside a fresh prefill of it."""
    for way in ways:
        for prompt, each in zip(PROMPTS, PARAMS, strict=True):
            llm.engine.add_request(tuple(prompt), each, llm.resolve(way))
    audit = CacheAudit(llm.engine, (runner,))
    audit.run()
    llm.engine.check_integrity()
    llm.engine.check_rest()
    return audit


def test_layers_of_heads_hold_what_a_fresh_prefill_gives(pair: Pair) -> None:
    ways = [pair.way(method) for method in GUESSES]
    llm, runner = pair.load(*ways)
    audit = audited(llm, runner, *ways)
    stats = llm.stats.finished
    assert audit.worst <= 1e-12
    assert audit.num_ahead > 100
    assert stats.num_proposer_faults == 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
    assert {stage for stage, count in stats.drafted_by_stage.items() if count} == {f"staged.{name}" for name in GUESSES}


@pytest.mark.parametrize("method", REFERENCES)
def test_every_guess_is_what_the_reference_says(pair: Pair, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After guesses and drafts that did not stand, prefix hits, preemptions and forks."""
    way = pair.way(method)
    llm, _ = pair.load(way, kv_cache_tokens=48, max_num_batched_tokens=48)
    reference = REFERENCES[method](pair.heads[method], Oracle(pair.draft).model)
    watch = Watch(reference, monkeypatch, growth if method in ("dflash", "peagle") else eagle)
    params = [*PARAMS[:2], SEEDED]
    outputs = llm.generate(PROMPTS, params, speculation=way)
    stats = llm.stats.finished
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 50
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
    assert texts(outputs) == texts(llm.generate(PROMPTS, params, speculation="none"))


@pytest.mark.parametrize("in_turn", [False, True], ids=["draft model", "another head"])
def test_who_else_reads_with_the_draft_model_leaves_no_gap(pair: Pair, in_turn: bool) -> None:
    """Rows that others had the draft model compute are computed again for the head, and for these rows alone."""
    other = pair.way("mtp") if in_turn else pair.alone
    way = {"method": "merge", "methods": [{**each, "num_draft_tokens": 4} for each in (other, pair.way("eagle3"))]}
    llm, runner = pair.load(way)
    audit = audited(llm, runner, way)
    stats = llm.stats.finished
    assert audit.worst <= 1e-12
    assert stats.num_proposer_faults == 0
    assert stats.drafted_by_stage["staged.eagle3"] > 2 * stats.num_drafts


def _rows(runner: ModelRunner, patch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass of a model."""
    found = list[int]()
    stock = runner.forward

    def forward(segments: Any, *args: Any, **more: Any) -> Any:
        found.append(sum(segment.num_rows for segment in segments))
        return stock(segments, *args, **more)

    patch.setattr(runner, "forward", forward)
    return found


def test_a_text_begins_with_what_the_layers_hold_of_another_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, way = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], pair.way("eagle3")
    llm, runner = pair.load(pair.alone)
    llm.generate(prompt, GREEDY, speculation=pair.alone)
    rows, most = _rows(runner, monkeypatch), []
    for _ in range(2):
        llm.generate(prompt, GREEDY, speculation=way)
        most.append(max(rows))
        rows.clear()
    assert most[0] >= 12, "the head reads all rows of the first text, whoever computed them before"
    assert most[1] <= 5, "of the text two, and guesses"


def test_a_head_that_is_set_aside_costs_no_rows(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    way = pair.way("eagle3")
    llm, runner = pair.load(way)
    rows = _rows(runner, monkeypatch)
    stock = HeadProposer.observe

    def observe(self: Any, seen: Sequence[ObservedRows]) -> None:
        if any(len(each.sequence.token_ids) > 18 for each in seen):
            raise RuntimeError("planted")
        stock(self, seen)

    monkeypatch.setattr(HeadProposer, "observe", observe)
    drafts = llm.generate(PROMPTS[0], GREEDY, speculation=way, trace=True)[0]
    assert drafts.stats.num_proposer_faults == 1
    assert max(rows[2:]) <= 5, "two of the text, and guesses"
    plain = llm.generate(PROMPTS[0], GREEDY, speculation=pair.alone, trace=True)[0]
    assert [found.token_ids for found in drafts.outputs[0].rounds] == [found.token_ids for found in plain.outputs[0].rounds]


def _a_rejected_row_stays(patch: pytest.MonkeyPatch) -> None:
    stock = SequenceState.roll_back

    def roll_back(self: Any, *args: Any, **needs: Any) -> None:
        filled = dict(self.num_filled)
        stock(self, *args, **needs)
        self.num_filled = {number: min(count, self.end + 1) for number, count in filled.items()}

    patch.setattr(SequenceState, "roll_back", roll_back)


def _the_feature_is_that_of_a_token_not_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LastFeatures, "at", lambda self, position: self.rows[-1])


def _a_feature_is_one_off(patch: pytest.MonkeyPatch) -> None:
    stock = LastFeatures.at
    patch.setattr(LastFeatures, "at", lambda self, position: stock(self, max(position - 1, self.start)))


@pytest.mark.by_change("tests/model/")  # of the tests themselves: it plants what they must see
@pytest.mark.parametrize("plant", [_a_rejected_row_stays, _the_feature_is_that_of_a_token_not_taken, _a_feature_is_one_off])
def test_control_a_head_that_reads_something_else_is_seen(
    pair: Pair, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    watch = Watch(EagleReference(pair.heads["eagle3"], Oracle(pair.draft).model), monkeypatch)
    llm, _ = pair.load(pair.way("eagle3"))
    outputs = llm.generate(PROMPTS[0], SEEDED, speculation=pair.way("eagle3"))
    assert faults(outputs) == 0
    assert watch.worst > 100 * BOUND

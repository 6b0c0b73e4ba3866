"""Checks of the boundary between proposers and the engine, for the mutants of boundary_mutants.py.

Where a test of the suite makes the claim already, its very function is called.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from outrider.cache.blocks import BlockManager
from outrider.draft import Draft, Law, depths_of
from outrider.errors import HeadMismatchError
from outrider.lab.prove.engine import EngineProof
from outrider.lab.prove.running import Finding
from outrider.lab.prove.settings import SETTINGS, Setting
from outrider.lab.prove.target_settings import HEADS_SETTINGS, SHARED_TARGET_LAYERS
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.lab.prove.tiny_heads import save_tiny_heads
from outrider.llm import LLM
from outrider.params import SamplingParams, TokenOrigin
from outrider.propose.base import (
    DraftNoise,
    Drawn,
    ObservedRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
)
from outrider.propose.draft_model import DraftModel
from outrider.propose.settings import Method, ProposerContext, SpeculationConfig
from outrider.propose.suffix import Suffix
from tests.model import checkpoints, test_added_layers, test_boundary, test_heads, test_target
from tests.unit import test_state

PROMPT = [1, 5, 9, 2, 7, 7, 3, 11, 4]
VOCAB_SIZE = 16


@cache
def _tiny() -> LLM:
    path = save_tiny_llama(Path(tempfile.mkdtemp()), seed=3, vocab_size=VOCAB_SIZE)
    return LLM(path, dtype="float64", block_size=4)


@cache
def _llama(**how: Any) -> tuple[LLM, test_target.Oracle]:
    path = checkpoints.save("llama", Path(tempfile.mkdtemp()) / "llama", seed=1)
    return LLM(path, dtype="float64", block_size=4, **how), test_target.Oracle(path)


def _in_turns(llm: LLM, turns: Sequence[SpeculationConfig], params: SamplingParams) -> Any:
    """One text in whose every step all these draft, each behind the one before."""
    asked = tuple(turns)
    stock, llm.engine.drafting.planner = llm.engine.drafting.planner, lambda seq: asked
    try:
        return llm.generate(PROMPT, params, speculation="none", trace=True)[0].outputs[0]
    finally:
        llm.engine.drafting.planner = stock


# -- laws --------------------------------------------------------------------------------------------------------------


def _proven(setting: Setting, *, faultless: bool = False) -> Finding:
    folder = Path(tempfile.mkdtemp())
    proof = EngineProof(save_tiny_llama(folder / "target", 1), save_tiny_llama(folder / "draft", 2))
    finding = proof.prove(setting, 3, faultless=faultless)
    assert finding.passed, finding
    return finding


def _named(name: str, *, faultless: bool = False) -> None:
    _proven(next(setting for setting in SETTINGS if setting.name == name), faultless=faultless)


def turns_drawn() -> None:
    _named("two drawn drafts, one behind the other")


def turns_coupled() -> None:
    _named("coupled drafts, one behind the other")


class _Learning(Proposer):
    """Draws one token more where it has seen an odd number of texts."""

    def __init__(self) -> None:
        self._num_texts = 0

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [self._draft(request, noise) for request in requests]

    def _draft(self, request: ProposeRequest, noise: DraftNoise) -> Draft:
        count = min(1 + self._num_texts % 2, request.budget)
        probs = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64).expand(count, 3)
        return Draft.chain(noise.chain(probs, request), noise.law(request), probs)

    def finish(self, sequence: ProposerSequence) -> None:
        self._num_texts += 1

    def snapshot(self) -> object | None:
        return self._num_texts

    def restore(self, state: object) -> None:
        assert isinstance(state, int)
        self._num_texts = state


class _Learnt(Method):
    """Settings of `_Learning`."""

    name: ClassVar[str] = "killer_learnt"

    def build(self, context: ProposerContext) -> Proposer:
        return _Learning()


def paths_start_alike() -> None:
    """A proposer whose drafts depend on the texts before is the same at the start of every path of a proof."""
    _proven(Setting("learnt", {"method": _Learnt(), "num_draft_tokens": 2, "rule": "block"}))


def texts_are_forgotten_again() -> None:
    """After `restore` a lookup drafts what it drafted then, although it has learnt another text meanwhile."""
    config = SpeculationConfig(method=Suffix(min_match=1, shared=True), num_draft_tokens=4)
    params = SamplingParams(temperature=0, max_tokens=12)
    assert config.method is not None
    proposer, drafted = _tiny().proposers.get(config.method), list[Any]()
    state = proposer.snapshot()
    for _ in range(2):
        proposer.restore(state)
        (text,) = _tiny().generate(PROMPT, params, speculation=config, trace=True)
        drafted.append([found.token_ids for found in text.outputs[0].rounds or ()])
    assert drafted[0] == drafted[1]
    assert any(drafted[0])


# -- who drafts --------------------------------------------------------------------------------------------------------


class _Drawing(Proposer):
    """Draws a token for every request, itself and by two members, and answers with its own.

    Attributes:
        drawn: By who drew: the tokens, by sequence, round and position.
    """

    def __init__(self, tag: int, fault_at: int) -> None:
        self._tag, self._fault_at, self._num_calls = tag, fault_at, 0
        self.drawn: dict[tuple[int, int], dict[tuple[int, int, int], int]] = {}

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        self._num_calls += 1
        drawing = [noise, noise.member(0), noise.member(1)]
        answers = [
            [self._draft(replace(request, drawn=Drawn()) if who else request, by, who) for who, by in enumerate(drawing)]
            for request in requests
        ]
        return [own for own, *_ in answers]

    def _draft(self, request: ProposeRequest, noise: DraftNoise, who: int) -> Draft:
        probs = torch.full((1, VOCAB_SIZE), 1 / VOCAB_SIZE)
        tokens = noise.chain(probs, request)
        place = (request.sequence.seq_id, request.sequence.round, request.length)
        self.drawn.setdefault((self._tag, who), {})[place] = tokens[0]
        answer = [VOCAB_SIZE] if self._num_calls == self._fault_at else tokens
        return Draft.chain(answer, noise.law(request), probs)


class _Drawn(Method):
    """Settings of `_Drawing`: another tag, another proposer. Its call `fault_at` answers with a token that is none."""

    name: ClassVar[str] = "killer_drawn"

    tag: int
    fault_at: int = 0

    def build(self, context: ProposerContext) -> Proposer:
        return _Drawing(self.tag, self.fault_at)

    @property
    def turn(self) -> SpeculationConfig:
        """Drawn whatever the seed, and tested by blocks."""
        return SpeculationConfig(method=self, num_draft_tokens=2, rule="block")


def drafters_draw_apart() -> None:
    """Two proposers and their members at one place of one round: no key is used twice, and no two draw the same."""
    methods = (_Drawn(tag=1), _Drawn(tag=2))
    merged = SpeculationConfig.of({"method": "merge", "methods": [{"method": m, "num_draft_tokens": 1} for m in methods]})
    (output,) = _tiny().generate(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True), speculation=merged)
    assert output.stats.num_proposer_faults == 0, "a key that was used before is a fault"
    drawn: dict[tuple[int, int], dict[tuple[int, int, int], int]] = {}
    for method in methods:
        drawn |= _tiny().proposers.get(method).drawn  # type: ignore[attr-defined]
    assert len(drawn) == 6
    for one, other in combinations(drawn.values(), 2):
        both = one.keys() & other.keys()
        assert len(both) > 12, "one place in every round of up to two tokens, in 50 tokens"
        assert sum(one[place] == other[place] for place in both) < 0.4 * len(both), "1 in 16 by chance"


def a_fault_is_ones_own() -> None:
    """From its fault on the one that had it is believed nothing, and the one behind it as before."""
    turns = (_Drawn(tag=3, fault_at=5).turn, _Drawn(tag=4).turn)
    output = _in_turns(_tiny(), turns, SamplingParams(max_tokens=50, ignore_eos=True))
    assert output.stats.num_proposer_faults == 1
    laws = [found.laws for found in output.rounds if len(found.laws) == 2]
    demoted = [law for law in laws if law != ("sampled", "sampled")]
    assert laws[:2] == [("sampled", "sampled")] * 2
    assert len(demoted) > 5
    assert set(demoted) == {("opaque", "sampled")}
    assert laws[-len(demoted) :] == demoted, "for the rest of the text"


def what_was_drawn_is_tested() -> None:
    """Where a proposer, or the drafter of a stage, raises behind a token that it drew."""
    for name in ("token", "tree", "the drafter of a stage"):
        _named(f"a fault behind a drawn token, {name}")


def one_model_drafts_twice() -> None:
    _named("merge, one draft model at two lengths", faultless=True)


def stages_have_no_faults() -> None:
    """The drafter of this stage draws, and what the stage has verified counts as drawn from its own probabilities."""
    name = _tiny().engine.runner.loaded.name
    drafter = {"method": "draft_model", "model": name, "num_draft_tokens": 2}
    stage = {"method": "staged", "model": name, "dtype": "float32", "drafter": drafter}
    (output,) = _tiny().generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True), speculation=stage)
    assert output.stats.num_proposer_faults == 0
    assert output.stats.num_accepted_tokens > 6


class _Lying(Proposer):
    """Draws from one row, and says another one."""

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        row, said = torch.tensor([[0.6, 0.3, 0.1], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
        return [Draft.chain(noise.chain(row[None], each), noise.law(each), said[None]) for each in requests]


class _Lie(Method):
    """Settings of `_Lying`."""

    name: ClassVar[str] = "killer_lie"

    def build(self, context: ProposerContext) -> Proposer:
        return _Lying()


def lies_are_seen() -> None:
    """The text is right nevertheless, since probabilities are those of the draws."""
    finding = _proven(Setting("a lie", {"method": _Lie(), "num_draft_tokens": 1}))
    assert "faults" in finding.detail, finding


def a_turn_goes_on_where_the_last_stopped() -> None:
    """The target drafts for itself, twice in every step: what does not start behind the deepest token is refused."""
    name = _tiny().engine.runner.loaded.name
    behind = SpeculationConfig(method=DraftModel(model=name, dtype="float64"), num_draft_tokens=2)
    greedy, seeded = SamplingParams(temperature=0, max_tokens=40), SamplingParams(seed=3, max_tokens=40)
    for tree, params in (((), greedy), ((2,), greedy), ((), seeded)):  # a seeded text is guessed with its own noise
        first = SpeculationConfig(method=DraftModel(model=name), num_draft_tokens=2, tree=tree)
        output = _in_turns(_tiny(), (first, behind), params)
        rounds = [found for found in output.rounds if len(found.drafted_by) == 2]
        assert len(rounds) > 5
        assert all(len(found.accepted) == max(depths_of(found.parents)) for found in rounds), tree


# -- memory ------------------------------------------------------------------------------------------------------------


def states() -> None:
    """What the text confirms stays and nothing else; a twin knows all that the first one knows, and goes its own way."""
    for text, num_computed in (([1, 2, 3, 7, 8, 9], 5), ([1, 2, 3, 7, 9, 9], 4), ([1, 2, 3, 9, 8, 1], 3), ([1, 2, 3], 2)):
        test_state.test_rolling_back_keeps_what_the_text_confirms(text, num_computed)
    state = test_state.computed(BlockManager(10, 2), [1, 2, 3], ahead=(7, 8))
    twin = state.fork()
    assert (twin.num_computed, twin.ahead, twin.num_published) == (3, [7, 8], 1)
    state.run_ahead([9])
    state.roll_back([1, 2, 3, 9])
    assert (twin.num_computed, twin.ahead) == (3, [7, 8])
    twin.roll_back([1, 2, 3, 7, 8, 9])
    assert (state.num_computed, twin.num_computed) == (3, 5)


def added_layers() -> None:
    """What a proposer keeps beside the target's is what a fresh prefill gives: of samples that part, and of prefixes."""
    params = SamplingParams(seed=3, max_tokens=12, n=3)
    test_added_layers.test_added_layers_hold_what_a_fresh_prefill_gives(_of_seven(), params)
    test_added_layers.test_a_prefix_is_shared_as_far_as_the_layers_that_are_needed_hold_it(_of_seven())


def _of_seven() -> LLM:
    return test_added_layers.load(save_tiny_llama(Path(tempfile.mkdtemp()), 1, vocab_size=7))


def shallow() -> None:
    """A proposer reads the target's KV: three samples of a prompt that ends in the middle of a block."""
    llm, oracle = _llama(kv_cache_tokens=120, speculation=test_boundary.Shallow())
    test_boundary.test_two_layers_over_the_targets_own_memory((llm, oracle), test_boundary.SEEDED.replace(n=3))


def texts_are_not_written_over() -> None:
    test_boundary.test_a_proposer_cannot_write_over_the_text(_llama(kv_cache_tokens=120))


def partial_passes() -> None:
    for backend in ("paged", "gather"):
        test_target.test_the_first_layers_and_then_the_others(_llama(attention_backend=backend))


# -- rows that come back -----------------------------------------------------------------------------------------------


def _watched(test: Callable[..., None], *args: Any) -> None:
    test(*_llama(max_num_batched_tokens=32), *args)


def needs_uncached_prompt() -> None:
    _watched(test_boundary.test_every_row_of_the_text_is_shown_once_to_every_sample, 3)


def rejected_rows() -> None:
    _watched(test_boundary.test_rejected_rows_come_back_too_with_their_parents)


def scratch_rows() -> None:
    _watched(test_boundary.test_scratch_rows_come_back_and_are_no_draft, test_boundary.SEEDED)


class _Reciting(Proposer):
    """Drafts a recorded text, and remembers which rows were shown as accepted."""

    requires = Requirements()

    def __init__(self, text: Sequence[int]) -> None:
        self._text = list(text)
        self.accepted: list[tuple[int, int]] = []  # position and token

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [Draft.chain(self._text[r.length : r.length + r.budget], Law.DETERMINISTIC) for r in requests]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for seen in rows:
            self.accepted += [(seen.positions[row], seen.token_ids[row]) for row in seen.where(RowStatus.ACCEPTED)]


class _Recited(Method):
    """Settings of `_Reciting`."""

    name: ClassVar[str] = "killer_recited"

    text: tuple[int, ...]

    def build(self, context: ProposerContext) -> Proposer:
        return _Reciting(self.text)


# -- heads -------------------------------------------------------------------------------------------------------------


@cache
def _heads() -> tuple[test_heads.Made, LLM]:
    folder = Path(tempfile.mkdtemp())
    made = test_heads.make(checkpoints.save("llama", folder / "target", seed=3), folder)
    return made, test_heads.load(made.path)


def _compared(name: str) -> None:
    """Drafts of heads against what they say of the stock model's hidden states."""
    made, llm = _heads()
    with pytest.MonkeyPatch.context() as patch:
        watch = test_heads.Watch(made, patch)
        outputs = llm.generate(test_heads.PROMPTS, test_heads.GREEDY, speculation=made.ways()[name])
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert watch.num_drafts > 10
    assert watch.wrong == []


def heads_read_the_last_row() -> None:
    for name in ("medusa", "blockwise, tree"):
        _compared(name)


def exits_read_what_layers_leave() -> None:
    for name in ("exit", "exit, target's norm", "exit, tree"):
        _compared(name)


def heads_go_on_behind_others() -> None:
    made, llm = _heads()
    with pytest.MonkeyPatch.context() as patch:
        test_heads.test_heads_behind_other_drafts(llm, made, patch)


def samples_of_heads_begin_at_once() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_heads.test_samples_begin_where_their_prompt_ends(_heads()[0], patch)


def heads_for_other_weights() -> None:
    made, _ = _heads()
    other = test_heads.load(checkpoints.save("llama", Path(tempfile.mkdtemp()), seed=4))
    try:
        other.generate(test_heads.PROMPTS[0], test_heads.GREEDY, speculation=made.way("medusa"))
    except HeadMismatchError:
        return
    raise AssertionError("heads for other weights draft")


def heads_drawn() -> None:
    folder = Path(tempfile.mkdtemp())
    target = save_tiny_llama(folder / "target", 1, num_layers=SHARED_TARGET_LAYERS)
    proof = EngineProof(target, save_tiny_llama(folder / "draft", 2), heads=save_tiny_heads(folder, target))
    finding = proof.prove(next(setting for setting in HEADS_SETTINGS if setting.name == "Medusa, token"), 3, faultless=True)
    assert finding.passed, finding


def ends_inside_drafts() -> None:
    """What stands behind an end inside a draft is not accepted: not counted, not shown, not traced."""
    llm, params = _tiny(), SamplingParams(temperature=0, max_tokens=30)
    plain = llm.generate(PROMPT, params, speculation="none")[0].token_ids
    method = _Recited(text=(*PROMPT, *plain))
    proposer: Any = llm.proposers.get(method)
    for end in set(plain):
        proposer.accepted.clear()
        config = SpeculationConfig(method=method, num_draft_tokens=6)
        params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=(end,))
        output = llm.generate(PROMPT, params, speculation=config, trace=True)[0].outputs[0]
        assert output.token_ids == plain[: plain.index(end) + 1]
        places = [len(PROMPT) + i for i, origin in enumerate(output.origins) if origin is TokenOrigin.ACCEPTED]
        assert [position for position, _ in proposer.accepted] == places
        assert output.stats.num_accepted_tokens == len(places)
        assert sum(len(found.accepted) for found in output.rounds or ()) == len(places)


def chains_run_ahead_alike() -> None:
    """A draft model that does not wait for its tokens drafts the same, from the same rows."""
    from tests.model import test_run_ahead as ahead

    with ahead.pytest.MonkeyPatch.context() as patch, ahead.pair(Path(tempfile.mkdtemp())) as llm:
        ahead.one_seed.__wrapped__(patch)
        params = [ahead.GREEDY, ahead.SAMPLED, ahead.CUT, ahead.SAMPLED]
        ahead.test_drafts_are_those_of_a_proposer_that_waits(params, "block", llm, ahead.noted(patch), patch)

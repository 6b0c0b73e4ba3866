"""What a proposer may do at the boundary to the target, each with a small proposer of the test's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from outrider import LLM, DraftModel, Ngram, SamplingParams, SpeculationConfig, Suffix
from outrider.draft import EMPTY, Draft, Law, ScratchRows
from outrider.engine.drafting.planning import Planner, as_requested
from outrider.engine.sequence import Sequence as EngineSequence
from outrider.model import factory
from outrider.model.batch import Segment
from outrider.model.target import TargetRows
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
)
from outrider.propose.settings import Method, ProposerContext
from outrider.propose.trees.growth import Growth, add_level
from outrider.results import RoundTrace
from outrider.verify.noise import Key, KeyedNoise, Stream
from tests.model import checkpoints
from tests.model.core import core
from tests.model.test_target import Oracle, close

PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 9, 9, 4], [5, 6], [7, 7, 7, 7, 7, 8, 30]]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SEEDED = SamplingParams(seed=3, max_tokens=20)
BACKENDS = [("llama", "fused"), ("llama", "paged"), ("llama", "gather"), ("llama", "row_by_row"), ("gemma2", "paged")]


@pytest.fixture(autouse=True)
def nothing_is_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("llm", "shallow_llm"):
        if name in request.fixturenames:
            llm = request.getfixturevalue(name)
            llm = llm[0] if isinstance(llm, tuple) else llm
            llm.engine.drafting.planner = as_requested
            llm.engine.check_integrity()
            assert llm.engine.runner.blocks.num_free == llm.engine.runner.blocks.num_blocks


# -- sharing the target ------------------------------------------------------------------------------------------------


class ShallowProposer(Proposer):
    """Drafts with two layers of the target over the target's own KV, and the target's head."""

    def __init__(self, context: ProposerContext) -> None:
        self.target = context.target
        self.said: list[tuple[tuple[int, ...], Tensor]] = []  # texts, and the logits that were drafted from

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growths = [Growth.of(r, r.budget, r.max_depth) for r in requests]
        rows = [self._rows(g, [g.request.last_token_id], 0) for g in growths]
        alive = growths
        while alive:
            tokens = [token for segment in rows for token in segment.token_ids]
            out = self.target.run(rows, layers=(0, 1), resume_from=self.target.embed(tokens))
            assert out.hidden is not None
            logits = self.target.head(self.target.norm(out.hidden))
            for growth, row in zip(alive, logits, strict=True):
                path = growth.path(growth.level[0])
                self.said.append(((*growth.request.sequence.token_ids, *growth.request.path, *path), row))
            add_level(alive, logits, noise)
            alive = [g for g in alive if g.growing]
            rows = [self._rows(g, [g.nodes[-1].token_id], g.depth) for g in alive]
        return [g.draft() for g in growths]

    def _rows(self, growth: Growth, tokens: list[int], offset: int) -> TargetRows:
        return self.target.rows(growth.request.sequence.kv, tokens, growth.request.length - 1 + offset)


class Shallow(Method):
    name: ClassVar[str] = "shallow"

    def build(self, context: ProposerContext) -> Proposer:
        return ShallowProposer(context)


@pytest.fixture(scope="module", params=BACKENDS, ids="-".join)
def shallow_llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Oracle]:
    family, backend = request.param
    path = checkpoints.save(family, tmp_path_factory.mktemp(family), seed=3)
    how: dict[str, Any] = {"dtype": "float64", "block_size": 4, "speculation": Shallow(), "kv_cache_tokens": 120}
    if backend != "row_by_row":
        return LLM(path, attention_backend=backend, **how), Oracle(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "INVARIANT", ("row_by_row",))
        return LLM(path, batch_invariant=True, **how), Oracle(path)


@pytest.mark.parametrize("shallow_llm", core([(way,) for way in BACKENDS], [(BACKENDS[0],), (BACKENDS[4],)]), indirect=True)
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow),
        pytest.param(SEEDED.replace(n=3), id="three seeded samples"),
    ],
)
def test_two_layers_over_the_targets_own_memory(shallow_llm: tuple[LLM, Oracle], params: SamplingParams) -> None:
    """In a batch beside other methods, too little memory for all and prefixes from the cache: no text changes, and every
    draft is what two layers of the stock model say of the whole text."""
    llm, oracle = shallow_llm
    proposer = llm.proposers.get(Shallow())
    assert isinstance(proposer, ShallowProposer)
    plain = [llm.generate(p, params, speculation="none")[0] for p in PROMPTS]
    proposer.said.clear()
    llm.stats.reset()
    prompts = [*PROMPTS, *PROMPTS, *PROMPTS]
    ways: list[Any] = [None] * 6 + [SpeculationConfig(method=Ngram(min_match=1))] * 3
    outputs = llm.generate(prompts, params, speculation=ways)
    for output, want in zip(outputs, [*plain, *plain, *plain], strict=True):
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in want.outputs]
    stats = llm.stats.finished
    assert stats.num_proposer_faults == 0
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    truncated = oracle.model
    for text, said in proposer.said[:: max(1, len(proposer.said) // 40)]:
        with torch.inference_mode():
            hidden = oracle.hidden(list(text))[2]
            want_logits = _head_of(truncated, hidden)
        assert close(said, want_logits[-1])


def _head_of(model: Any, hidden: Tensor) -> Tensor:
    """Final norm and head of the stock model, with the soft cap of gemma2."""
    logits: Tensor = model.lm_head(model.model.norm(hidden))
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def test_a_proposer_cannot_write_over_the_text(shallow_llm: tuple[LLM, Oracle]) -> None:
    """It would change what the target reads; it is refused, and costs a fault and no token."""
    llm, _ = shallow_llm

    class Rash(ShallowProposer):
        def _rows(self, growth: Growth, tokens: list[int], offset: int) -> TargetRows:
            return self.target.rows(growth.request.sequence.kv, tokens, 0)

    class RashMethod(Method):
        name: ClassVar[str] = "rash"

        def build(self, context: ProposerContext) -> Proposer:
            return Rash(context)

    want = llm.generate(PROMPTS[0], GREEDY, speculation="none")[0].token_ids
    output = llm.generate(PROMPTS[0], GREEDY, speculation=RashMethod())[0]
    assert output.token_ids == want
    assert output.stats.num_proposer_faults > 0


# -- rows that come back -----------------------------------------------------------------------------------------------


class WatcherProposer(Proposer):
    """Guesses the last token again, and remembers all it is shown."""

    requires = Requirements(aux_layers=(0, 2, 4), target_top_k=2, needs_uncached_prompt=True)

    def __init__(self, requires: Requirements | None = None) -> None:
        self.requires = requires or type(self).requires
        self.shown: dict[int, list[tuple[ObservedRows, int]]] = {}
        self.texts: dict[int, list[int]] = {}

    def begin(self, sequence: ProposerSequence) -> None:
        self.shown[sequence.seq_id] = []

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        self.shown[child.seq_id] = list(self.shown[parent.seq_id])

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [Draft.chain([r.last_token_id] * min(2, r.budget), Law.OPAQUE) for r in requests]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for seen in rows:
            self.shown[seen.sequence.seq_id] += [(seen, row) for row in range(len(seen))]

    def finish(self, sequence: ProposerSequence) -> None:
        self.texts[sequence.seq_id] = list(sequence.token_ids)


class Watcher(Method):
    name: ClassVar[str] = "watcher"

    needs_uncached_prompt: bool = True

    def build(self, context: ProposerContext) -> Proposer:
        full = WatcherProposer.requires
        return WatcherProposer(full if self.needs_uncached_prompt else Requirements(full.aux_layers, full.target_top_k))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("draft"), seed=1, layers=2)


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return LLM(path, dtype="float64", block_size=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def oracle(path: str) -> Oracle:
    return Oracle(path)


@pytest.mark.parametrize("n", [1, 3])
def test_every_row_of_the_text_is_shown_once_to_every_sample(llm: LLM, oracle: Oracle, n: int) -> None:
    watcher = llm.proposers.get(Watcher())
    assert isinstance(watcher, WatcherProposer)
    watcher.shown.clear()
    watcher.texts.clear()
    prompts = [*PROMPTS, [3] * 50, PROMPTS[0]]  # one longer than a pass, one that a cache would have
    outputs = llm.generate(prompts, SEEDED.replace(n=n), speculation=Watcher())
    plain = llm.generate(prompts, SEEDED.replace(n=n), speculation="none")
    assert [[o.token_ids for o in out.outputs] for out in outputs] == [[o.token_ids for o in p.outputs] for p in plain]
    assert len(watcher.texts) == n * len(prompts)
    assert sum(out.stats.num_proposer_faults for out in outputs) == 0
    for seq_id, text in watcher.texts.items():
        shown = watcher.shown[seq_id]
        kept = [(s, r) for s, r in shown if s.statuses[r] in (RowStatus.TEXT, RowStatus.ACCEPTED)]
        counts = Counter(s.positions[r] for s, r in kept)
        # The last token of a text is never computed, nor is a draft token that ended it needed by anybody.
        assert sorted(counts) == list(range(max(counts) + 1))
        assert len(text) - 2 <= max(counts) <= len(text) - 1
        assert set(counts.values()) == {1}, "none missing, none twice"
        states = oracle.hidden(text)
        logits = oracle.logits(text)
        for seen, row in kept:
            position = seen.positions[row]
            assert seen.token_ids[row] == text[position]
            for layer in (0, 2, 4):
                assert close(seen.aux_hidden_states[layer][row], states[layer][position])
            assert seen.target_top_k is not None
            place = seen.target_top_k.rows.index(row)
            assert seen.target_top_k.token_ids[place, 0] == logits[position].argmax()


def test_rejected_rows_come_back_too_with_their_parents(llm: LLM, oracle: Oracle) -> None:
    watcher = llm.proposers.get(Watcher())
    assert isinstance(watcher, WatcherProposer)
    watcher.shown.clear()
    watcher.texts.clear()
    output = llm.generate(PROMPTS[0], SEEDED, speculation=Watcher())[0]
    (text,) = watcher.texts.values()
    (shown,) = watcher.shown.values()
    rejected = [(s, r) for s, r in shown if s.statuses[r] is RowStatus.REJECTED]
    assert len(rejected) == output.stats.num_draft_tokens - output.stats.num_accepted_tokens > 0
    for seen, row in rejected:
        path: list[int] = []
        at = row
        while at >= 0:
            path.insert(0, seen.token_ids[at])
            first, at = at, seen.parents[at]
        before = text[: seen.positions[first]]
        assert seen.positions[row] == len(before) + len(path) - 1
        assert close(seen.aux_hidden_states[2][row], oracle.hidden([*before, *path])[2][-1])


def test_what_is_computed_anyway_costs_nothing(llm: LLM) -> None:
    """No prefix hit is lost and no row gets logits for it: prompt rows are shown without."""
    watcher = llm.proposers.get(Watcher(needs_uncached_prompt=False))
    assert isinstance(watcher, WatcherProposer)
    llm.generate(PROMPTS[0], SEEDED, speculation="none")
    watcher.shown.clear()
    output = llm.generate(PROMPTS[0], SEEDED, speculation=Watcher(needs_uncached_prompt=False))[0]
    assert output.stats.num_cached_tokens == 8
    (shown,) = watcher.shown.values()
    assert min(s.positions[r] for s, r in shown) == 8
    long = llm.generate([[2] * 40], SEEDED, speculation=Watcher(needs_uncached_prompt=False))[0]
    assert long.stats.num_proposer_faults == 0
    first = watcher.shown[max(watcher.shown)][0][0]
    assert len(first) == 32
    assert first.target_top_k is not None
    assert first.target_top_k.rows == (), "a chunk of a prompt has no logits"


# -- scratch rows ------------------------------------------------------------------------------------------------------


class ScratchProposer(Proposer):
    """Wants two rows computed beside a draft of one token: one behind the text, and one behind that."""

    requires = Requirements(target_top_k=1)

    def __init__(self) -> None:
        self.came: list[tuple[tuple[int, ...], int]] = []
        self.num_scratch = 0

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: ProposeRequest) -> Draft:
        if request.budget < 3 or request.max_depth < 2:
            return EMPTY
        return Draft((request.last_token_id,), (-1,), (Law.DETERMINISTIC,), scratch=ScratchRows((11, 12), (-1, 1)))

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for seen in rows:
            scratch = seen.where(RowStatus.SCRATCH)
            self.num_scratch += len(scratch)
            assert seen.target_top_k is not None
            for row in scratch:
                path, at = list[int](), row
                while seen.statuses[at] is RowStatus.SCRATCH:
                    path.insert(0, seen.token_ids[at])
                    at = seen.parents[at]
                text = tuple(seen.sequence.token_ids[: seen.positions[at] + 1])
                assert seen.positions[row] == len(text) + len(path) - 1
                place = seen.target_top_k.rows.index(row)
                self.came.append(((*text, *path), int(seen.target_top_k.token_ids[place, 0])))


class Scratch(Method):
    name: ClassVar[str] = "scratch"

    def build(self, context: ProposerContext) -> Proposer:
        return ScratchProposer()


@pytest.mark.parametrize("params", [GREEDY, SEEDED, SEEDED.replace(n=2)])
def test_scratch_rows_come_back_and_are_no_draft(llm: LLM, oracle: Oracle, params: SamplingParams) -> None:
    proposer = llm.proposers.get(Scratch())
    assert isinstance(proposer, ScratchProposer)
    proposer.came.clear()
    proposer.num_scratch = 0
    plain = llm.generate(PROMPTS, params, speculation="none")
    outputs = llm.generate(PROMPTS, params, speculation=Scratch(), trace=True)
    assert [[o.token_ids for o in out.outputs] for out in outputs] == [[o.token_ids for o in p.outputs] for p in plain]
    stats = [o.stats for out in outputs for o in out.outputs]
    assert sum(s.num_proposer_faults for s in stats) == 0
    num_drafts = sum(s.num_drafts for s in stats)
    assert sum(s.num_draft_tokens for s in stats) == num_drafts > 0, "one draft token each"
    assert all(len(s.drafted_per_position) == 1 for s in stats)
    assert proposer.num_scratch == 2 * num_drafts == len(proposer.came)
    rounds = [r for out in outputs for o in out.outputs for r in o.rounds or ()]
    assert sum(r.num_scratch_rows for r in rounds) == 2 * num_drafts
    for text, best in proposer.came:
        assert best == oracle.logits(list(text))[-1].argmax()


# -- several methods ---------------------------------------------------------------------------------------------------


def alternating(*configs: SpeculationConfig) -> Planner:
    """Another method in every round, and back."""
    return lambda seq: (configs[seq.view.round % len(configs)],)


def test_the_method_changes_from_step_to_step_and_back(llm: LLM, draft: str) -> None:
    configs = (
        SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=3),
        SpeculationConfig(method=Suffix(min_match=1), num_draft_tokens=2),
        SpeculationConfig(method=DraftModel(model=draft), tree=(2, 2)),
        SpeculationConfig(),
    )
    for params in (GREEDY, SEEDED, SEEDED.replace(n=2)):
        plain = llm.generate(PROMPTS, params, speculation="none")
        llm.engine.drafting.planner = alternating(*configs)
        outputs = llm.generate(PROMPTS, params, speculation="none", trace=True)
        llm.engine.drafting.planner = as_requested
        assert [[o.token_ids for o in out.outputs] for out in outputs] == [[o.token_ids for o in p.outputs] for p in plain]
        rounds = [r for out in outputs for o in out.outputs for r in o.rounds or ()]
        assert {d.method for r in rounds for d in r.drafted_by} == {"draft_model", "suffix"}
        assert sum(o.stats.num_proposer_faults for out in outputs for o in out.outputs) == 0


def test_one_goes_on_where_another_stopped(llm: LLM, draft: str) -> None:
    """Two drawn drafts in one step: the second behind the first one's path, with draws of its own."""
    first = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=2)
    second = SpeculationConfig(method=DraftModel(model=draft, dtype="float64"), num_draft_tokens=2)
    llm.engine.drafting.planner = lambda seq: (first, second)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=20), speculation="none", trace=True)
    rounds = [r for out in outputs for r in out.outputs[0].rounds or () if len(r.drafted_by) == 2]
    assert rounds
    for found in rounds:
        assert found.parents == tuple(range(-1, len(found.parents) - 1)), "one chain"
        assert [d.first for d in found.drafted_by] == [0, found.drafted_by[0].end]
        assert set(found.laws) == {"sampled"}
    assert sum(out.stats.num_proposer_faults for out in outputs) == 0


def test_a_draft_model_that_starts_late_holds_nobody_up(llm: LLM, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows counted: the late one catches up some rows a step, and the others draft in every step meanwhile."""
    from outrider.propose import draft_model

    monkeypatch.setattr(draft_model, "CATCH_UP_ROWS", 10)
    method = DraftModel(model=draft)
    config = SpeculationConfig(method=method, num_draft_tokens=2)
    proposer = llm.proposers.get(method)
    assert isinstance(proposer, draft_model.DraftModelProposer)
    late_prompt = [(7 * i) % 60 for i in range(90)]

    def planner(seq: EngineSequence) -> tuple[SpeculationConfig, ...]:
        late = seq.num_prompt_tokens == len(late_prompt)
        return (config,) if not late or seq.num_output_tokens >= 6 else ()

    passes: list[Counter[int]] = []  # rows by segment length, of the first pass of every step
    stock = proposer.runner.forward

    def counting(segments: Sequence[Segment], *args: Any, **more: Any) -> Any:
        passes.append(Counter(segment.num_rows for segment in segments))
        return stock(segments, *args, **more)

    monkeypatch.setattr(proposer.runner, "forward", counting)
    params = SamplingParams(seed=1, max_tokens=40)
    llm.engine.drafting.planner = as_requested
    plain = llm.generate([PROMPTS[1], late_prompt], params, speculation="none")
    llm.engine.drafting.planner = planner
    outputs = llm.generate([PROMPTS[1], late_prompt], params, speculation="none", trace=True)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    catching_up = [rows for rows in passes if max(rows) > 3]  # the other one's own prompt is 2 tokens
    assert len(catching_up) >= 9, "some 96 rows in tens"
    assert all(max(rows) <= 10 for rows in catching_up)
    beside = [rows for rows in catching_up if sum(rows.values()) > 1]
    assert len(beside) == len(catching_up), "the other one drafted in each of these steps"
    assert outputs[1].stats.num_drafts > 0, "and then the late one drafts too"
    kept_pace = [r for r in (outputs[0].outputs[0].rounds or ())[1:-1] if len(r.token_ids) < 1]
    assert not kept_pace


def test_idle_draft_memory_is_released_under_pressure(path: str, draft: str) -> None:
    """Two texts fill the draft's memory in turns: the one that is not drafted for gives way, and no text changes."""
    llm = LLM(path, dtype="float64", block_size=4, kv_cache_tokens=96, max_num_seqs=2)
    config = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=3)
    llm.engine.drafting.planner = lambda seq: (config,) if (seq.seq_id + seq.view.round // 4) % 2 else ()
    proposer = llm.proposers.get(DraftModel(model=draft))
    blocks = proposer.runner.blocks  # type: ignore[attr-defined]
    taken = blocks.allocate(blocks.num_blocks // 2)
    prompts = [[(3 * i) % 50 for i in range(20)], [(5 * i) % 50 for i in range(20)]]
    params = SamplingParams(seed=2, max_tokens=24)
    outputs = llm.generate(prompts, params, speculation="none")
    llm.engine.drafting.planner = as_requested
    assert [o.token_ids for o in outputs] == [llm.generate(p, params, speculation="none")[0].token_ids for p in prompts]
    assert all(o.stats.num_drafts > 2 for o in outputs)
    blocks.free(taken)
    llm.engine.check_integrity()


# -- traces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["block", "token", "tree", "lookup"])
def test_a_trace_tells_what_was_decided(llm: LLM, draft: str, way: str) -> None:
    config = {
        "block": SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=3),
        "token": SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=3, rule="token"),
        "tree": SpeculationConfig(method=DraftModel(model=draft), tree=(2, 2)),
        "lookup": SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=3),
    }[way]
    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24), speculation=config, trace=True)[0].outputs[0]
    assert output.rounds is not None
    written: list[int] = []
    for found in output.rounds:
        assert found.position == len(PROMPTS[0]) + len(written)
        written += [found.token_ids[node] for node in found.accepted]
        written += [] if found.token_id is None else [found.token_id]
        assert len(found.target_probs) == len(found.token_ids)
        assert all(0.0 <= p <= 1.0 for p in found.target_probs)
        assert set(found.seconds) == {"schedule", "propose", "forward", "verify"}
        check_rows(found)
        if way in ("block", "token", "tree") and found.token_ids:
            assert all(q is not None and 0.0 < q <= 1.0 for q in found.draft_probs)
            assert found.coins
        if way == "token":
            for coin in found.coins:
                p, q = found.target_probs[coin.node], found.draft_probs[coin.node]
                assert q is not None
                assert coin.probability == pytest.approx(min(1.0, p / q))
            stands = [coin.stands for coin in found.coins]
            assert len(found.accepted) <= (stands.index(False) if False in stands else len(stands))
    assert tuple(written) == output.token_ids
    times = [found.at for found in output.rounds]
    assert all(before < after for before, after in pairwise([0.0, *times]))
    assert times[-1] >= sum(sum(found.seconds.values()) for found in output.rounds)
    rules = {"block": "block", "token": "token", "tree": "traversal", "lookup": "walk"}
    assert {found.rule for found in output.rounds if found.token_ids} == {rules[way]}


@pytest.mark.parametrize("way", ["block", "token", "tree", "recursive"])
def test_a_trace_holds_the_residual_that_was_drawn_from(
    llm: LLM, draft: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[int, torch.Tensor] = {}  # by position in the text
    real = KeyedNoise.categorical

    def noted(self: KeyedNoise, probs: torch.Tensor, keys: list[Key]) -> torch.Tensor:
        drawn.update({key.position: row for key, row in zip(keys, probs, strict=True) if key.stream is Stream.RECOVER})
        return real(self, probs, keys)

    monkeypatch.setattr(KeyedNoise, "categorical", noted)
    shape: dict[str, Any] = {"num_draft_tokens": 3} if way in ("block", "token") else {"tree": (2, 2)}
    rule: Any = "token" if way in ("token", "recursive") else "auto"
    config = SpeculationConfig(method=DraftModel(model=draft), rule=rule, **shape)
    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=60), speculation=config, trace=True)[0].outputs[0]
    refusals = 0
    for found in output.rounds or ():
        for row in found.rows:
            told = {each.token_id: each.residual for each in row.likely if each.residual is not None}
            if told:
                refusals += 1
                assert row.node == (found.accepted[-1] if found.accepted else -1)
                probs = drawn[found.position + len(found.accepted)]
                assert told == {token: float(probs[token]) for token in told}
                assert found.token_id is None or told[found.token_id] > 0
    assert refusals == len(drawn) > 3


def check_rows(found: RoundTrace) -> None:
    """The rows of a trace name what was drafted and written, with the probabilities that the rest of the trace has."""
    assert [row.node for row in found.rows] == [-1, *range(len(found.token_ids))]
    for row in found.rows:
        chances = [each.target for each in row.likely]
        assert chances == sorted(chances, reverse=True)
        assert len({each.token_id for each in row.likely}) == len(chances)
        assert 0.0 < sum(chances) <= 1.0 + 1e-5
    of = {row.node: {each.token_id: each for each in row.likely} for row in found.rows}
    drawn = set(found.laws) & {"sampled", "coupled"}
    for node, (token, parent) in enumerate(zip(found.token_ids, found.parents, strict=True)):
        assert of[parent][token].target == found.target_probs[node]
        if found.parents.index(parent) == node and drawn:  # its elder siblings are taken out of a later one's
            assert of[parent][token].draft == pytest.approx(found.draft_probs[node])
    for row in found.rows:
        shares = [min(each.target, each.draft) for each in row.likely if each.draft is not None]
        assert (row.overlap is not None) == (bool(drawn) and row.node in found.parents)
        assert row.overlap is None or sum(shares) - 1e-5 <= row.overlap <= 1.0 + 1e-5
    if found.token_id is not None:
        assert found.token_id in of[found.accepted[-1] if found.accepted else -1]


def test_without_being_asked_there_is_none(llm: LLM) -> None:
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].rounds is None

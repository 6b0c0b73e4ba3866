"""A broken proposer costs speed, never a token; a broken target costs the request concerned and no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.draft import Draft, Law, ScratchRows
from outrider.engine import sequence as breaker
from outrider.engine.sequence import PATIENCE, Drafter
from outrider.engine.sequence import Sequence as EngineSequence
from outrider.errors import ForwardError, NonFiniteLogitsError, ProposerError
from outrider.model.attention import PassOutput
from outrider.model.context import ForwardContext
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
)
from outrider.propose.draft_model import DraftModelProposer
from outrider.propose.host import ProposerHost
from outrider.propose.settings import Method, ProposerContext
from tests.model import checkpoints
from tests.model.core import DRAFTING, core

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6], [7, 7, 7, 7, 7]]
V = checkpoints.VOCAB_SIZE


def changed(draft: Draft, row: int, **values: Any) -> Draft:
    """`draft` with one row's token, parent or law row replaced."""
    tokens, parents = list(draft.token_ids), list(draft.parents)
    probs = None if draft.draft_probs is None else draft.draft_probs.clone()
    if "token" in values:
        tokens[row] = values["token"]
    if "parent" in values:
        parents[row] = values["parent"]
    if "law" in values and probs is not None:
        probs[row] = values["law"]
    return Draft(tuple(tokens), tuple(parents), draft.laws, probs)


def beside(draft: Draft, tokens: tuple[int, ...], parents: tuple[int, ...]) -> Draft:
    """`draft` with scratch rows."""
    return Draft(draft.token_ids, draft.parents, draft.laws, draft.draft_probs, scratch=ScratchRows(tokens, parents))


ROW_FAULTS: dict[str, Callable[[Draft, int], Any]] = {
    "token outside": lambda d, j: changed(d, j, token=V),
    "negative token": lambda d, j: changed(d, j, token=-1),
    "token no int": lambda d, j: changed(d, j, token="x"),
    "parent after child": lambda d, j: changed(d, j, parent=j),
    "parent before root": lambda d, j: changed(d, j, parent=-2),
    "law is nan": lambda d, j: changed(d, j, law=float("nan")),
    "law is zero": lambda d, j: changed(d, j, law=0.0),
    "law sums to two": lambda d, j: changed(d, j, law=2.0 / V),
}
WHOLE_FAULTS: dict[str, Callable[[Draft, int], Any]] = {
    "no draft": lambda d, j: "nonsense",
    "none": lambda d, j: None,
    "lengths differ": lambda d, j: Draft(d.token_ids, d.parents[:-1], d.laws, d.draft_probs),
    "law of wrong shape": lambda d, j: Draft(d.token_ids, d.parents, (Law.SAMPLED,) * len(d), torch.ones(1, 2)),
    "law missing": lambda d, j: Draft(d.token_ids, d.parents, (Law.SAMPLED,) * len(d)),
    "beyond budget": lambda d, j: Draft.chain((*d.token_ids, 1, 1, 1, 1), Law.OPAQUE),
    "scratch token outside": lambda d, j: beside(d, (V,), (-1,)),
    "scratch after itself": lambda d, j: beside(d, (1,), (len(d),)),
    "scratch lengths differ": lambda d, j: beside(d, (1, 1), (-1,)),
    "scratch beyond budget": lambda d, j: beside(d, (1,) * 7, (-1,) * 7),
}


CHAIN_FAULTS = {**ROW_FAULTS, **WHOLE_FAULTS}


class Spoiler(Proposer):
    """A draft model whose every answer is spoilt."""

    def __init__(self, inner: DraftModelProposer, spoil: Callable[[Draft, int], Any], row: int) -> None:
        self.inner, self.spoil, self.row = inner, spoil, row
        self.finish = inner.finish  # type: ignore[method-assign]

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> list[Any]:
        drafts = self.inner.propose(requests, noise)
        return [self.spoil(d, self.row) if len(d) > self.row else d for d in drafts]


class Raiser(Proposer):
    """Raises in one of its methods."""

    requires = Requirements()

    def __init__(self, verb: str, kind: type[BaseException] = RuntimeError) -> None:
        self.verb, self.kind = verb, kind

    def _maybe(self, verb: str) -> None:
        if verb == self.verb:
            raise self.kind(f"planted in {verb}")

    def begin(self, sequence: ProposerSequence) -> None:
        self._maybe("begin")

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        self._maybe("fork")

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> list[Draft]:
        self._maybe("propose")
        return [] if self.verb == "too few" else [Draft.chain([1, 2][: r.budget], Law.OPAQUE) for r in requests]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        self._maybe("observe")

    def finish(self, sequence: ProposerSequence) -> None:
        self._maybe("finish")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("pair")
    target = checkpoints.save("llama", folder / "target", seed=1, layers=2)
    draft = checkpoints.save("llama", folder / "draft", seed=1, layers=1)
    speculation = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=3)
    return LLM(target, dtype="float64", block_size=4, speculation=speculation)


#: What a planted method builds, by its tag.
PLANTED: dict[int, Proposer] = {}
TAGS = count()


class Planted(Method):
    """A method that builds a proposer object of the test. Another tag is another proposer."""

    name: ClassVar[str] = "planted"

    tag: int

    def build(self, context: ProposerContext) -> Proposer:
        return PLANTED[self.tag]


@pytest.fixture
def with_proposer() -> Iterator[Callable[[Proposer], SpeculationConfig]]:
    """Makes settings that a proposer object drafts with."""

    def plant(proposer: Proposer) -> SpeculationConfig:
        tag = next(TAGS)
        PLANTED[tag] = proposer
        return SpeculationConfig(method=Planted(tag=tag), num_draft_tokens=3)

    yield plant
    PLANTED.clear()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a proposer fails, it is asked again."""
    monkeypatch.setattr(breaker, "PATIENCE", 10**9)


def draft_model_of(llm: LLM) -> DraftModelProposer:
    assert llm.speculation.method is not None
    proposer = llm.engine.proposers.get(llm.speculation.method)
    assert isinstance(proposer, DraftModelProposer)
    return proposer


GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(seed=3, max_tokens=16)
UNSEEDED = SamplingParams(max_tokens=16)


@pytest.mark.usefixtures("patience")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("fault", CHAIN_FAULTS)
def test_spoilt_drafts_change_nothing(llm: LLM, with_proposer: Any, fault: str, row: int) -> None:
    inner = draft_model_of(llm)
    config = with_proposer(Spoiler(inner, CHAIN_FAULTS[fault], row))
    for params in (GREEDY, SEEDED):
        want = [o.token_ids for o in llm.generate(PROMPTS, params, speculation="none")]
        assert [o.token_ids for o in llm.generate(PROMPTS, params, speculation=config)] == want
    unseeded = llm.generate(PROMPTS, UNSEEDED, speculation=config)
    assert all(o.error is None and len(o.token_ids) == 16 for o in unseeded)
    assert sum(o.stats.num_proposer_faults for o in unseeded) > 0
    inner.check_integrity()


TREE_FAULTS: dict[str, Callable[[Draft, int], Any]] = {
    **CHAIN_FAULTS,
    "token drawn twice": lambda d, j: changed(d, j ^ 1, token=d.token_ids[j]),
    "laws of siblings differ": lambda d, j: changed(d, j, law=torch.full((V,), 1.0 / V)),
}


@pytest.mark.usefixtures("patience")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [3, 5, 0])
@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_spoilt_trees_change_nothing(llm: LLM, with_proposer: Any, fault: str, row: int) -> None:
    inner = draft_model_of(llm)
    config = with_proposer(Spoiler(inner, TREE_FAULTS[fault], row)).replace(tree=(2, 2), num_draft_tokens=6)
    for params in (GREEDY, SEEDED):
        want = [o.token_ids for o in llm.generate(PROMPTS, params, speculation="none")]
        assert [o.token_ids for o in llm.generate(PROMPTS, params, speculation=config)] == want
    unseeded = llm.generate(PROMPTS, UNSEEDED, speculation=config)
    assert all(o.error is None and len(o.token_ids) == 16 for o in unseeded)
    assert sum(o.stats.num_proposer_faults for o in unseeded) > 0
    inner.check_integrity()


VERBS, KINDS = ["begin", "fork", "propose", "observe", "finish", "too few"], [RuntimeError, SystemExit, GeneratorExit]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_raising_proposer_changes_nothing(llm: LLM, with_proposer: Any, verb: str, kind: type[BaseException]) -> None:
    for params in (GREEDY, SEEDED, GREEDY.replace(n=2), SEEDED.replace(n=2)):
        config = with_proposer(Raiser(verb, kind))
        want = [[s.token_ids for s in o.outputs] for o in llm.generate(PROMPTS, params, speculation="none")]
        mixed = llm.generate(PROMPTS, params, speculation=[config, llm.speculation, config])
        assert [[s.token_ids for s in o.outputs] for o in mixed] == want
        faults = [sum(s.stats.num_proposer_faults for s in o.outputs) for o in mixed]
        assert faults[1] == 0, "a neighbour's proposer is not to blame"
        assert (min(faults[0], faults[2]) > 0) == (verb != "fork" or params.n == 2)
    llm.engine.runner.blocks.check_integrity([])


class Failing(Proposer):
    """Raises as long as it is told to."""

    requires = Requirements(needs_uncached_prompt=True)

    def __init__(self) -> None:
        self.fails = True
        self.num_asked = 0
        self.alive: set[int] = set()

    def begin(self, sequence: ProposerSequence) -> None:
        self.alive.add(sequence.seq_id)

    def finish(self, sequence: ProposerSequence) -> None:
        self.alive.remove(sequence.seq_id)

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> list[Draft]:
        self.num_asked += 1
        if self.fails:
            raise RuntimeError("planted")
        return [Draft.chain([1, 2][: r.budget], Law.OPAQUE) for r in requests]


@pytest.mark.parametrize("params", core([GREEDY, SEEDED], [GREEDY], *DRAFTING), ids=["greedy", "seeded"])
def test_a_failing_proposer_is_switched_off_and_tried_again(
    llm: LLM, with_proposer: Any, caplog: pytest.LogCaptureFixture, params: SamplingParams
) -> None:
    proposer = Failing()
    config = with_proposer(proposer)
    want = [o.token_ids for o in llm.generate(PROMPTS, params, speculation="none")]

    def write(speculation: Any) -> list[Any]:
        outputs = llm.generate(PROMPTS, params, speculation=speculation)
        assert [o.token_ids for o in outputs] == want
        assert not proposer.alive, "it is told of every end"
        llm.engine.check_integrity()
        return outputs

    with caplog.at_level(logging.WARNING):
        outputs = write(config)
    assert proposer.num_asked == PATIENCE
    assert all(0 < o.stats.num_proposer_faults <= PATIENCE for o in outputs)
    assert llm.health.switched_off == ("planted",)
    assert any("switched off" in record.message for record in caplog.records)
    assert all(o.stats.num_proposer_faults == 0 for o in write(config))
    assert proposer.num_asked == PATIENCE, "nobody asks it now"
    while llm.health.switched_off:
        write(llm.speculation)
    write(config)
    assert proposer.num_asked == PATIENCE + 1, "one more fault is enough"
    proposer.fails = False
    while llm.health.switched_off:
        write(llm.speculation)
    assert all(o.stats.num_drafts > 0 for o in write(config)), "it has mended its ways"
    assert llm.health.switched_off == ()
    assert llm.engine.proposers.pauses["planted"] >= 2


def test_who_is_switched_off_in_the_middle_of_a_text_leaves_it_to_others(llm: LLM, with_proposer: Any) -> None:
    config, want = with_proposer(Failing()), llm.generate(PROMPTS, SEEDED, speculation="none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.drafting, "planner", lambda seq: (config, llm.speculation))
        outputs = llm.generate(PROMPTS, SEEDED.replace(max_tokens=60))
    assert [o.token_ids[:16] for o in outputs] == [o.token_ids for o in want]
    assert all(o.stats.num_accepted_tokens > 0 for o in outputs), "the next in turn drafts instead"
    llm.engine.check_integrity()


class Watch:
    """Every draft that passed the check, and whose it was."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Drafter, Draft]] = []
        original = ProposerHost.ask

        def record(host: ProposerHost, drafters: Any, *args: Any) -> list[Draft]:
            drafts = original(host, drafters, *args)
            self.seen += zip(drafters, drafts, strict=True)
            return drafts

        patch.setattr(ProposerHost, "ask", record)

    def of(self, drafter: Drafter) -> list[Draft]:
        return [draft for whose, draft in self.seen if whose is drafter]


def test_after_a_fault_drafts_count_as_opaque(llm: LLM, with_proposer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_proposer(Spoiler(draft_model_of(llm), ROW_FAULTS["law is nan"], 1))
    watch = Watch(monkeypatch)
    llm.generate(PROMPTS[0], UNSEEDED, speculation=config)
    seen = [draft for _, draft in watch.seen]
    assert set(seen[0].laws) == {Law.SAMPLED}
    assert len(seen[0]) > 1, "what was drawn stays, whatever the proposer says of its law"
    assert any(map(len, seen[1:]))
    assert all(set(draft.laws) <= {Law.OPAQUE} for draft in seen[1:])


@pytest.mark.parametrize("way", ["in turns", "one behind the other", "the other way round"])
def test_a_fault_demotes_only_the_method_that_made_it(
    llm: LLM, with_proposer: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    bad = with_proposer(Spoiler(draft_model_of(llm), ROW_FAULTS["law is nan"], 1))
    assert isinstance(llm.speculation.method, DraftModel)
    good = bad.replace(method=llm.speculation.method.replace(dtype="float64"))  # of its own: with memory of its own

    def planner(seq: EngineSequence) -> tuple[SpeculationConfig, ...]:
        if way == "in turns":
            return (bad,) if seq.view.round % 2 == 0 else (good,)
        return (bad, good) if way == "one behind the other" else (good, bad)

    want = llm.generate(PROMPTS[0], SEEDED, speculation="none")[0].token_ids
    monkeypatch.setattr(llm.engine.drafting, "planner", planner)
    assert llm.generate(PROMPTS[0], SEEDED, speculation=bad)[0].token_ids == want
    watch = Watch(monkeypatch)
    request = llm.engine.add_request(tuple(PROMPTS[0]), UNSEEDED.replace(max_tokens=40), bad)
    while llm.engine.has_work:
        llm.engine.step()
    faulty, sound = request.sequences[0].drafters
    assert (faulty.method, sound.method) == (bad.method, good.method)
    assert (faulty.believed, sound.believed) == (False, True)
    assert (faulty.num_faults > 1, sound.num_faults) == (True, 0)
    assert request.sequences[0].stats.num_proposer_faults == faulty.num_faults
    theirs = [draft for draft in watch.of(faulty) if len(draft)]
    ours = [draft for draft in watch.of(sound) if len(draft)]
    assert set(theirs[0].laws) == {Law.SAMPLED}
    assert len(theirs) > 2
    assert all(set(draft.laws) == {Law.OPAQUE} for draft in theirs[1:])
    assert len(ours) > 2
    assert all(set(draft.laws) == {Law.SAMPLED} for draft in ours), "who did no wrong is still believed"
    llm.engine.check_integrity()


class Unbuildable(Method):
    """A method that has no proposer."""

    name: ClassVar[str] = "unbuildable"

    def build(self, context: ProposerContext) -> Proposer:
        raise RuntimeError("planted in build")


def test_a_method_that_cannot_be_built_is_refused_at_once_and_harmless_in_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = SpeculationConfig(method=Unbuildable())
    with pytest.raises(ProposerError, match=r"unbuildable.*planted in build"):
        llm.generate(PROMPTS[0], SEEDED, speculation=broken)
    want = [o.token_ids for o in llm.generate(PROMPTS, SEEDED, speculation="none")]
    monkeypatch.setattr(llm.engine.drafting, "planner", lambda seq: (broken, llm.speculation))
    got = llm.generate(PROMPTS, SEEDED)
    assert [o.token_ids for o in got] == want
    assert all(o.stats.num_proposer_faults == 1 for o in got), "asked for once a sequence"
    assert all(o.stats.num_drafts > 0 for o in got), "the next in turn drafts instead"
    llm.engine.check_integrity()


class Recorder(Proposer):
    """Asks for features and keeps every row it is shown."""

    def __init__(self, *, needs_uncached_prompt: bool) -> None:
        self.requires = Requirements(aux_layers=(0, 1, 2), target_top_k=3, needs_uncached_prompt=needs_uncached_prompt)
        self.rows: dict[int, dict[int, tuple[int, dict[int, torch.Tensor], torch.Tensor | None]]] = {}
        self.rejected: list[tuple[tuple[int, ...], dict[int, torch.Tensor], torch.Tensor]] = []

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> list[Draft]:
        return [Draft.chain([t % V for t in r.sequence.token_ids[-2:]], Law.DETERMINISTIC) for r in requests]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for part in rows:
            assert part.target_top_k is not None
            tops = dict(zip(part.target_top_k.rows, part.target_top_k.token_ids, strict=True))
            for i in range(len(part)):
                features = {layer: states[i] for layer, states in part.aux_hidden_states.items()}
                if part.statuses[i] in (RowStatus.TEXT, RowStatus.ACCEPTED):
                    seen = self.rows.setdefault(part.sequence.seq_id, {})
                    seen[part.positions[i]] = (part.token_ids[i], features, tops.get(i))
                else:
                    self.rejected.append((self._text_of(part, i), features, tops[i]))

    def _text_of(self, part: ObservedRows, row: int) -> tuple[int, ...]:
        """The text that a row ends: what was computed before, then its ancestors among the rows, then itself."""
        line: list[int] = []
        while row >= 0:
            line.insert(0, part.token_ids[row])
            first = part.positions[row]
            row = part.parents[row]
        return (*part.sequence.token_ids[:first], *line)


def stock_rows(llm: LLM, text: Sequence[int]) -> Any:
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(llm.engine.runner.loaded.name, dtype=torch.float64)
        return model(torch.tensor([list(text)]), use_cache=False, output_hidden_states=True)


def test_observe_brings_every_committed_row(llm: LLM, with_proposer: Any) -> None:
    recorder = Recorder(needs_uncached_prompt=True)
    output = llm.generate(PROMPTS[0], GREEDY, speculation=with_proposer(recorder))[0]
    text = [*PROMPTS[0], *output.token_ids]
    (rows,) = recorder.rows.values()
    assert sorted(rows) == list(range(len(text) - 1)), "all but the last token, which has no row yet"
    plain = stock_rows(llm, text)
    for position, (token, features, top) in rows.items():
        assert token == text[position]
        assert top is not None
        assert top.tolist() == plain.logits[0, position].topk(3).indices.tolist()
        assert set(features) == {0, 1, 2}
        for layer, state in features.items():
            torch.testing.assert_close(state, plain.hidden_states[layer][0, position], rtol=1e-4, atol=1e-5)


def test_observe_brings_rejected_rows_with_what_they_follow(llm: LLM, with_proposer: Any) -> None:
    recorder = Recorder(needs_uncached_prompt=True)
    llm.generate(PROMPTS[0], GREEDY, speculation=with_proposer(recorder))
    assert len(recorder.rejected) > 5
    for text, features, top in recorder.rejected:
        plain = stock_rows(llm, text)
        assert top.tolist() == plain.logits[0, -1].topk(3).indices.tolist()
        for layer, state in features.items():
            torch.testing.assert_close(state, plain.hidden_states[layer][0, -1], rtol=1e-4, atol=1e-5)


def test_who_does_not_need_every_row_costs_no_cached_one(llm: LLM, with_proposer: Any) -> None:
    prompt = [(3 * i) % V for i in range(11)]
    for needs_uncached_prompt, cached in ((False, 0), (False, 8), (True, 0)):
        recorder = Recorder(needs_uncached_prompt=needs_uncached_prompt)
        output = llm.generate(prompt, GREEDY, speculation=with_proposer(recorder))[0]
        assert output.stats.num_cached_tokens == cached
        (rows,) = recorder.rows.values()
        assert sorted(rows) == list(range(cached, len(prompt) + 15))
        assert all(top is not None for position, (_, _, top) in rows.items() if position >= 10 or needs_uncached_prompt)


def poison(llm: LLM, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the logits of every row that holds `token` into NaN."""
    backend = llm.engine.runner.backend
    stock = backend.forward

    def forward(loaded: Any, context: ForwardContext, aux_layers: Any, part: Any = None) -> PassOutput:
        out = stock(loaded, context, aux_layers, part)
        out.logits[torch.from_numpy(context.batch.tokens[context.batch.wanted] == token)] = float("nan")
        return out

    monkeypatch.setattr(backend, "forward", forward)


def test_non_finite_logits_end_only_their_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1, 2, 3], [4, 5, 60], [6, 7]]
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(60,))
    want = llm.generate(prompts, params, speculation="none")
    poison(llm, 60, monkeypatch)
    got = llm.generate(prompts, params, speculation="none")
    assert isinstance(got[1].error, NonFiniteLogitsError)
    assert [got[0].token_ids, got[2].token_ids] == [want[0].token_ids, want[2].token_ids]
    with pytest.raises(NonFiniteLogitsError):
        _ = got[1].text
    llm.engine.runner.blocks.check_integrity([])


def test_a_failing_pass_ends_its_requests_and_the_engine_goes_on(llm: LLM) -> None:
    def explode(*_: Any) -> None:
        raise MemoryError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner.backend, "forward", explode)
        outputs = llm.generate(PROMPTS, GREEDY)
    assert all(isinstance(o.error, ForwardError) for o in outputs)
    assert all(isinstance(o.error.__cause__, MemoryError) for o in outputs if o.error)
    llm.engine.runner.blocks.check_integrity([])
    assert all(o.error is None for o in llm.generate(PROMPTS, GREEDY))

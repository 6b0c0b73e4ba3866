"""Passes that go on where a proposer has begun some rows: right to the bit, and for nobody to mislead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from outrider import LLM, SpeculationConfig
from outrider.draft import Draft
from outrider.engine.drafting.planning import as_requested
from outrider.lab.prove.own_model import CacheAudit
from outrider.model import resumed_forward
from outrider.model.batch import Segment
from outrider.model.resumed_forward import TargetPass, resumes_exactly
from outrider.propose import own_layers
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest, Requirements
from outrider.propose.bridge import SameVocabulary
from outrider.propose.own_layers import EarlyExit
from outrider.propose.settings import Method, ProposerContext
from tests.model import checkpoints
from tests.model.test_shared_layers import BACKENDS, EXIT, EXIT_TREE, GREEDY, LENGTH, LOOKUP, PROMPTS, SEEDED, SKIP, load


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("llama"), seed=3)


@pytest.fixture(scope="module")
def llm(path: str, backend: str) -> LLM:
    return load(path, backend)


@pytest.fixture(scope="module")
def fused(path: str) -> LLM:
    return load(path, "fused")


# -- passes that are resumed -------------------------------------------------------------------------------------------


class WatcherProposer(Proposer):
    """Drafts nothing, and is shown hidden states."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.requires = Requirements(aux_layers=layers)

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [Draft() for _ in requests]


class Watcher(Method):
    name: ClassVar[str] = "watcher"

    layers: tuple[int, ...] = ()

    def build(self, context: ProposerContext) -> Proposer:
        return WatcherProposer(self.layers)


def compare_every_pass(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """From now on each resumed pass is computed whole too; the list grows by the largest difference of each, relative to
    the largest entry, over logits, hidden states and KV."""
    runner, stock = llm.engine.runner, TargetPass.forward
    found: list[float] = []

    def slots(segments: Sequence[Segment]) -> torch.Tensor:
        return torch.cat([torch.from_numpy(s.row_slots(runner.blocks.block_size)) for s in segments])

    def both(self: TargetPass, segments: Sequence[Segment], kvs: Any, aux_layers: Sequence[int] = ()) -> Any:
        out = stock(self, segments, kvs, aux_layers)
        if out.num_resumed_rows:
            held = [t.clone() for layer in runner.pool.layers for t in runner.pool.read(layer, slots(segments))]
            want = runner.forward(segments, aux_layers)
            fresh = [t for layer in runner.pool.layers for t in runner.pool.read(layer, slots(segments))]
            assert sorted(out.aux_hidden_states) == sorted(aux_layers)
            ours = [out.logits, *held, *(out.aux_hidden_states[layer] for layer in aux_layers)]
            theirs = [want.logits, *fresh, *(want.aux_hidden_states[layer] for layer in aux_layers)]
            found.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)))
        return out

    monkeypatch.setattr(TargetPass, "forward", both)
    return found


def test_a_resumed_pass_says_what_a_whole_one_says(llm: LLM, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit where the bits of a row do not depend on the batch."""
    found = compare_every_pass(llm, monkeypatch)
    ways = [EXIT, EXIT.replace(method=EarlyExit(layers=1)), EXIT_TREE, SKIP, LOOKUP, EXIT]
    llm.generate([PROMPTS[i % 3] for i in range(6)], SEEDED, speculation=ways)
    assert len(found) > 5
    assert max(found) <= (0.0 if backend in ("fused", "row_by_row") else 1e-5)


def test_rows_are_not_computed_twice(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round the first layers compute as many rows as without early exit drafting: each drafted row once."""
    llm = load(path, "fused")
    runner, counts = llm.engine.runner, dict.fromkeys(range(4), 0)
    stock = runner.backend.forward

    def counting(loaded: Any, context: Any, aux_layers: Any, part: Any = None) -> Any:
        for layer in range(4) if part is None else part.layers:
            counts[layer] += context.batch.num_rows
        return stock(loaded, context, aux_layers, part)

    llm.generate(PROMPTS[0], GREEDY, speculation=EXIT)  # whatever is tried out once has been tried
    llm.stats.reset()
    monkeypatch.setattr(runner.backend, "forward", counting)
    llm.generate(PROMPTS[1], GREEDY, speculation=EXIT)
    assert counts == dict.fromkeys(range(4), llm.stats.num_rows)
    assert llm.stats.num_resumed_rows > llm.stats.num_rows // 2


#: The layers that somebody watches, and whether passes are resumed all the same.
WATCHED = {(2, 4): True, (3,): True, (1, 3): False, (0,): False}


@pytest.mark.parametrize("layers", WATCHED, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True, ids=str)
def test_hidden_states_for_others_are_right(
    llm: LLM, backend: str, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]
) -> None:
    """Rows that go on at layer 2 have no hidden states of layers before: such a pass is computed whole."""
    found = compare_every_pass(llm, monkeypatch)
    watcher = SpeculationConfig(method=Watcher(layers=layers))
    llm.engine.drafting.planner = lambda seq: (watcher, EXIT)
    outputs = llm.generate(PROMPTS, GREEDY, speculation="none")
    llm.engine.drafting.planner = as_requested
    assert bool(found) is WATCHED[layers]
    assert max(found, default=0.0) <= (0.0 if backend in ("fused", "row_by_row") else 1e-5)
    assert sum(o.stats.num_proposer_faults for o in outputs) == 0


def test_a_model_that_cannot_be_computed_in_two_parts_is_not(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by trying it: drafts are made all the same, and every pass runs whole."""
    llm = load(path, "paged")
    runner = llm.engine.runner
    assert resumes_exactly(runner, 2)
    stock = runner.backend.forward

    def astray(loaded: Any, context: Any, aux_layers: Any, part: Any = None) -> Any:
        out = stock(loaded, context, aux_layers, part)
        if part is not None and part.hidden is not None:
            out.logits.mul_(-1.0)
        return out

    monkeypatch.setattr(runner.backend, "forward", astray)
    assert not resumes_exactly(runner, 2)
    plain = llm.generate(PROMPTS, GREEDY, speculation="none")
    outputs = llm.generate(PROMPTS, GREEDY, speculation=EXIT)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert llm.stats.num_resumed_rows == 0


def test_the_probe_sees_another_layer(fused: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that resumes one layer too early is not taken for exact."""
    stock = resumed_forward.PartialPass

    def shifted(layers: tuple[int, ...], hidden: Any = None) -> Any:
        return stock(layers if hidden is None else (layers[0] - 1, *layers), hidden)

    monkeypatch.setattr(resumed_forward, "PartialPass", shifted)
    assert not resumes_exactly(fused.engine.runner, 2)


# -- proposers that would mislead it -----------------------------------------------------------------------------------


class MisleadingProposer(own_layers.SharedLayersProposer):
    """Drafts by early exit, and then does something that must not reach the target's own pass."""

    def __init__(self, context: ProposerContext, trick: str) -> None:
        super().__init__(context.target, (0, 1), SameVocabulary(context.vocab_size))
        self.trick = trick
        self.tricked = 0

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafts = list(super().propose(requests, noise))
        for place, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            if len(draft):
                self.tricked += 1
                drafts[place] = getattr(self, self.trick)(request, draft)
        return drafts

    def _run(self, request: ProposeRequest, tokens: Sequence[int], at: int = 0, **how: Any) -> Any:
        sequence = request.sequence
        rows = self.target.rows(sequence.kv, list(tokens), len(sequence.token_ids) - 1 + at, how.pop("parents", None))
        return self.target.run([rows], **{"layers": (0, 1), **how})

    def other_tokens(self, request: ProposeRequest, draft: Draft) -> Draft:
        other = tuple((token + 1) % 60 for token in draft.token_ids)
        return Draft.chain(other, draft.laws[0], draft.draft_probs).opaque()

    def other_end(self, request: ProposeRequest, draft: Draft) -> Draft:
        return Draft.chain((*draft.token_ids[:-1], 7), draft.laws[0], draft.draft_probs).opaque()

    def given_hidden_states(self, request: ProposeRequest, draft: Draft) -> Draft:
        tokens = [request.last_token_id, *draft.token_ids[:-1]]
        self._run(request, tokens, resume_from=self.target.embed([5] * len(tokens)))
        return draft

    def other_layers(self, request: ProposeRequest, draft: Draft) -> Draft:
        self._run(request, [9] * len(draft), layers=(0, 2))
        return draft

    def other_rows_over_them(self, request: ProposeRequest, draft: Draft) -> Draft:
        true = [request.last_token_id, *draft.token_ids[:-1]]
        self._run(request, [(token + 1) % checkpoints.VOCAB_SIZE for token in true])
        return draft

    def other_rows_over_the_last(self, request: ProposeRequest, draft: Draft) -> Draft:
        if len(draft) > 1:
            self._run(request, [9], at=len(draft) - 1)
        return draft

    def a_tree_over_them(self, request: ProposeRequest, draft: Draft) -> Draft:
        tokens = [request.last_token_id, *draft.token_ids[:-1]]
        self._run(request, tokens, parents=(-1,) * len(tokens))
        return draft

    def a_gap(self, request: ProposeRequest, draft: Draft) -> Draft:
        """The first row is never computed in the place where its successor looks for it."""
        self._run(request, [9] * len(draft), layers=(3,))
        for place, token in enumerate(draft.token_ids[:-1], 1):
            self._run(request, [token], at=place)
        return draft

    def half_a_run(self, request: ProposeRequest, draft: Draft) -> Draft:
        """A run that raises when it has written already."""
        runner = self.target._runner
        stock = runner.forward

        def breaking(*args: Any) -> Any:
            stock(*args)
            raise RuntimeError("planted fault")

        runner.forward = breaking  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="planted"):
            self._run(request, [9] * len(draft))
        runner.forward = stock  # type: ignore[method-assign]
        return draft

    def changes_what_it_was_given(self, request: ProposeRequest, draft: Draft) -> Draft:
        self._run(request, [9], layers=(3,))  # so that nothing goes on behind rows of which there is a copy already
        with torch.inference_mode():
            out = self._run(request, [request.last_token_id, *draft.token_ids[:-1]])
            out.hidden.zero_()
        return draft

    def shorter(self, request: ProposeRequest, draft: Draft) -> Draft:
        return draft.first(1)

    def malformed(self, request: ProposeRequest, draft: Draft) -> Draft:
        return Draft((*draft.token_ids[:-1], 999), draft.parents, draft.laws, draft.draft_probs)


TRICKS = [name for name in vars(MisleadingProposer) if not name.startswith("_") and name != "propose"]


class Misleading(Method):
    name: ClassVar[str] = "misleading"

    trick: str = ""

    def build(self, context: ProposerContext) -> Proposer:
        return MisleadingProposer(context, self.trick)


@pytest.mark.parametrize("trick", TRICKS)
def test_rows_that_a_proposer_has_spoilt_are_computed_anew(fused: LLM, monkeypatch: pytest.MonkeyPatch, trick: str) -> None:
    found = compare_every_pass(fused, monkeypatch)
    speculation = SpeculationConfig(method=Misleading(trick=trick), num_draft_tokens=LENGTH)
    proposer = fused.proposers.get(Misleading(trick=trick))
    assert isinstance(proposer, MisleadingProposer)
    for params in (GREEDY, SEEDED):
        plain = fused.generate(PROMPTS, params, speculation="none")
        for prompt in PROMPTS:
            fused.engine.add_request(tuple(prompt), params, speculation)
        audit = CacheAudit(fused.engine)
        audit.run()
        assert audit.worst == 0.0
        assert [o.token_ids for o in fused.generate(PROMPTS, params, speculation=speculation)] == [
            o.token_ids for o in plain
        ]
    assert proposer.tricked > 20
    assert max(found, default=0.0) == 0.0
    resumable = (
        "other_tokens",
        "other_end",
        "other_rows_over_the_last",
        "shorter",
        "malformed",
        "changes_what_it_was_given",
    )
    assert bool(found) is (trick in resumable), "what is still true is used"


def test_rows_of_an_earlier_step_are_forgotten(fused: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a proposer runs after a pass, for the next draft, is not there in the next step: the memory may be another's."""
    found = compare_every_pass(fused, monkeypatch)

    class Early(own_layers.SharedLayersProposer):
        requires = Requirements(aux_layers=(4,))

        def observe(self, rows: Any) -> None:
            for seen in rows:
                sequence = seen.sequence
                if sequence.kv.num_computed < sequence.kv.capacity:
                    tokens = [sequence.token_ids[-1]]
                    self.target.run([self.target.rows(sequence.kv, tokens, len(sequence.token_ids) - 1)], layers=(0, 1))

        def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
            return [Draft() for _ in requests]

    class EarlyMethod(Method):
        name: ClassVar[str] = "early"

        def build(self, context: ProposerContext) -> Proposer:
            return Early(context.target, (0, 1), SameVocabulary(context.vocab_size))

    output = fused.generate(PROMPTS[0], GREEDY, speculation=EarlyMethod())[0]
    assert output.stats.num_proposer_faults == 0
    assert output.token_ids == fused.generate(PROMPTS[0], GREEDY, speculation="none")[0].token_ids
    assert not found

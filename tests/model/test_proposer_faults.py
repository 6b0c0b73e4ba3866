"""A broken proposer costs speed, never a token; a broken target costs the request concerned and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.errors import ForwardError, NonFiniteLogitsError
from outrider.model.context import ForwardContext
from outrider.propose import registry
from outrider.propose.base import CommittedRows, DraftNoise, Proposer, ProposeRequest, ProposerSequence, Requirements
from outrider.propose.draft import Draft, Law
from outrider.propose.draft_model import DraftModelProposer
from tests.model import checkpoints

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
}


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

    def __init__(self, verb: str) -> None:
        self.verb = verb

    def _maybe(self, verb: str) -> None:
        if verb == self.verb:
            raise RuntimeError(f"planted in {verb}")

    def begin(self, sequence: ProposerSequence) -> None:
        self._maybe("begin")

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> list[Draft]:
        self._maybe("propose")
        return [] if self.verb == "too few" else [Draft.chain([1, 2], Law.OPAQUE) for _ in requests]

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        self._maybe("observe")

    def finish(self, sequence: ProposerSequence) -> None:
        self._maybe("finish")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("pair")
    target = checkpoints.save("llama", folder / "target", seed=1, layers=2)
    draft = checkpoints.save("llama", folder / "draft", seed=1, layers=1)
    speculation = SpeculationConfig(proposer="draft_model", draft_model=draft, num_draft_tokens=3)
    return LLM(target, dtype="float64", block_size=4, speculation=speculation)


@pytest.fixture
def with_proposer(llm: LLM) -> Iterator[Callable[[Proposer], SpeculationConfig]]:
    """Registers a proposer object under a name of its own."""
    names = []

    def register(proposer: Proposer) -> SpeculationConfig:
        names.append(f"planted_{len(registry._factories)}")
        registry.register(names[-1], lambda context: proposer)
        return SpeculationConfig(proposer=names[-1], num_draft_tokens=3, options={"id": id(proposer)})

    yield register
    for name in names:
        del registry._factories[name]


GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(seed=3, max_tokens=16)
UNSEEDED = SamplingParams(max_tokens=16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("fault", [*ROW_FAULTS, *WHOLE_FAULTS])
def test_spoilt_drafts_change_nothing(llm: LLM, with_proposer: Any, fault: str, row: int) -> None:
    inner = llm.proposers.get(llm.speculation)
    assert isinstance(inner, DraftModelProposer)
    config = with_proposer(Spoiler(inner, {**ROW_FAULTS, **WHOLE_FAULTS}[fault], row))
    for params in (GREEDY, SEEDED):
        want = [o.token_ids for o in llm.generate(PROMPTS, params, speculation="none")]
        assert [o.token_ids for o in llm.generate(PROMPTS, params, speculation=config)] == want
    unseeded = llm.generate(PROMPTS, UNSEEDED, speculation=config)
    assert all(o.error is None and len(o.token_ids) == 16 for o in unseeded)
    assert sum(o.stats.num_proposer_faults for o in unseeded) > 0
    inner.check_integrity()


TREE_FAULTS: dict[str, Callable[[Draft, int], Any]] = {
    **ROW_FAULTS,
    **WHOLE_FAULTS,
    "token drawn twice": lambda d, j: changed(d, j ^ 1, token=d.token_ids[j]),
    "laws of siblings differ": lambda d, j: changed(d, j, law=torch.full((V,), 1.0 / V)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [0, 3, 5])
@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_spoilt_trees_change_nothing(llm: LLM, with_proposer: Any, fault: str, row: int) -> None:
    inner = llm.proposers.get(llm.speculation)
    assert isinstance(inner, DraftModelProposer)
    config = with_proposer(Spoiler(inner, TREE_FAULTS[fault], row)).replace(tree=(2, 2), num_draft_tokens=6)
    for params in (GREEDY, SEEDED):
        want = [o.token_ids for o in llm.generate(PROMPTS, params, speculation="none")]
        assert [o.token_ids for o in llm.generate(PROMPTS, params, speculation=config)] == want
    unseeded = llm.generate(PROMPTS, UNSEEDED, speculation=config)
    assert all(o.error is None and len(o.token_ids) == 16 for o in unseeded)
    assert sum(o.stats.num_proposer_faults for o in unseeded) > 0
    inner.check_integrity()


@pytest.mark.parametrize("verb", ["begin", "propose", "observe", "finish", "too few"])
def test_a_raising_proposer_changes_nothing(llm: LLM, with_proposer: Any, verb: str) -> None:
    config = with_proposer(Raiser(verb))
    for params in (GREEDY, SEEDED):
        want = [o.token_ids for o in llm.generate(PROMPTS, params, speculation="none")]
        mixed = llm.generate(PROMPTS, params, speculation=[config, llm.speculation, config])
        assert [o.token_ids for o in mixed] == want
        assert mixed[1].stats.num_proposer_faults == 0, "a neighbour's proposer is not to blame"
    llm.engine.runner.blocks.check_integrity([])


def test_after_a_fault_drafts_count_as_opaque(llm: LLM, with_proposer: Any) -> None:
    from outrider.engine import drafting

    inner = llm.proposers.get(llm.speculation)
    assert isinstance(inner, DraftModelProposer)
    seen: list[Draft] = []
    original = drafting._checked

    def record(*args: Any) -> Draft:
        seen.append(original(*args))
        return seen[-1]

    config = with_proposer(Spoiler(inner, ROW_FAULTS["law is nan"], 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "_checked", record)
        llm.generate(PROMPTS[0], UNSEEDED, speculation=config)
    assert seen[0].candidate_laws == {Law.SAMPLED}
    assert len(seen[0]) == 1
    assert all(draft.candidate_laws <= {Law.OPAQUE} for draft in seen[1:])


class Recorder(Proposer):
    """Asks for features and keeps every row it is shown."""

    requires = Requirements(aux_layers=(0, 1, 2), target_top_k=3)

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[int, dict[int, torch.Tensor], torch.Tensor]]] = {}

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> list[Draft]:
        return [Draft.chain([t % V for t in r.sequence.token_ids[-2:]], Law.DETERMINISTIC) for r in requests]

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for part in rows:
            assert part.target_top_k is not None
            for i, position in enumerate(part.positions):
                features = {layer: states[i] for layer, states in part.aux_hidden_states.items()}
                seen = self.rows.setdefault(part.sequence.seq_id, {})
                seen[position] = (part.token_ids[i], features, part.target_top_k[0][i])


def test_observe_brings_every_committed_row(llm: LLM, with_proposer: Any) -> None:
    recorder = Recorder()
    output = llm.generate(PROMPTS[0], GREEDY, speculation=with_proposer(recorder))[0]
    text = [*PROMPTS[0], *output.token_ids]
    (rows,) = recorder.rows.values()
    assert sorted(rows) == list(range(len(text) - 1)), "all but the last token, which has no row yet"
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(llm.engine.runner.loaded.name, dtype=torch.float64)
        plain = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    for position, (token, features, top) in rows.items():
        assert token == text[position]
        assert top.tolist() == plain.logits[0, position].topk(3).indices.tolist()
        for layer, state in features.items():
            torch.testing.assert_close(state, plain.hidden_states[layer][0, position], rtol=1e-4, atol=1e-5)


def poison(llm: LLM, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the logits of every row that holds `token` into NaN."""
    backend = llm.engine.runner.backend
    stock = backend.forward

    def forward(loaded: Any, context: ForwardContext, aux_layers: Any) -> Any:
        logits, aux = stock(loaded, context, aux_layers)
        logits[torch.from_numpy(context.batch.tokens[context.batch.wanted] == token)] = float("nan")
        return logits, aux

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

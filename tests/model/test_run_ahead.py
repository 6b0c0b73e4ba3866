"""A draft model that does not wait for its tokens drafts what it drafts otherwise, token by token and law by law."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.draft import Draft
from outrider.lab.prove.engine import BOUND, EngineProof
from outrider.lab.prove.settings import SETTINGS
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.model.runner import ModelRunner
from outrider.propose import draft_model
from outrider.propose.draft_model import DraftModelProposer

PROMPTS = [[1, 5, 9, 2, 7], [3, 1, 4], [2, 2, 8, 6, 5, 3], [11]]
GREEDY, SAMPLED, CUT = (
    SamplingParams(max_tokens=14, ignore_eos=True, **how)
    for how in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9})
)
PENALISED = SamplingParams(max_tokens=14, ignore_eos=True, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pair(tmp_path_factory.mktemp("ahead")) as made:
        yield made


@contextmanager
def pair(folder: Path) -> Iterator[LLM]:
    """A target and a draft model on stock operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", "off")
        target, draft = (save_tiny_llama(folder / str(seed), seed=seed, vocab_size=13) for seed in (1, 2))
        how: Any = {"method": "draft_model", "num_draft_tokens": 4}
        settings: dict[str, Any] = {"dtype": "float64", "attention_backend": "paged", "kv_cache_tokens": 512}
        with LLM(target, draft_model=draft, speculation=how, **settings) as made:
            yield made


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed have this one in every run."""
    monkeypatch.setattr("outrider.engine.engine.secrets.randbits", lambda bits: 5)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return noted(monkeypatch)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was drafted, how, and which rows the draft model computed."""
    found: list[tuple[Any, ...]] = []
    real, ahead, forward = DraftModelProposer.propose, DraftModelProposer._run_ahead, ModelRunner.forward

    def compute(self: ModelRunner, segments: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(("rows", *[(segment.start, segment.num_rows) for segment in segments]))
        return forward(self, segments, *args, **kwargs)

    def propose(self: DraftModelProposer, *args: Any) -> Any:
        drafts: list[Draft] = list(real(self, *args))
        found.extend((d.token_ids, d.laws, None if d.draft_probs is None else d.draft_probs.tolist()) for d in drafts)
        return drafts

    monkeypatch.setattr(ModelRunner, "forward", compute)
    monkeypatch.setattr(DraftModelProposer, "propose", propose)
    monkeypatch.setattr(DraftModelProposer, "_run_ahead", lambda *a: (found.append(("ahead",)), ahead(*a))[1])
    return found


def written(llm: LLM, params: list[SamplingParams], config: SpeculationConfig) -> list[Any]:
    outputs = llm.generate(PROMPTS, params, speculation=config)
    assert all(each.stats.num_proposer_faults == 0 for each in outputs)
    return [(each.token_ids, each.stats.num_draft_tokens, each.stats.num_accepted_tokens) for each in outputs]


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
@pytest.mark.parametrize(
    "params", [[GREEDY] * 4, [SAMPLED] * 4, [GREEDY, SAMPLED, CUT, SAMPLED]], ids=["greedy", "sampled", "mixed"]
)
def test_drafts_are_those_of_a_proposer_that_waits(
    params: list[SamplingParams], rule: Any, llm: LLM, drafted: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SpeculationConfig(method=llm.speculation.method, num_draft_tokens=4, rule=rule)
    want, waiting = written(llm, params, config), list(drafted)
    assert ("ahead",) not in waiting
    drafted.clear()
    monkeypatch.setattr(draft_model, "host_waits", lambda device: True)
    got = written(llm, params, config)
    assert got == want
    assert drafted.count(("ahead",)) > 3
    assert [each for each in drafted if each != ("ahead",)] == waiting
    assert any(accepted for _, _, accepted in got)


def test_drafts_that_depend_on_tokens_wait(
    llm: LLM, drafted: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "host_waits", lambda device: True)
    tree = SpeculationConfig(method=llm.speculation.method, num_draft_tokens=6, tree=(2, 2))
    sure = SpeculationConfig(method=llm.speculation.method.model_copy(update={"min_confidence": 0.2}), num_draft_tokens=4)
    for params, config in ((GREEDY, tree), (GREEDY, sure), (PENALISED, llm.speculation)):
        written(llm, [params] * 4, config)
    assert ("ahead",) not in drafted


def test_rows_that_are_no_numbers_end_a_chain(
    llm: LLM, drafted: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what a broken draft model leaves. The text is the target's own, and the device never sees such a token."""
    want = [text for text, _, _ in written(llm, [GREEDY] * 4, SpeculationConfig(method="none"))]
    monkeypatch.setattr(draft_model, "host_waits", lambda device: True)
    real = draft_model.next_of_chains

    def spoilt(growths: Any, logits: torch.Tensor, depth: int, noise: Any) -> Any:
        return real(growths, torch.full_like(logits, float("nan")) if depth == 1 else logits, depth, noise)

    monkeypatch.setattr(draft_model, "next_of_chains", spoilt)
    drafted.clear()
    got = written(llm, [GREEDY] * 4, llm.speculation)
    assert [text for text, _, _ in got] == want
    assert {len(each[0]) for each in drafted if each[0] not in ("ahead", "rows")} <= {0, 1}


# --- The law of texts.

LAWS = {setting.name: setting for setting in SETTINGS}


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProof]:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", "off")
        made = EngineProof(save_tiny_llama(folder / "target", 1), save_tiny_llama(folder / "draft", 2))
        with made.llm:
            yield made


@pytest.mark.parametrize("name", ["token", "block", "coupled", "walk", "auto, seeded", "then, a lookup and a drawn draft"])
def test_the_law_is_the_target_s(
    name: str, proof: EngineProof, drafted: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "host_waits", lambda device: True)
    proof.llm.stats.reset()
    assert proof.prove(LAWS[name], 3).measured <= BOUND
    assert ("ahead",) in drafted
    assert proof.llm.stats.finished.num_proposer_faults == 0


def test_control_a_token_that_claims_another_law(proof: EngineProof, monkeypatch: pytest.MonkeyPatch) -> None:
    real = draft_model.next_of_chains

    def misled(growths: Any, logits: torch.Tensor, depth: int, noise: Any) -> Any:
        rows, tokens = real(growths, logits, depth, noise)
        return [row.roll(1, 0) for row in rows], tokens

    monkeypatch.setattr(draft_model, "host_waits", lambda device: True)
    monkeypatch.setattr(draft_model, "next_of_chains", misled)
    assert proof.prove(LAWS["block"], 3).measured > 0.01

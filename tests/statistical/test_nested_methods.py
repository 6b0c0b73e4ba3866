"""The joint distribution of the engine with methods inside methods.

Members have draws of their own, and a middle model verifies the guess of its own drafter with the engine's rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outrider.draft import EMPTY, Draft
from outrider.errors import ContradictionError, InvalidParameterError, StepAbortedError
from outrider.lab.prove.engine import EngineProof
from outrider.lab.prove.settings import DRAFT, TARGET, Setting
from outrider.lab.prove.suite import method_settings
from outrider.lab.prove.tiny import raise_norms, save_tiny_llama
from outrider.params import SamplingParams
from outrider.propose import settings as registry
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest, ProposerSequence
from outrider.propose.draft_model import DraftModelProposer
from outrider.propose.settings import Members, Method, ProposerContext, SpeculationConfig
from outrider.propose.staged import StagedProposer
from outrider.propose.tree import CHAIN
from outrider.verify.noise import KeyedNoise
from outrider.verify.verifier import DraftCandidate


def build(context: ProposerContext, member: SpeculationConfig) -> Proposer:
    assert member.method is not None
    proposer = context.build(member.method)
    if isinstance(proposer, DraftModelProposer):
        raise_norms(proposer.runner.loaded.model)
    return proposer


class ChainedProposer(Proposer):
    """Each member goes on behind the one before."""

    def __init__(self, members: Sequence[Proposer], lengths: Sequence[int]) -> None:
        self.members, self.lengths = members, lengths

    def begin(self, sequence: ProposerSequence) -> None:
        for member in self.members:
            member.begin(sequence)

    def finish(self, sequence: ProposerSequence) -> None:
        for member in self.members:
            member.finish(sequence)

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafts = [EMPTY for _ in requests]
        for index, (member, length) in enumerate(zip(self.members, self.lengths, strict=True)):
            asked = [
                replace(
                    r,
                    budget=max(0, min(length, r.budget - len(d), r.max_depth - len(d))),
                    max_depth=max(0, r.max_depth - len(d)),
                    path=(*r.path, *d.token_ids),
                    builder=CHAIN,
                )
                for r, d in zip(requests, drafts, strict=True)
            ]
            more = member.propose(asked, noise.member(index))
            drafts = [d.joined(tail, d.deepest)[0] for d, tail in zip(drafts, more, strict=True)]
        return drafts


class Chained(Method):
    name: ClassVar[str] = "test_chained"
    takes_tree: ClassVar[bool] = False

    members: Members

    def build(self, context: ProposerContext) -> Proposer:
        return ChainedProposer([build(context, m) for m in self.members], [m.num_draft_tokens for m in self.members])


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    registry.register(Chained)
    yield
    del registry._registered[Chained.name]


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> EngineProof:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return EngineProof(save_tiny_llama(folder / "target", 1), save_tiny_llama(folder / "draft", 2))


_MODEL = {"method": "draft_model", "model": DRAFT, "num_draft_tokens": 1}
CHAINED = {"method": "test_chained", "members": [_MODEL, {**_MODEL, "dtype": "float64"}], "num_draft_tokens": 2}
STAGED = {"method": "staged", "drafter": {"method": "ngram", "min_match": 1}, "model": DRAFT, "num_draft_tokens": 2}
DRAWN = {**STAGED, "drafter": {**_MODEL, "model": TARGET}}
DEEP = {**STAGED, "drafter": {**STAGED, "model": TARGET}}


@pytest.mark.parametrize("rule", ["auto", "token"])
@pytest.mark.parametrize(
    "settings", [CHAINED, STAGED, DRAWN, DEEP], ids=["two drawn members", "lookup", "drawn", "two stages"]
)
def test_nested_methods_are_exact(proof: EngineProof, settings: dict[str, Any], rule: str) -> None:
    finding = proof.prove(Setting("nested", {**settings, "rule": rule}), 3)
    assert finding.passed, finding


def test_nested_methods_have_no_fault_in_long_texts(proof: EngineProof) -> None:
    """No key is used twice, though a stage comes to the same position again after a rejection."""
    proof.llm.engine.use_noise(KeyedNoise())
    for settings in (CHAINED, STAGED, DRAWN, DEEP):
        config = SpeculationConfig.of(proof.filled(settings))
        for seed in range(4):
            params = SamplingParams(max_tokens=40, seed=None if seed else 1)
            output = proof.llm.generate([0, 1, 2], params, speculation=config)[0]
            assert output.stats.num_drafts > 5
            assert output.stats.num_proposer_faults == 0


def _method(proof: EngineProof, settings: dict[str, Any]) -> Method:
    method = SpeculationConfig.of(proof.filled(settings)).method
    assert method is not None
    return method


def proposer_of(proof: EngineProof, settings: dict[str, Any]) -> Any:
    return proof.llm.proposers.get(_method(proof, settings))


def test_a_stage_that_draws_as_the_target_does_is_noticed(proof: EngineProof, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control, whose draws have the keys of the engine's own verification."""
    real = StagedProposer._candidate

    def as_the_engine(*args: Any) -> DraftCandidate:
        candidate = real(*args)
        return replace(candidate, keys=replace(candidate.keys, drafter=0))

    monkeypatch.setattr(StagedProposer, "_candidate", as_the_engine)
    with pytest.raises(StepAbortedError, match="NoiseReuseError"):
        proof.prove(Setting("nested", {**STAGED, "rule": "walk"}), 3)


def test_a_member_that_draws_twice_is_noticed(proof: EngineProof) -> None:
    """A key of a member that is used twice is a fault, like any other."""
    proposer = proposer_of(proof, CHAINED)
    stock = proposer.propose

    def twice(requests: Any, noise: Any) -> Any:
        stock(requests, noise)
        return stock(requests, noise)

    proposer.propose = twice
    try:
        proof.llm.engine.use_noise(KeyedNoise())
        config = SpeculationConfig(method=_method(proof, CHAINED), num_draft_tokens=2)
        output = proof.llm.generate([0, 1, 2], SamplingParams(max_tokens=6), speculation=config)[0]
        assert output.stats.num_proposer_faults > 0, "a key used twice is a fault of the proposer's"
    finally:
        del proposer.propose


def test_nested_settings_are_checked_whole() -> None:
    with pytest.raises(InvalidParameterError, match=r"num_draft_tokens=0"):
        SpeculationConfig.of({**CHAINED, "members": [{**_MODEL, "num_draft_tokens": 0}]})
    with pytest.raises(ContradictionError, match=r"tree=\(2,\): method='ngram' takes no tree"):
        SpeculationConfig.of({**STAGED, "drafter": {"method": "ngram", "tree": [2]}})
    with pytest.raises(InvalidParameterError, match="Did you mean ngram"):
        SpeculationConfig.of({**STAGED, "drafter": "ngramm"})
    with pytest.raises(InvalidParameterError, match="members=5"):
        SpeculationConfig.of({**CHAINED, "members": 5})
    config = SpeculationConfig.of(CHAINED)
    assert SpeculationConfig.of(config.as_mapping()) == config


NESTED: dict[str, Any] = {
    "method": "merge",
    "methods": ["ngram", {"method": "then", "methods": [{"method": "suffix", "min_match": 1}, "draft_model"]}],
}


@pytest.mark.parametrize(
    "asked", [NESTED, {"method": "auto", "methods": [NESTED]}], ids=["itself", "as the engine's choice"]
)
def test_any_nesting_has_settings_to_prove(proof: EngineProof, asked: dict[str, Any]) -> None:
    settings = {setting.name: setting for setting in method_settings(asked)}
    before = proof.llm.stats.finished.num_accepted_tokens
    for name in ("as it is", "token rule"):
        finding = proof.prove(settings[name], 3)
        assert finding.passed, finding
    assert proof.llm.stats.finished.num_accepted_tokens > before

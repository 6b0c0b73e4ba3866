"""The proofs on transformers, with planted errors that they must find."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from outrider.errors import UnforkableError
from outrider.lab.peers.assisted import CALLS, AssistedGeneration, Call, explore_torch

pytestmark = pytest.mark.by_change("src/outrider/lab/prove/", "tests/statistical/test_other_engines.py")
DRAFT = next(call for call in CALLS if call.name == "assistant_model=draft [num_assistant_tokens=2]")
TRUNCATED = Call(DRAFT.speculation, DRAFT.assistant, {"top_k": 2})
LOOKUP = {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    yield AssistedGeneration(tmp_path_factory.mktemp("pair"))
    torch.set_num_threads(threads)


# -- torch with its random draws replaced ------------------------------------------------------------------------------


def test_draws_become_branches():
    found = explore_torch(lambda: tuple(torch.multinomial(torch.tensor([[0.2, 0.8], [1.0, 3.0]]), 1).flatten().tolist()))
    assert found.probs == pytest.approx({(0, 0): 0.05, (0, 1): 0.15, (1, 0): 0.2, (1, 1): 0.6})


def test_uniform_numbers_are_intervals():
    def program():
        u = torch.rand_like(torch.zeros(2))
        first = u <= torch.tensor([0.5, 0.0])
        again = torch.tensor([0.25, 2.0]) > u  # the same numbers, with the tensor on the left
        return (*first.tolist(), *again.tolist())

    found = explore_torch(program)
    expected = {(True, False, True, True): 0.25, (True, False, False, True): 0.25, (False, False, False, True): 0.5}
    assert found.probs == pytest.approx(expected)
    assert found.num_paths == 3


def test_a_threshold_that_is_no_number_is_passed_by_nobody():
    nan = torch.full((1,), float("nan"))
    found = explore_torch(lambda: (bool(torch.rand(1) <= nan), bool(torch.rand(1) > nan)))
    assert found.probs == {(False, False): 1.0}


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.rand(2) * 2 < 1,
        lambda: torch.log(torch.rand(2)),
        lambda: torch.rand(2).sum(),
        lambda: torch.multinomial(torch.ones(3), 2),
        lambda: torch.randn(2),
        lambda: torch.ones(2).exponential_(),
        lambda: torch.randint(5, (2,)),
        lambda: torch.rand(2, generator=torch.Generator()) < 0.5,
        lambda: np.random.rand(),
        lambda: random.random(),
    ],
    ids=["arithmetic", "function", "method", "two", "normal", "in place", "integers", "own generator", "numpy", "python"],
)
def test_chance_that_cannot_be_followed_is_noticed(program):
    with pytest.raises(UnforkableError):
        explore_torch(lambda: (str(program()),))


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [DRAFT, TRUNCATED, Call({"assistant_early_exit": 1}, DRAFT.assistant, num_layers=2)])
def test_lossless_calls(engine, call):
    finding = engine.prove_distribution(call, 3)
    assert finding.passed
    assert finding.measured < 1e-6
    assert not finding.informs


def test_plain_generation_is_what_it_is_compared_with(engine):
    assert engine.prove_plain({"top_k": 2, "temperature": 0.6}, 3).measured < 1e-6


def test_lossy_by_its_documentation(engine):
    finding = engine.prove_distribution(next(call for call in CALLS if call.lossy_by_design), 2)
    assert finding.informs
    assert finding.measured > 0.01


def test_stop_string_inside_a_draft(engine):
    """transformers 5.23 writes past the stop string. Once a release mends this, the distribution is the plain one."""
    finding = engine.prove_distribution(Call(LOOKUP, params={"tokenizer": "abcdef", "stop_strings": ["c"]}), 2)
    assert finding.passed == (finding.measured < 1e-6)


def test_a_call_that_may_raise_is_said_and_not_judged(engine):
    refused = {"prompt_lookup_num_tokens": -1}
    finding = engine.prove_distribution(Call(refused, may_raise=True), 2)
    assert finding.informs
    assert "ValueError" in finding.detail
    with pytest.raises(ValueError, match="num_output_tokens"):
        engine.prove_distribution(Call(refused), 2)


def test_greedy_text(engine):
    assert engine.prove_greedy(DRAFT.greedy, 12).passed
    bent = Call({**DRAFT.speculation, "assistant_ensemble_weight": 0.01}, DRAFT.assistant)
    assert engine.prove_greedy(bent, 12).measured > 0


def test_seeded_text_only_informs(engine):
    finding = engine.compare_seeded(DRAFT, 8)
    assert finding.informs
    assert finding.measured > 0


# -- planted errors ----------------------------------------------------------------------------------------------------


def test_control_residual_without_the_draft(engine, monkeypatch):
    from transformers.generation import utils

    real = utils._speculative_sampling

    def from_target(ids, draft_logits, length, target_logits, **more):
        text, matches = real(ids, draft_logits, length, target_logits, **more)
        redrawn = torch.multinomial(target_logits[:, matches].softmax(-1), 1)
        return torch.cat([text[:, :-1], redrawn], -1), matches

    monkeypatch.setattr(utils, "_speculative_sampling", from_target)
    assert engine.prove_distribution(DRAFT, 2).measured > 1e-3


def test_control_probabilities_reported_before_truncation(engine, monkeypatch):
    from transformers.generation import utils

    real = utils._speculative_sampling

    def with_raw_probabilities(ids, draft_logits, length, target_logits, **more):
        return real(ids, draft_logits.clamp(min=draft_logits[draft_logits.isfinite()].min()), length, target_logits, **more)

    monkeypatch.setattr(utils, "_speculative_sampling", with_raw_probabilities)
    assert engine.prove_distribution(TRUNCATED, 2).measured > 1e-3


def test_control_unlikely_draft_token_dropped(engine, monkeypatch):
    from transformers.generation.candidate_generator import AssistedCandidateGenerator as Generator

    real = Generator._generate_candidates

    def choosy(self, arguments):
        ids, logits = real(self, arguments)
        sure = float(logits[0, -1].softmax(-1)[ids[0, -1]]) >= 0.4
        return (ids, logits) if sure else (ids[:, :-1], logits[:, :-1] if logits.shape[1] > 1 else None)

    monkeypatch.setattr(Generator, "_generate_candidates", choosy)
    assert engine.prove_distribution(DRAFT, 2).measured > 1e-3


def test_control_coins_from_the_wrong_side(engine, monkeypatch):
    """A coin that accepts with one minus its probability must show."""
    real = torch.rand_like

    def turned(like, **more):
        return real(like, **more) if float(like.max()) >= 1.0 else _Turned(real(like, **more))

    class _Turned:
        def __init__(self, uniforms):
            self._uniforms = uniforms

        def __le__(self, thresholds):
            return self._uniforms >= thresholds

    monkeypatch.setattr(torch, "rand_like", turned)
    assert engine.prove_distribution(DRAFT, 2).measured > 1e-3

"""Rounds of drafts as deep as in production, whose distribution is enumerated, with controls that must turn red."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.model.core import DRAFTING, core

from outrider.lab.prove.deep_rounds import BOUND, DEEP_SETTINGS, deep_round, prove_deep
from outrider.verify import verifier
from outrider.verify.processing import Processing

BY_NAME = {setting.name: setting for setting in DEEP_SETTINGS}
#: Crossings of what others show, of many paths.
OF_DRAFTING = ("block, three tokens", "penalties, token", "tree that branches deep, walk", "bad words, walk")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", core(BY_NAME, BY_NAME.keys() - OF_DRAFTING, *DRAFTING))
def test_a_deep_round_has_the_targets_distribution(name, seed):
    finding = prove_deep(BY_NAME[name], seed)
    assert finding.measured <= BOUND
    assert seed > 1 or finding.passed, finding.detail


def test_every_setting_has_a_name_of_its_own():
    assert len(BY_NAME) == len(DEEP_SETTINGS)


@pytest.mark.parametrize(
    "hollow",
    [
        replace(BY_NAME["low confidence, block"], min_confidence=0.01, depth=3, depths=(1, 3)),
        replace(BY_NAME["penalties"], params={}, depth=3, depths=(1, 3)),
        replace(BY_NAME["best-first tree"], num_draft_tokens=2, depth=3, depths=(3, 3)),
    ],
    ids=lambda setting: setting.name,
)
def test_a_setting_in_which_nothing_happens_fails(hollow):
    """It would prove nothing, however exact it is."""
    finding = prove_deep(hollow)
    assert finding.measured <= BOUND
    assert not finding.passed


def test_control_a_parameter_that_looks_back_three_tokens_only(monkeypatch):
    stock = Processing._completions
    monkeypatch.setattr(Processing, "_completions", lambda self, path: stock(self, path) if len(path) < 5 else [])
    assert prove_deep(BY_NAME["bad words"]).measured > 1e-4


def test_control_a_wrong_residual(monkeypatch):
    monkeypatch.setattr(verifier, "residual", lambda p, q, weight: p)
    assert prove_deep(BY_NAME["token, 8 places"]).measured > 1e-4


def test_coins_that_a_rule_does_not_read_are_one_branch():
    """The number of paths grows with the depth as the number of drafts does, and not with that of all coins."""
    found = deep_round(BY_NAME["token, 8 places"])
    assert found.num_drafts == 2**8
    assert found.num_paths <= 2**8 * 9 * 2

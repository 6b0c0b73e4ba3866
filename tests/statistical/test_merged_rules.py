"""Enumerates drafts of several members: in fractions, through the production Verifier, and with planted pitfalls."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from tests.model.core import DRAFTING, core
from tests.statistical import nested_laws, planted
from tests.statistical.nested_laws import prove_merged_reference, prove_merged_verifier

from outrider.lab.prove.tree_reference import TreeRule
from outrider.verify import rules

RULES = [TreeRule.RECURSIVE, TreeRule.TRAVERSAL]
CHAINS = ((1, 1), (1, 1))
TREES = ((2,), (2,))


@pytest.mark.by_change("src/outrider/lab/prove/", "tests/statistical/")
@pytest.mark.parametrize("alike", [False, True], ids=["unlike", "equal"])
@pytest.mark.parametrize("shape", [CHAINS, TREES, ((2, 1), (1,)), ((1,), (1,), (1,))], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_several_members_are_exact_in_fractions(rule: TreeRule, shape: Any, alike: bool) -> None:
    assert prove_merged_reference(rule, shape, 8, 3, alike=alike, guessed_tokens=2 * (shape == CHAINS)).measured == 0.0


ONE = (1,)
#: Rules, shapes, numbers of cases and of tokens, whether there are guesses, and whether all members draw from one law.
VERIFIED = [
    (rule, shape, *sizes, alike)
    for shape, *sizes in ((CHAINS, 8, 3, False), (TREES, 8, 2, True), ((ONE, ONE), 16, 3, True), ((ONE,) * 3, 8, 2, False))
    for rule, alike in product(RULES, (False, True))
]
#: Long chains take most of the time, and recursive rejection goes down them as it goes down trees.
SLOW = [case for case in VERIFIED if case[1] == CHAINS and (case[0] is not TreeRule.TRAVERSAL or case[5])]
#: What always runs: every shape but long chains, both rules, and members of one law and of two.
FEWER = [VERIFIED[place] for place in (5, 10, 12, 15)]


@pytest.mark.parametrize(
    ("rule", "shape", "count", "length", "guesses", "alike"), core(VERIFIED, FEWER, *DRAFTING, slow=SLOW), ids=str
)
def test_several_members_through_the_verifier(
    rule: TreeRule, shape: Any, count: int, length: int, guesses: bool, alike: bool
) -> None:
    finding = prove_merged_verifier(rule, shape, count, length, alike=alike, guessed_tokens=2 * guesses)
    assert finding.passed, finding


# -- negative controls -------------------------------------------------------------------------------------------------


def _red(rule: TreeRule) -> float:
    return prove_merged_verifier(rule, ((1,), (1,)), 16, 2).measured


@pytest.mark.parametrize("rule", RULES)
def test_control_one_test_for_a_token_that_two_members_drew(rule: TreeRule, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.one_test_a_token(monkeypatch)
    assert _red(rule) > 0.01


def test_control_opaque_where_two_members_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = nested_laws._draw

    def collided(*args: Any) -> Any:
        draft = stock(*args)
        return draft.opaque() if draft.num_draws > len(draft) else draft

    monkeypatch.setattr(nested_laws, "_draw", collided)
    assert _red(TreeRule.RECURSIVE) > 0.01


def test_control_a_second_member_tested_against_the_whole_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_residual", lambda wanted, proposal, weight: wanted)
    assert _red(TreeRule.RECURSIVE) > 0.01

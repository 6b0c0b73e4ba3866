"""Enumerates the rules in rational numbers, compares the production code with them, and plants pitfalls that must show."""

from __future__ import annotations

import pytest
import torch

from outrider.lab.prove import reference, tree_reference
from outrider.lab.prove import rules as proofs
from outrider.lab.prove.reference import ReferenceRule
from outrider.lab.prove.tree_reference import TreeRule, alone
from outrider.verify import rules, verifier

#: Counts of cases are multiples of the kinds of them, which take turns.
RULES = list(ReferenceRule)
RATIO_RULES = (ReferenceRule.TOKEN, ReferenceRule.BLOCK)
#: Of proofs that the reference and the prover are right, whatever the engine does.
of_the_prover = pytest.mark.by_change("src/outrider/lab/prove/", "tests/statistical/")
#: Of what shows in fewer rounds, too, where the rules are wrong.
of_the_rules = pytest.mark.by_change("src/outrider/verify/", "src/outrider/lab/prove/", "tests/statistical/")


@of_the_prover
@pytest.mark.parametrize("rule", RULES)
def test_joint_distribution_is_the_targets_exactly(rule):
    length = 3 if rule is ReferenceRule.COUPLED else 4
    finding = proofs.prove_reference(rule, 28, 2, length)
    assert finding.measured == 0.0


@of_the_prover
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_longer_drafts_are_exact(rule):
    assert proofs.prove_reference(rule, 8, 3, 4).measured == 0.0


def test_acceptance_functions_are_the_reference():
    finding = proofs.prove_functions(28)
    assert finding.measured <= finding.bound


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_decisions_on_a_grid_of_injected_coins(rule):
    assert proofs.prove_decisions(rule, 7).measured == 0.0


@pytest.mark.parametrize("rule", RULES)
def test_forked_verifier_has_the_targets_distribution(rule):
    finding = proofs.prove_verifier(rule, 14, 2, 3)
    assert finding.measured <= finding.bound


@of_the_rules
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_forked_verifier_over_more_rounds(rule):
    finding = proofs.prove_verifier(rule, 7, 2, 4)
    assert finding.measured <= finding.bound


@of_the_prover
@pytest.mark.parametrize("widths", [(2,), (2, 1), (1, 2)])
@pytest.mark.parametrize("rule", list(TreeRule))
def test_joint_distribution_of_tree_rules_is_the_targets_exactly(rule, widths):
    assert proofs.prove_tree_reference(rule, widths, 28 if widths == (2,) else 14, 3).measured == 0.0


@of_the_prover
@pytest.mark.parametrize("widths", [(2, 2), (3,)])
@pytest.mark.parametrize("rule", list(TreeRule))
def test_joint_distribution_of_bushier_trees(rule, widths):
    assert proofs.prove_tree_reference(rule, widths, 7, 3).measured == 0.0


@pytest.mark.parametrize(("widths", "count", "length"), [((2,), 14, 3), ((2, 1), 7, 3), ((3,), 14, 2)])
@pytest.mark.parametrize("rule", list(TreeRule))
def test_forked_verifier_on_trees_has_the_targets_distribution(rule, widths, count, length):
    finding = proofs.prove_tree_verifier(rule, widths, count, length)
    assert finding.measured <= finding.bound


@of_the_prover
def test_traversal_of_a_chain_is_block_verification():
    for case in reference.cases(16, seed=6):
        block = reference.round_distribution(case, ReferenceRule.BLOCK, (), 2)
        assert (
            tree_reference.round_distribution(alone(case, TreeRule.TRAVERSAL), TreeRule.TRAVERSAL, (), ((1, 1),)) == block
        )


# -- negative controls: each planted pitfall must turn a proof red -----------------------------------------------------


def _red(rule: ReferenceRule) -> bool:
    finding = proofs.prove_verifier(rule, 24, 2, 3)
    return finding.measured > 1e-4 > finding.bound


@of_the_prover
def test_block_acceptance_with_the_token_rules_residual_shows(monkeypatch):
    monkeypatch.setattr(verifier, "residual", lambda p, q, weight: rules.residual(p, q, torch.ones_like(weight)))
    assert _red(ReferenceRule.BLOCK)


@of_the_prover
def test_a_residual_that_is_the_target_itself_shows(monkeypatch):
    monkeypatch.setattr(verifier, "residual", lambda p, q, weight: p)
    assert _red(ReferenceRule.TOKEN)


@of_the_prover
def test_stopping_at_the_first_block_coin_shows(monkeypatch):
    monkeypatch.setattr(
        proofs,
        "rule_for",
        lambda d, n, coupled: verifier.Rule.TOKEN if len(d) else verifier.Rule.WALK,
    )
    monkeypatch.setattr(verifier, "token_acceptance", lambda p, q, x: rules.block_acceptance(p, q, x)[0])
    assert _red(ReferenceRule.BLOCK)


@of_the_prover
def test_an_epsilon_in_the_drafts_probabilities_shows(monkeypatch):
    monkeypatch.setattr(verifier, "token_acceptance", lambda p, q, x: rules.token_acceptance(p, q + 0.01, x))
    assert _red(ReferenceRule.TOKEN)


@of_the_prover
def test_accepting_the_likeliest_token_shows(monkeypatch):
    def greedy(p, q, x):
        return (q.argmax(-1) == x).to(p)

    monkeypatch.setattr(verifier, "token_acceptance", greedy)
    assert _red(ReferenceRule.TOKEN)


@of_the_prover
def test_a_ratio_test_on_coupled_drafts_shows(monkeypatch):
    """Guesses share the noise of the target. Under u * q < p, a recovered token with the same noise is biased."""
    real = verifier.rule_for
    rule = verifier.Rule.TOKEN
    monkeypatch.setattr(proofs, "rule_for", lambda d, n, coupled: rule if len(d) else real(d, n, coupled=coupled))
    key = verifier.CandidateKeys.next
    monkeypatch.setattr(verifier.CandidateKeys, "next", lambda keys, depth, owed: key(keys, depth, owed=False))
    assert _red(ReferenceRule.COUPLED)


@of_the_prover
def test_dropping_unlikely_drawn_tokens_shows(monkeypatch):
    real = proofs.draw_tree

    def unlikely(draft):
        return len(draft) > 0 and float(draft.draft_probs[0, draft.token_ids[0]]) < 0.4

    def dropping(*args):
        draft = real(*args)
        return draft.first(0) if unlikely(draft) else draft

    monkeypatch.setattr(proofs, "draw_tree", dropping)
    assert _red(ReferenceRule.TOKEN)


@of_the_prover
def test_accepting_at_equality_shows(monkeypatch):
    class Lenient(proofs.GridNoise):
        def bernoulli(self, probability, keys):
            return torch.tensor(self.grid, dtype=probability.dtype) <= probability

    monkeypatch.setattr(proofs, "GridNoise", Lenient)
    assert proofs.prove_decisions(ReferenceRule.TOKEN, 8).measured > 0


@of_the_prover
def test_a_wrong_reference_is_no_reference(monkeypatch):
    monkeypatch.setattr(reference, "owed", lambda p, q, weight: p)
    assert proofs.prove_reference(ReferenceRule.TOKEN, 8, 2, 3).measured > 0

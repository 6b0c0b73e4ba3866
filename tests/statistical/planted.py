"""Bugs of drafts and their verification that tests plant, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.draft import Draft
from outrider.lab.prove.engine import BOUND, EngineProof
from outrider.lab.prove.settings import Setting
from outrider.verify.rules import Tree


def is_a_fault(proof: EngineProof, setting: Setting, length: int = 3) -> bool:
    """Whether a method with a planted bug has faults and the text is right all the same, since what was drawn is tested as
    it was drawn."""
    found = proof.prove(setting, length, faultless=True)
    return found.measured <= BOUND and not found.passed


def one_test_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that two members drew is tested once."""
    stock = Tree.of

    def once(draft: Draft) -> Tree:
        tree = stock(draft)
        drawn = {
            node: [draw for place, draw in enumerate(draws) if tree.token(draw) not in map(tree.token, draws[:place])]
            for node, draws in tree.drawn.items()
        }
        return replace(tree, drawn=drawn)

    monkeypatch.setattr(Tree, "of", once)


def opaque_on_collision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft in which two members drew the same token counts as drawn from unknown probabilities."""
    stock = Draft.joined

    def joined(self: Draft, tail: Draft, node: int) -> tuple[Draft, tuple[int, ...]]:
        whole, places = stock(self, tail, node)
        return (whole.opaque() if whole.num_draws > len(whole) else whole), places

    monkeypatch.setattr(Draft, "joined", joined)


def a_guess_for_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the target draws 0 and something else was guessed, the guess stands."""
    stock = Draft.child

    def child(self: Draft, node: int, token_id: int) -> int | None:
        found = stock(self, node, token_id)
        return next(iter(self.children(node)), None) if found is None and token_id == 0 else found

    monkeypatch.setattr(Draft, "child", child)

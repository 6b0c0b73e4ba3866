"""Acceptance rules on token trees, as generators that ask for coins and draws.

A rule is a generator. It yields `Coin`s and `Draw`s, is sent what fell, and returns the accepted path and the one more
token. So the rules stay free of keys and batches, and whoever drives them can toss the coins of many trees at once.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.draft import Draft, Law
from outrider.verify.rules import residual


@dataclass(frozen=True)
class Tree:
    """What the rules must know of a draft.

    Attributes:
        token_ids: Token of each node.
        parents: Node index of each node's parent; -1 is the root, the last committed token.
        nodes: The node that each draw proposed.
        members: The member that made each draw.
        drawn: By node, those draws of its children that were made from known probabilities, in the order of their tests.
        walked: By node, its children that were proposed by any other law, by token.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    nodes: tuple[int, ...]
    members: tuple[int, ...]
    drawn: dict[int, list[int]]
    walked: dict[int, dict[int, int]]

    @staticmethod
    def of(draft: Draft) -> Tree:
        """The tree of a draft."""
        drawn: dict[int, list[int]] = {}
        walked: dict[int, dict[int, int]] = {}
        for draw, (node, law) in enumerate(zip(draft.nodes, draft.laws, strict=True)):
            parent = draft.parents[node]
            if law is Law.SAMPLED:
                drawn.setdefault(parent, []).append(draw)
            else:
                walked.setdefault(parent, {})[draft.token_ids[node]] = node
        return Tree(draft.token_ids, draft.parents, draft.nodes, draft.members, drawn, walked)

    def token(self, draw: int) -> int:
        """The token that a draw proposed."""
        return self.token_ids[self.nodes[draw]]

    def path_to(self, node: int) -> tuple[int, ...]:
        """Nodes from below the root down to `node`."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))


@dataclass(frozen=True)
class Coin:
    """Does the node of `draw` stand? True with `probability` (a scalar tensor)."""

    probability: Tensor
    draw: int


@dataclass(frozen=True)
class Draw:
    """Which token comes after `node` (-1: the root)? Drawn from `probs` [vocab_size]; `owed` tells a residual from the
    target's own probabilities."""

    probs: Tensor
    node: int
    owed: bool


Conversation = Generator[Coin | Draw, int, tuple[tuple[int, ...], int]]


def recursive_rejection(tree: Tree, target_probs: Tensor, draft_probs: Tensor) -> Conversation:
    """Rule R4: draws are tested in turn, each against what the earlier ones left of the target's probabilities.

    Recursive rejection sampling (Yang et al. 2024; Jeon et al. 2024). The draws of one member were made without
    replacement; those of several members are independent of each other, so each member's begin with its own whole
    probabilities. A token that two members drew has two tests: the second one cannot succeed, and still changes what is
    left. Children of other laws are walked: the target draws from what the sampled ones left of its probabilities, and the
    draft is followed while it agrees.

    Args:
        tree: The draft.
        target_probs: [num_nodes + 1, vocab_size] the target's probabilities after the root, then after each node.
        draft_probs: [num_draws, vocab_size] what each sampled draw and its siblings of the same member were made from, none
            removed yet.
    """
    path: list[int] = []
    node = -1
    while True:
        wanted, owed = target_probs[node + 1], False
        accepted = None
        proposals: dict[int, Tensor] = {}
        for draw in tree.drawn.get(node, ()):
            proposal = proposals.setdefault(tree.members[draw], draft_probs[draw])
            token = tree.token(draw)
            if (yield Coin(_ratio(wanted, proposal, token).clamp(max=1.0), draw)):
                accepted = tree.nodes[draw]
                break
            wanted, owed = _residual(wanted, proposal, wanted.new_ones(())), True
            proposals[tree.members[draw]] = _without(proposal, token)
        if accepted is None:
            token = yield Draw(wanted, node, owed)
            # A sampled child was tested and refused; its token may still come from here, as the target's own.
            walked = tree.walked.get(node, {}).get(token)
            if walked is None:
                return tuple(path), token
            accepted = walked
        path.append(accepted)
        node = accepted


def traversal(tree: Tree, target_probs: Tensor, draft_probs: Tensor) -> Conversation:
    """Rule R5: leaf first; a refused leaf reduces its parent's probabilities, and a parent without children is a leaf.

    Traversal verification (Weng et al. 2025); on a chain it is block verification. Members and children of other laws are
    treated as by `recursive_rejection`; below a child that was walked the rule begins anew. So a draft is verified by one
    rule whether or not somebody guessed beside or behind the sampled tokens: which rule it is may not depend on what was
    drawn.

    Args:
        tree: The draft.
        target_probs: [num_nodes + 1, vocab_size] the target's probabilities after the root, then after each node.
        draft_probs: [num_draws, vocab_size] what each sampled draw and its siblings of the same member were made from,
            nothing removed yet.
    """
    root = -1
    while True:
        node, wanted, owed = yield from _leaf_first(tree, root, target_probs, draft_probs)
        token = yield Draw(wanted, node, owed)
        walked = tree.walked.get(node, {}).get(token)
        if walked is None:
            return tree.path_to(node), token
        root = walked


def _leaf_first(
    tree: Tree, root: int, target_probs: Tensor, draft_probs: Tensor
) -> Generator[Coin | Draw, int, tuple[int, Tensor, bool]]:
    """Rule R5 on the sampled nodes below `root`: the node that stands, what is left of the target's probabilities behind
    it, and whether something was refused there."""
    one = target_probs.new_ones(())
    left = {node: list(draws) for node, draws in tree.drawn.items()}
    weight, wanted = {root: one}, {root: target_probs[root + 1]}
    proposals: dict[int, dict[int, Tensor]] = {}
    refused: set[int] = set()
    node, spine = root, list[int]()  # draws from below the root to the node
    while True:
        while left.get(node):
            draw = left[node][0]
            child, own = tree.nodes[draw], proposals.setdefault(node, {})
            ratio = _ratio(wanted[node], own.setdefault(tree.members[draw], draft_probs[draw]), tree.token(draw))
            weight[child] = (weight[node] * ratio).clamp(max=1.0)
            if child in refused:  # by the test of another member's draw: nothing is left of its token
                weight[child] = torch.zeros_like(one)
            wanted.setdefault(child, target_probs[child + 1])
            spine.append(draw)
            node = child
        if node == root or (yield Coin(weight[node], spine[-1])):
            return node, wanted[node], node in proposals
        draw = spine.pop()
        refused.add(node)
        parent, member = tree.parents[node], tree.members[draw]
        proposal = proposals[parent][member]
        excess = (weight[parent] * wanted[parent] - proposal).clamp(min=0.0).sum()
        below = excess + (1.0 - weight[parent])
        wanted[parent] = _residual(wanted[parent], proposal, weight[parent])
        weight[parent] = excess / below if below > 0 else one
        proposals[parent][member] = _without(proposal, tree.token(draw))
        left[parent].pop(0)
        node = parent


def _ratio(wanted: Tensor, proposal: Tensor, token: int) -> Tensor:
    """p(x) / q(x); 0 for a token that the proposal cannot have drawn."""
    return wanted[token] / proposal[token] if proposal[token] > 0 else wanted.new_zeros(())


def _residual(wanted: Tensor, proposal: Tensor, weight: Tensor) -> Tensor:
    return residual(wanted[None], proposal[None], weight[None])[0]


def _without(proposal: Tensor, token: int) -> Tensor:
    """What the next sibling was drawn from, after `token` was drawn."""
    rest = proposal.clone()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else rest

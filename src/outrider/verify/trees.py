"""Acceptance rules on token trees, each written as the conversation it is: toss this coin, draw from these probabilities.

A rule is a generator. It yields `Coin`s and `Draw`s, is sent what fell, and returns the accepted path and the one more
token. So the rules stay free of keys and batches, and whoever drives them can toss the coins of many trees at once.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from outrider.verify.rules import residual


@dataclass(frozen=True)
class Tree:
    """What the rules must know of a draft.

    Attributes:
        token_ids: Token of each node.
        parents: Node index of each node's parent; -1 is the root, the last committed token.
        children: Candidates below each node, in draw order.
        sampled: Whether a node was drawn from known probabilities.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    children: dict[int, list[int]]
    sampled: tuple[bool, ...]

    def path_to(self, node: int) -> tuple[int, ...]:
        """Nodes from below the root down to `node`."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))


@dataclass(frozen=True)
class Coin:
    """Does `node` stand? True with `probability` (a scalar tensor)."""

    probability: Tensor
    node: int


@dataclass(frozen=True)
class Draw:
    """Which token comes after `node` (-1: the root)? Drawn from `probs` [vocab_size]; `owed` tells a residual from the
    target's own probabilities."""

    probs: Tensor
    node: int
    owed: bool


Conversation = Generator[Coin | Draw, int, tuple[tuple[int, ...], int]]


def recursive_rejection(tree: Tree, target_probs: Tensor, draft_probs: Tensor) -> Conversation:
    """Rule R4: children drawn without replacement are tested in draw order, each against what the earlier ones left.

    Recursive rejection sampling (Yang et al. 2024; Jeon et al. 2024). Children of other laws are walked: the target
    draws from what the sampled ones left of its probabilities, and the draft is followed while it agrees.

    Args:
        tree: The draft.
        target_probs: [num_nodes + 1, vocab_size] the target's probabilities after the root, then after each node.
        draft_probs: [num_nodes, vocab_size] what each sampled node and its siblings were drawn from, none removed yet.
    """
    path: list[int] = []
    node = -1
    while True:
        wanted, owed = target_probs[node + 1], False
        accepted = None
        proposal: Tensor | None = None
        for child in tree.children[node]:
            if not tree.sampled[child]:
                continue
            proposal = draft_probs[child] if proposal is None else proposal
            token = tree.token_ids[child]
            if (yield Coin(_ratio(wanted, proposal, token).clamp(max=1.0), child)):
                accepted = child
                break
            wanted, owed = _residual(wanted, proposal, wanted.new_ones(())), True
            proposal = _without(proposal, token)
        if accepted is None:
            token = yield Draw(wanted, node, owed)
            # A sampled child was tested and refused; its token may still come from here, as the target's own.
            walked = [c for c in tree.children[node] if tree.token_ids[c] == token and not tree.sampled[c]]
            if not walked:
                return tuple(path), token
            accepted = walked[0]
        path.append(accepted)
        node = accepted


def traversal(tree: Tree, target_probs: Tensor, draft_probs: Tensor) -> Conversation:
    """Rule R5: leaf first; a refused leaf reduces its parent's probabilities, and a parent without children is a leaf.

    Traversal verification (Weng et al. 2025); on a chain it is block verification. Every node must be sampled.

    Args:
        tree: The draft.
        target_probs: [num_nodes + 1, vocab_size] the target's probabilities after the root, then after each node.
        draft_probs: [num_nodes, vocab_size] what each node and its siblings were drawn from, nothing removed yet.
    """
    one = target_probs.new_ones(())
    left = {node: list(children) for node, children in tree.children.items()}
    weight, wanted, proposal = {-1: one}, {-1: target_probs[0]}, dict[int, Tensor]()
    node = -1
    while True:
        while left[node]:
            child = left[node][0]
            proposal.setdefault(node, draft_probs[child])
            ratio = _ratio(wanted[node], proposal[node], tree.token_ids[child])
            weight[child], wanted[child] = (weight[node] * ratio).clamp(max=1.0), target_probs[child + 1]
            node = child
        if node < 0 or (yield Coin(weight[node], node)):
            break
        parent = tree.parents[node]
        excess = (weight[parent] * wanted[parent] - proposal[parent]).clamp(min=0.0).sum()
        below = excess + (1.0 - weight[parent])
        wanted[parent] = _residual(wanted[parent], proposal[parent], weight[parent])
        weight[parent] = excess / below if below > 0 else one
        proposal[parent] = _without(proposal[parent], tree.token_ids[node])
        left[parent].pop(0)
        node = parent
    token = yield Draw(wanted[node], node, node in proposal)
    return tree.path_to(node), token


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

"""Acceptance rules on chains and trees, as functions of probabilities; no random numbers, no sequences."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.draft import Draft, Law
from outrider.kernels import sampling

# --- Acceptance rules on chains as pure functions of probabilities; no random numbers, no sequences.
#
# Shapes: b drafts of k tokens each over a vocabulary of v. target_probs [b, k + 1, v] holds the target's probabilities
# at every draft row and after the last; draft_probs [b, k, v] those that each draft token was really drawn from.


def token_acceptance(target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor) -> Tensor:
    """Rule R1 (Leviathan et al. 2023; Chen et al. 2023): the chance [b, k] that each draft token stands.

    The accepted length is the number of leading coins that fall True.

    Args:
        target_probs: [b, k + 1, v]
        draft_probs: [b, k, v]
        draft_token_ids: [b, k]
    """
    return _ratios(target_probs, draft_probs, draft_token_ids).clamp(max=1.0)


def block_acceptance(target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rule R3, block verification (Sun et al. 2024).

    The accepted length is the *largest* i whose coin falls True, 0 if none does.

    Args:
        target_probs: [b, k + 1, v]
        draft_probs: [b, k, v]
        draft_token_ids: [b, k]

    Returns:
        The chance of each coin [b, k], and the weights [b, k + 1] by which `residual` scales the target's
        probabilities when the accepted length is i.
    """
    ratios = _ratios(target_probs, draft_probs, draft_token_ids)
    weights = [torch.ones_like(ratios[:, 0])]
    for i in range(ratios.shape[1]):
        weights.append((weights[-1] * ratios[:, i]).clamp(max=1.0))
    weight = torch.stack(weights, 1)  # [b, k + 1]
    # Mass that the target still has to place after stopping at i; only rows 1 to k - 1 have a draft token behind them.
    inner = weight[:, 1:-1]
    excess = owed_mass(target_probs[:, 1:-1], draft_probs[:, 1:], inner)
    denominator = excess + (1.0 - inner)  # in this order: a coin is exactly 1 where the weight is, and never above
    coins = torch.where(denominator > 0, excess / denominator.clamp(min=torch.finfo(ratios.dtype).tiny), 1.0)
    return torch.cat([coins, weight[:, -1:]], 1), weight


def residual(target_row: Tensor, draft_row: Tensor, weight: Tensor) -> Tensor:
    """Returns what the target still owes after a rejection: (weight * p - q)+ normalised, [b, v]; p itself where that is
    empty.

    Args:
        target_row: [b, v] at the row after the last accepted token.
        draft_row: [b, v] there.
        weight: [b] 1 under R1, the prefix weight of the accepted length under R3.
    """
    if sampling.usable(target_row, draft_row):
        return sampling.owed_probs(target_row[:, None], draft_row[:, None], weight[:, None]).squeeze(1)
    owed = (weight[:, None] * target_row - draft_row).clamp(min=0.0)
    total = owed.sum(-1, keepdim=True)
    return torch.where(total > 0, owed / total.clamp(min=torch.finfo(owed.dtype).tiny), target_row)


def owed_mass(target_row: Tensor, draft_row: Tensor, weight: Tensor) -> Tensor:
    """Sums [b, n] of (weight * p - q)+ over rows of probabilities [b, n, v], weights [b, n]."""
    if sampling.usable(target_row, draft_row):
        return sampling.owed_mass(target_row, draft_row, weight)
    return (weight[..., None] * target_row - draft_row).clamp(min=0.0).sum(-1)


def _ratios(target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor) -> Tensor:
    """p(x) / q(x) of each draft token [b, k]. A token of q = 0 cannot have been drawn from q and gets 0."""
    index = draft_token_ids[..., None]
    p = target_probs[:, :-1].gather(-1, index).squeeze(-1)
    q = draft_probs.gather(-1, index).squeeze(-1)
    largest = torch.finfo(q.dtype).max  # instead of infinity, which times a weight of 0 would not be 0
    return torch.where(q > 0, (p / q).clamp(max=largest), 0.0)


# --- Acceptance rules on token trees, as generators that ask for coins and draws.
#
# A rule is a generator. It yields `Coin`s and `Draw`s, is sent what fell, and returns the accepted path and the one
# more token. So the rules stay free of keys and batches, and whoever drives them can toss the coins of many trees at
# once.


@dataclass(frozen=True)
class Tree:
    """Holds what the rules must know of a draft."""

    token_ids: tuple[int, ...]  # token of each node
    parents: tuple[int, ...]  # node index of each node's parent; -1 is the root, the last committed token
    nodes: tuple[int, ...]  # the node that each draw proposed
    members: tuple[int, ...]  # the member that made each draw
    # By node, those draws of its children that were made from known probabilities, in the order of their tests.
    drawn: dict[int, list[int]]
    walked: dict[int, dict[int, int]]  # by node, its children that were proposed by any other law, by token

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
    """Returns what the next sibling was drawn from, after `token` was drawn."""
    rest = proposal.clone()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else rest

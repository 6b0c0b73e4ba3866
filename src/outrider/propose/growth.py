"""Growing drafts level by level from probabilities: chains, and trees of a fixed shape.

Whatever computes the next row's logits, a draft model or a head, grows its drafts here: drawn, drawn without replacement
among siblings (Jeon et al. 2024), most likely first, or guessed with the target's noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.draft import EMPTY, Draft, Law
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.verify.logits import argmax, target_probs


@dataclass
class Node:
    """A node of a growing draft.

    Attributes:
        token_id: Its token.
        parent: Index of its parent, -1 for the root.
        place: Where it stands in its level of the full shape, whether or not all its neighbours exist.
        probs: [vocab_size] that it and its siblings were drawn from; None where the draft is not drawn.
    """

    token_id: int
    parent: int
    place: int
    probs: Tensor | None


_ROOT = Node(-1, -1, 0, None)


@dataclass
class Growth:
    """A draft in the making.

    Attributes:
        request: What was asked for.
        widths: Children of each node, by depth.
        budget: Most nodes of the shape, counted level by level.
        nodes: So far.
        level: Indices of the deepest nodes; -1 is the root.
        depth: Levels so far.
        begun: Places of the shape in the levels so far.
    """

    request: ProposeRequest
    widths: tuple[int, ...]
    budget: int
    nodes: list[Node] = field(default_factory=list)
    level: list[int] = field(default_factory=lambda: [-1])
    depth: int = 0
    begun: int = 0

    @staticmethod
    def of(request: ProposeRequest, budget: int, max_depth: int) -> Growth:
        """A draft of the shape that was asked for, within a budget of nodes and a depth."""
        widths = request.tree or (1,) * max(budget, 0)
        return Growth(request, widths[: max(max_depth, 0)], max(budget, 0) if max_depth > 0 else 0)

    @property
    def draws(self) -> bool:
        """Whether its tokens are drawn."""
        return not (self.request.sequence.sampling.greedy or self.request.greedy)

    @property
    def branches(self) -> bool:
        """Whether its shape is a tree."""
        return any(width > 1 for width in self.widths)

    @property
    def growing(self) -> bool:
        """Whether another level has room."""
        return self.depth < len(self.widths) and self.begun < self.budget and bool(self.level)

    def node(self, index: int) -> Node:
        """A node, or the root for -1."""
        return _ROOT if index < 0 else self.nodes[index]

    def path(self, index: int) -> tuple[int, ...]:
        """Tokens from below the root to a node."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.nodes[index].token_id)
            index = self.nodes[index].parent
        return tuple(reversed(tokens))

    def width(self, index: int) -> int:
        """How many children of a node of the deepest level the budget has room for; decided by the shape alone."""
        width = self.widths[self.depth]
        return max(0, min(width, self.budget - self.begun - self.node(index).place * width))

    def draft(self) -> Draft:
        """What has grown."""
        if not self.nodes:
            return EMPTY
        tokens, parents = tuple(n.token_id for n in self.nodes), tuple(n.parent for n in self.nodes)
        if not self.draws:
            return Draft(tokens, parents, (Law.DETERMINISTIC,) * len(tokens))
        law = Law.COUPLED if self.request.coupled else Law.SAMPLED
        probs = [n.probs for n in self.nodes if n.probs is not None]
        return Draft(tokens, parents, (law,) * len(tokens), torch.stack(probs))

    def _close_level(self, first: int) -> None:
        """The nodes from `first` on are the deepest level now."""
        last_level = 1
        for width in self.widths[: self.depth + 1]:
            last_level *= width
        self.begun = min(self.budget, self.begun + last_level)
        self.depth += 1
        self.level = list(range(first, len(self.nodes)))


def add_level(growths: Sequence[Growth], logits: Tensor, noise: DraftNoise) -> None:
    """Choose the children of every node of the deepest levels.

    Args:
        growths: Drafts that grow.
        logits: [num_nodes, vocab_size] of their deepest nodes, one draft after another, before any parameter.
        noise: For drawn children.
    """
    parents = [(growth, index) for growth in growths for index in growth.level]
    rows = _processed(growths, logits)
    first = {id(growth): len(growth.nodes) for growth in growths}
    drawing = [i for i, (growth, _) in enumerate(parents) if growth.draws]
    best = [i for i, (growth, _) in enumerate(parents) if not growth.draws]
    children: dict[int, list[int]] = _most_likely([parents[i] for i in best], rows[best], best)
    drawn_from: dict[int, Tensor] = {}
    if drawing:
        probs = target_probs(rows[drawing], [parents[i][0].request.sequence.sampling for i in drawing])
        drawn_from = dict(zip(drawing, probs, strict=True))
        drawn = _draw_children([parents[i] for i in drawing], probs, noise)
        children.update(zip(drawing, drawn, strict=True))
    for i, (growth, index) in enumerate(parents):
        for rank, token in enumerate(children[i]):
            place = growth.node(index).place * growth.widths[growth.depth] + rank
            growth.nodes.append(Node(token, index, place, drawn_from.get(i)))
    for growth in growths:
        growth._close_level(first[id(growth)])


def _processed(growths: Sequence[Growth], logits: Tensor) -> Tensor:
    """Logits [num_nodes, vocab_size] as the requests' parameters leave them, each along its own path."""
    done, end = [], 0
    for growth in growths:
        start, end = end, end + len(growth.level)
        done.append(_along_paths(growth, logits[start:end]))
    return torch.cat(done)


def _along_paths(growth: Growth, rows: Tensor) -> Tensor:
    processing, before = growth.request.sequence.processing, growth.request.path
    if not processing.active:
        return rows
    try:
        return processing.apply(rows, [before + growth.path(i) for i in growth.level])[0]
    except Exception:  # a caller's processor that fails here will fail on the target's rows, and end its own request there
        return rows


def _most_likely(parents: list[tuple[Growth, int]], logits: Tensor, places: list[int]) -> dict[int, list[int]]:
    """The likeliest children of each node, best first, the lowest id among equals."""
    if not parents:
        return {}
    widths = [growth.width(index) for growth, index in parents]
    if max(widths) <= 1:
        tokens = argmax(logits)[:, None]
    else:
        tokens = logits.sort(stable=True, dim=-1, descending=True).indices[:, : max(widths)]
    possible = logits.gather(-1, tokens) > float("-inf")
    rows = zip(places, tokens.tolist(), possible.tolist(), widths, strict=True)
    return {i: [t for t, may in zip(row[:width], ok, strict=False) if may] for i, row, ok, width in rows}


def _draw_children(parents: list[tuple[Growth, int]], probs: Tensor, noise: DraftNoise) -> list[list[int]]:
    """Children of each node drawn from its probabilities [n, vocab_size] without replacement, in draw order.

    A node has fewer where no more tokens are possible; which ones were drawn has no part in that.
    """
    widths = [growth.width(index) for growth, index in parents]
    children: list[list[int]] = [[] for _ in parents]
    if set(widths) == {1}:
        places = [growth.node(index).place * growth.widths[growth.depth] for growth, index in parents]
        requests = [growth.request for growth, _ in parents]
        drawn = noise.categorical(probs, requests, [growth.depth for growth, _ in parents], places)
        return [[token] for token in drawn.tolist()]
    left = probs.clone()
    for rank in range(max(widths)):
        wide = [i for i, width in enumerate(widths) if rank < width]
        mass = left[wide].sum(-1).tolist()
        members = [i for i, m in zip(wide, mass, strict=True) if m > 0.0]
        if not members:
            break
        growths = [parents[i][0] for i in members]
        branches = [g.node(parents[i][1]).place * g.widths[g.depth] + rank for i, g in zip(members, growths, strict=True)]
        tokens = noise.categorical(left[members], [g.request for g in growths], [g.depth for g in growths], branches)
        left[members, tokens] = 0.0
        for i, token in zip(members, tokens.tolist(), strict=True):
            children[i].append(token)
    return children

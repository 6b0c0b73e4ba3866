"""Grows drafts from probabilities, a few rows at a time: chains, trees of a fixed shape, and trees that adapt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.draft import EMPTY, Draft, Law
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.propose.tree import GrowingTree, Node, NodeLaw
from outrider.verify.logits import argmax, target_probs

# --- Growing drafts from probabilities, a few rows at a time: chains, trees of a fixed shape, and trees that adapt.
#
# Whatever computes the next row's logits, a draft model or a head, grows its drafts here: drawn, drawn without
# replacement among siblings (Jeon et al. 2024), most likely first, or guessed with the target's noise. A `TreeBuilder`
# says which rows.


@dataclass
class Growth(GrowingTree):
    """A draft in the making."""

    request: ProposeRequest = field(kw_only=True)  # what was asked for

    @staticmethod
    def of(request: ProposeRequest, budget: int, max_depth: int, min_confidence: float = 0.0) -> Growth:
        """A draft as the request's tree builder shapes it, within a budget of nodes and a depth."""
        greedy = request.sequence.sampling.greedy
        drawn = Law.COUPLED if request.coupled else Law.SAMPLED
        mode = (Law.DETERMINISTIC if greedy or request.greedy else drawn, greedy)
        growth = Growth(max(budget, 0), max(max_depth, 0), mode, min_confidence, request=request)
        request.builder.begin(growth)
        growth.level = [-1] if growth.budget and growth.max_depth else []
        return growth

    @property
    def law(self) -> Law:
        """The law of its tokens."""
        return self.mode[0]

    @property
    def draws(self) -> bool:
        """Tells whether its tokens are drawn."""
        return self.law is not Law.DETERMINISTIC

    @property
    def branches(self) -> bool:
        """Tells whether it may become a tree."""
        return self.request.builder.branches(self)

    def draft(self) -> Draft:
        """Returns what has grown."""
        if not self.nodes:
            return EMPTY
        tokens, parents = tuple(n.token_id for n in self.nodes), tuple(n.parent for n in self.nodes)
        laws = (self.law,) * len(tokens)
        told = self.request.builder.sureness
        confidences = tuple(told(self, i) for i in range(len(tokens))) if self.request.builder.learns else ()
        if not self.draws:
            return Draft(tokens, parents, laws, confidences=confidences)
        probs = torch.stack([self.laws[n.parent].row for n in self.nodes])
        return Draft(tokens, parents, laws, probs, confidences=confidences)

    def follow(self, token_ids: Sequence[int], rows: Tensor | Sequence[Tensor]) -> None:
        """Go on as a chain with tokens that were chosen elsewhere, so that they are distributed as if they were drawn from
        the rows, up to the first of low confidence.

        Args:
            rows: [num_tokens, vocab_size] what each of them was chosen from, as in `NodeLaw`.
        """
        self.level = []
        for token, row in zip(token_ids, rows, strict=True):
            last = len(self.nodes) - 1
            self.laws[last] = NodeLaw(row, self.draws)
            if self.draws:
                self.request.drawn.note((*self.request.path, *self.path(last)), row, token)
            self.nodes.append(Node(token, last, last + 2, 0, last + 1))
            if not self.may_go_on(last + 1):
                return
        self.level = [len(self.nodes) - 1] if len(self.nodes) < self.budget else []


def add_level(growths: Sequence[Growth], logits: Tensor, noise: DraftNoise) -> None:
    """Choose further tokens, now that the laws behind the nodes of each `Growth.level` are known.

    Args:
        logits: [num_nodes, vocab_size] of the nodes of their levels, one draft after another, before any parameter.
        noise: For drawn tokens.
    """
    company = len(growths)
    _keep_laws(growths, logits)
    for growth in growths:
        growth.open = []
    _add_children([(growth, growth.request.builder.children(growth, company)) for growth in growths], noise)
    for growth in growths:
        growth.open = [node for node in growth.open if growth.may_go_on(node)]
        room = len(growth.nodes) < growth.budget
        growth.level = growth.request.builder.expanded(growth, company) if growth.open and room else []
    ended = [growth for growth in growths if not growth.level]
    _add_children([(growth, growth.request.builder.last_children(growth, company)) for growth in ended], noise)


def next_of_chains(
    growths: Sequence[Growth], logits: Tensor, depth: int, noise: DraftNoise
) -> tuple[Sequence[Tensor], Tensor]:
    """Choose the next token of chains without waiting for it; `Growth.follow` takes all tokens when they are known.

    Args:
        logits: [n, vocab_size] behind their last tokens.
        depth: Tokens that each of them has.
        noise: For drawn tokens.

    Returns:
        What each token was chosen from, as in `NodeLaw`, and the tokens [n] on the device; -1 where none is possible.
    """
    drawing = [i for i, growth in enumerate(growths) if growth.draws]
    index = torch.tensor(drawing).to(logits.device, non_blocking=True) if 0 < len(drawing) < len(growths) else None
    rows = list(logits)
    if len(drawing) < len(growths):
        tokens = argmax(logits)
        tokens = tokens.where(logits.gather(-1, tokens[:, None])[:, 0] > float("-inf"), -1)
    if drawing:
        requests = [growths[i].request for i in drawing]
        probs = target_probs(logits if index is None else logits[index], [r.sequence.sampling for r in requests])
        drawn = noise.ahead(probs, requests, depth)
        tokens = drawn if index is None else tokens.index_copy(0, index, drawn)
        for i, row in zip(drawing, probs, strict=True):
            rows[i] = row
    return rows, tokens


def level_logits(growths: Sequence[Growth], logits: Tensor) -> Tensor:
    """The logits of the nodes of each `Growth.level`.

    Args:
        logits: [num_nodes, vocab_size] of each draft's nodes from the first of its level to its last one.
    """
    rows, start = list[int](), 0
    for growth in growths:
        first = growth.level[0]
        rows += [start + node - first for node in growth.level]
        start += len(growth.nodes) - first
    return logits if len(rows) == len(logits) else logits[rows]


def _keep_laws(growths: Sequence[Growth], logits: Tensor) -> None:
    """Remember what the children of the levels' nodes are chosen from."""
    places = [(growth, node) for growth in growths for node in growth.level]
    rows = _processed(growths, logits)
    drawing = [i for i, (growth, _) in enumerate(places) if growth.draws]
    laws = {i: NodeLaw(row, False) for i, row in enumerate(rows)}
    if drawing:
        chosen = rows if len(drawing) == len(places) else rows[drawing]
        probs = target_probs(chosen, [places[i][0].request.sequence.sampling for i in drawing])
        laws |= {i: NodeLaw(row, True) for i, row in zip(drawing, probs, strict=True)}
    for i, (growth, node) in enumerate(places):
        growth.laws[node] = laws[i]


def _processed(growths: Sequence[Growth], logits: Tensor) -> Tensor:
    """Logits [num_nodes, vocab_size] as the requests' parameters leave them, each along its own path."""
    done, end = [], 0
    for growth in growths:
        start, end = end, end + len(growth.level)
        done.append(_along_paths(growth, logits[start:end]))
    return done[0] if len(done) == 1 else torch.cat(done)


def _along_paths(growth: Growth, rows: Tensor) -> Tensor:
    processing, before = growth.request.sequence.processing, growth.request.path
    if not processing.active:
        return rows
    return processing.apply(rows, [before + growth.path(i) for i in growth.level]).logits


@dataclass
class _Family:
    """A node that gets children: `first` is the rank of the first new one."""

    growth: Growth
    parent: int
    first: int
    count: int
    tokens: list[int] = field(default_factory=list)


def _add_children(wanted: Sequence[tuple[Growth, Mapping[int, int]]], noise: DraftNoise) -> None:
    """Give nodes as many children as their builders want, within the budgets, and note them as open."""
    families = [family for growth, counts in wanted for family in _families(growth, counts)]
    _choose_likeliest([family for family in families if not family.growth.draws])
    _draw([family for family in families if family.growth.draws], noise)
    for family in families:
        growth = family.growth
        for rank, token in enumerate(family.tokens, family.first):
            _add(growth, family.parent, rank, token)


def _families(growth: Growth, counts: Mapping[int, int]) -> list[_Family]:
    """Returns what has room in the budget; decided before anything is drawn."""
    room, found = growth.budget - len(growth.nodes), []
    for parent, total in counts.items():
        first = len(growth.children(parent))
        count = min(total - first, room)
        if count > 0:
            found.append(_Family(growth, parent, first, count))
            room -= count
    return found


def _add(growth: Growth, parent: int, rank: int, token: int) -> None:
    template = growth.template
    place = template[growth.place(parent) + 1][rank] if template else -1
    growth.open.append(len(growth.nodes))
    growth.nodes.append(Node(token, parent, growth.node(parent).depth + 1, rank, place))
    growth.request.builder.appraise(growth, len(growth.nodes) - 1)


def _choose_likeliest(families: list[_Family]) -> None:
    """The likeliest tokens that a node has no child of, best first, the lowest id among equals."""
    if not families:
        return
    rows = [family.growth.laws[family.parent].row for family in families]
    logits = _stacked(rows)
    ends = [family.first + family.count for family in families]
    if max(ends) <= 1:
        tokens = argmax(logits)[:, None]
    else:
        tokens = logits.sort(stable=True, dim=-1, descending=True).indices[:, : max(ends)]
    possible = tokens.where(logits.gather(-1, tokens) > float("-inf"), -1)
    for family, row, end in zip(families, possible.tolist(), ends, strict=True):
        family.tokens = [token for token in row[:end] if token >= 0][family.first :]


def _stacked(rows: list[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _draw(families: list[_Family], noise: DraftNoise) -> None:
    """Draw children without replacement, in order. A node has fewer where no more tokens are possible; which ones were
    drawn has no part in that."""
    for turn in range(max((family.count for family in families), default=0)):
        wide = [family for family in families if turn < family.count]
        rows = _stacked([family.growth.laws[family.parent].row for family in wide])
        requests = [family.growth.request for family in wide]
        drawn = noise.categorical(rows, requests, [family.growth.path(family.parent) for family in wide])
        for family, token in zip(wide, drawn, strict=True):
            family.tokens += [token] if token >= 0 else []


# --- Growing drafts from heads that guess each place by itself: all tokens at one depth are chosen from one law.


def wanted_places(growth: Growth, first: int) -> range:
    """The places whose logits a draft may need, given the place of its own first token."""
    return range(first, first + min(growth.max_depth, growth.budget))


def grow_by_depth(growths: Sequence[Growth], logits: Sequence[Tensor], noise: DraftNoise) -> None:
    """Grow drafts to their end.

    Args:
        logits: By draft: [num_places, vocab_size] of its `wanted_places`, before any parameter.
        noise: For drawn tokens.
    """
    rows_of = {id(growth): rows for growth, rows in zip(growths, logits, strict=True)}
    while alive := [growth for growth in growths if growth.growing]:
        rows = [rows_of[id(growth)][growth.node(node).depth] for growth in alive for node in growth.level]
        add_level(alive, torch.stack(rows), noise)

"""Best-first trees: rows are added in the order of their chance of acceptance while they pay.

The value of a row is the chance that the target's text comes to it. Rows are added in the order of their values, as DDTree
does for a fixed number of rows (arXiv 2604.12989), until a row brings fewer tokens than the engine writes in the time that
the row costs. Where the draft is in doubt, a place gets siblings; where it is sure, the draft goes deep. The draft's
probabilities become known level by level. So each level plans the whole rest of the tree, with usual chances where nothing
is known yet, and draws only rows of this plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import ClassVar

from outrider.draft import Draft
from outrider.propose.trees.acceptance import AcceptanceRates
from outrider.propose.trees.pace import Pace
from outrider.propose.trees.tree import RANKS, GrowingTree, Mode, NodeLaw, TreeBuilder

#: Where no row has seemed to pay for so many drafts, one is tried nonetheless: text changes, and only rows show it.
_TRIES_AGAIN = 16
#: No node of the draft.
_PLANNED = -2


@dataclass(frozen=True)
class _Place:
    """A place for one more row.

    Attributes:
        top: The node of the draft under which it stands, -1 for the root, `_PLANNED` under a row that is planned now.
        law: What its token is chosen from, where that is known: then it stands directly under `top`.
        chance_of_parent: That the target's text comes to its parent.
        depth: Of the row.
        rank: Number of its elder siblings.
        refused: The chance that all of them are refused.
        chance: That the row stands once they are.
    """

    top: int
    law: NodeLaw | None
    chance_of_parent: float
    depth: int
    rank: int
    refused: float
    chance: float

    @property
    def value(self) -> float:
        return self.chance_of_parent * self.refused * self.chance


@dataclass
class _Plan:
    """Rows in the order of their values.

    Attributes:
        value: Tokens that they are expected to bring.
        known: How many go to each node whose law is known.
        unknown: The nodes without a law that get some.
    """

    value: float = 0.0
    known: Counter[int] = field(default_factory=Counter)
    unknown: set[int] = field(default_factory=set)


class BestFirstTree(TreeBuilder):
    """Grows trees by value, with chances that it learns.

    Args:
        pace: What rows and levels cost.
    """

    learns: ClassVar[bool] = True

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.rates = AcceptanceRates()
        self._num_empty = 0

    def begin(self, growth: GrowingTree) -> None:
        return

    def branches(self, growth: GrowingTree) -> bool:
        return True

    def children(self, growth: GrowingTree, company: int) -> dict[int, int]:
        plan = self._plan(growth, company, deeper=True)
        if not plan.known and not growth.nodes and self._is_time_to_try():
            return {-1: 1}
        return self._totals(growth, plan)

    def expanded(self, growth: GrowingTree, company: int) -> list[int]:
        plan = self._plan(growth, company, deeper=True)
        if not plan.unknown:
            return []
        without = self._plan(growth, company, deeper=False)
        if plan.value - without.value < self.pace.level_price() / company:
            return []
        return sorted(plan.unknown)

    def last_children(self, growth: GrowingTree, company: int) -> dict[int, int]:
        return self._totals(growth, self._plan(growth, company, deeper=False))

    def appraise(self, growth: GrowingTree, node: int) -> None:
        made = growth.nodes[node]
        law = growth.laws[made.parent]
        refused = self._refused(growth, made.parent, made.rank)
        confidence = float(law.probs[made.token_id]) if law.drawn else _feature(law, made.rank)
        chance = self.rates.behind(growth.mode, made.rank, made.depth, confidence)
        made.chance = growth.node(made.parent).chance * refused * chance

    def learn(self, draft: Draft, accepted: Collection[int], mode: Mode) -> None:
        self.rates.learn(draft, accepted, mode)

    def _is_time_to_try(self) -> bool:
        """Whether so many drafts were left empty that old experience may have become wrong."""
        self._num_empty += 1
        if self._num_empty < _TRIES_AGAIN:
            return False
        self._num_empty = 0
        self.rates.fade()
        return True

    def _totals(self, growth: GrowingTree, plan: _Plan) -> dict[int, int]:
        return {node: len(growth.children(node)) + more for node, more in plan.known.items()}

    def _plan(self, growth: GrowingTree, company: int, *, deeper: bool) -> _Plan:
        """Fill what is left of the budget; with `deeper` below nodes too whose laws are not known yet."""
        plan, order = _Plan(), count()
        heap: list[tuple[float, int, _Place]] = []

        def offer(place: _Place | None) -> None:
            if place is not None and place.depth <= growth.max_depth:
                heappush(heap, (-place.value, next(order), place))

        for place in self._known_places(growth):
            offer(place)
        for node in growth.open if deeper else ():
            offer(self._place(growth, node, None, growth.nodes[node].chance, growth.nodes[node].depth + 1, 0, 1.0))
        num_rows = len(growth.nodes)
        while heap and num_rows < growth.budget:
            place = heappop(heap)[2]
            if place.value <= self.pace.row_price((num_rows + 1) * company):
                break
            num_rows += 1
            plan.value += place.value
            if place.law is not None:
                plan.known[place.top] += 1
            elif place.top != _PLANNED:
                plan.unknown.add(place.top)
            offer(self._sibling(growth, place))
            if deeper:
                below = _PLANNED if place.law is not None else place.top
                offer(self._place(growth, below, None, place.value, place.depth + 1, 0, 1.0))
        return plan

    def _known_places(self, growth: GrowingTree) -> Iterator[_Place | None]:
        for node, law in growth.laws.items():
            made, rank = growth.node(node), len(growth.children(node))
            refused = self._refused(growth, node, rank)
            yield self._place(growth, node, law, made.chance, made.depth + 1, rank, refused)

    def _sibling(self, growth: GrowingTree, place: _Place) -> _Place | None:
        refused = place.refused * (1.0 - place.chance)
        return self._place(growth, place.top, place.law, place.chance_of_parent, place.depth, place.rank + 1, refused)

    def _place(
        self,
        growth: GrowingTree,
        top: int,
        law: NodeLaw | None,
        chance_of_parent: float,
        depth: int,
        rank: int,
        refused: float,
    ) -> _Place | None:
        if law is not None and rank >= len(law.likeliest) and rank < RANKS:
            return None  # there are no more tokens
        chance = self._chance(growth.mode, law, rank, depth)
        return _Place(top, law, chance_of_parent, depth, rank, refused, chance)

    def _chance(self, mode: Mode, law: NodeLaw | None, rank: int, depth: int) -> float:
        if law is None:
            return self.rates.usual(mode, rank, depth)
        return self.rates.before(mode, rank, depth, _feature(law, rank))

    def _refused(self, growth: GrowingTree, parent: int, rank: int) -> float:
        """The chance that the first `rank` children of a node are refused."""
        chance = 1.0
        for elder in range(rank):
            chance *= 1.0 - self._chance(growth.mode, growth.laws[parent], elder, growth.node(parent).depth + 1)
        return chance


def _feature(law: NodeLaw, rank: int) -> float:
    """What is known of a row's chance before it has a token.

    Where tokens are drawn, that is the largest probability. Where the likeliest are taken, it is the probability of the one
    whose turn it is, among those that are left.
    """
    top = law.likeliest
    if law.drawn:
        return top[0]
    place = min(rank, len(top) - 1)
    return top[place] / max(1.0 - sum(top[:place]), top[place], 1e-9)

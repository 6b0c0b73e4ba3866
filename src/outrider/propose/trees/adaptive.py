"""Drafts that adapt: best-first trees, chains that end in time, and the best fixed shape for what is accepted (Sequoia)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import ClassVar

from outrider.draft import Confidence, Draft, depths_of
from outrider.propose.tree import RANKS, AcceptanceRates, GrowingTree, JudgedRates, Mode, NodeLaw, TemplateTree, TreeBuilder

# --- Best-first trees: rows are added in the order of their chance of acceptance while they pay.
#
# The value of a row is the chance that the target's text comes to it. Rows are added in the order of their values, as
# DDTree does for a fixed number of rows (arXiv 2604.12989), until a row brings fewer tokens than the engine writes in
# the time that the row costs. Where the draft is in doubt, a place gets siblings; where it is sure, the draft goes
# deep. The draft's probabilities become known level by level. So each level plans the whole rest of the tree, with
# usual chances where nothing is known yet, and draws only rows of this plan.


#: Where no row has seemed to pay for so many drafts, one is tried nonetheless: text changes, and only rows show it.
_TRIES_AGAIN = 16
#: No node of the draft.
_PLANNED = -2


@dataclass(frozen=True)
class _Place:
    """A place for one more row."""

    top: int  # the node of the draft under which it stands, -1 for the root, `_PLANNED` under a row that is planned now
    law: NodeLaw | None  # what its token is chosen from, where that is known: then it stands directly under `top`
    chance_of_parent: float  # that the target's text comes to its parent
    depth: int  # of the row
    rank: int  # number of its elder siblings
    refused: float  # the chance that all of them are refused
    chance: float  # that the row stands once they are

    @property
    def value(self) -> float:
        return self.chance_of_parent * self.refused * self.chance


@dataclass
class _RowPlan:
    """Rows in the order of their values."""

    value: float = 0.0  # tokens that they are expected to bring
    known: Counter[int] = field(default_factory=Counter)  # how many go to each node whose law is known
    unknown: set[int] = field(default_factory=set)  # the nodes without a law that get some


class PricedRows(TreeBuilder):
    """A builder that weighs what rows are expected to bring, by chances that it learns, against what they cost."""

    learns: ClassVar[bool] = True

    def __init__(self, pace: Pace, rates: AcceptanceRates) -> None:
        self.pace, self.rates = pace, rates
        self._num_empty = 0

    def begin(self, growth: GrowingTree) -> None:
        return

    def learn(self, draft: Draft, accepted: Collection[int], mode: Mode) -> None:
        self.rates.learn(draft, accepted, mode)

    def _is_time_to_try(self) -> bool:
        """Tells whether so many drafts were left empty that old experience may have become wrong."""
        self._num_empty += 1
        if self._num_empty < _TRIES_AGAIN:
            return False
        self._num_empty = 0
        self.rates.fade()
        return True


class BestFirstTree(PricedRows):
    """Grows trees by value.

    Args:
        pace: What rows and levels cost.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace, AcceptanceRates())

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

    def _totals(self, growth: GrowingTree, plan: _RowPlan) -> dict[int, int]:
        return {node: len(growth.children(node)) + more for node, more in plan.known.items()}

    def _plan(self, growth: GrowingTree, company: int, *, deeper: bool) -> _RowPlan:
        """Fill what is left of the budget; with `deeper` below nodes too whose laws are not known yet."""
        plan, order = _RowPlan(), count()
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
    """Returns what is known of a row's chance before it has a token.

    Where tokens are drawn, that is the largest probability. Where the likeliest are taken, it is the probability of the one
    whose turn it is, among those that are left.
    """
    top = law.likeliest
    if law.drawn:
        return top[0]
    place = min(rank, len(top) - 1)
    return top[place] / max(1.0 - sum(top[:place]), top[place], 1e-9)


# --- Chains from heads that guess, before a token is chosen, how likely it stands (DSpark, arXiv 2607.05147).


class JudgedChain(PricedRows):
    """Grows each chain up to the first place whose row is not worth its time. How often a place stands that the head is so
    sure of is learnt, since heads may be too sure of themselves."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace, JudgedRates())

    def branches(self, growth: GrowingTree) -> bool:
        return False

    def children(self, growth: GrowingTree, company: int) -> dict[int, int]:
        (last,) = growth.level
        pays = self._reach(growth, last) > self.pace.row_price((len(growth.nodes) + 1) * company)
        return {last: 1} if pays or (last < 0 and self._is_time_to_try()) else {}

    def expanded(self, growth: GrowingTree, company: int) -> list[int]:
        return growth.open

    def appraise(self, growth: GrowingTree, node: int) -> None:
        growth.nodes[node].chance = self._reach(growth, growth.nodes[node].parent)

    def sureness(self, growth: GrowingTree, node: int) -> Confidence:
        chance = growth.chances[growth.nodes[node].parent]
        return Confidence(chance, chance)

    def _reach(self, growth: GrowingTree, node: int) -> float:
        """The chance that the text comes through the place behind a node, by what the head says of it."""
        above = growth.node(node)
        return above.chance * self.rates.before(growth.mode, 0, above.depth + 1, growth.chances[node])


# --- Trees of the best fixed shape for the acceptance that was measured (Chen et al. 2024, "Sequoia", arXiv 2402.12374).
#
# The profile says how often the sibling of a rank at a depth stands once its parent does. A dynamic programme finds the
# shape that is expected to bring the most tokens for a number of rows and a depth. Of these shapes, the one that brings
# the most for its time is taken. The profile is learnt while the shape is in use, and the shape follows it each time
# the number of drafts has doubled.


#: Siblings that the programme considers.
_RANKS = 6
#: Depths that it considers; a draft of a deeper shape would hardly ever stand to its end.
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
#: Rows that it considers: its time grows with their square.
_ROWS = 32
#: How many observations of a depth its usual chance weighs.
_WEIGHT = 16.0
#: Drafts after which the first guess is replaced.
_FIRST_DRAFTS = 32


@dataclass
class AcceptanceProfile:
    """Counts of rows whose parent stood, and of those that stood themselves."""

    offered: list[list[int]] = field(default_factory=list)  # by depth, from 0 for the first draft token, and rank
    stood: list[list[int]] = field(default_factory=list)  # the same

    def learn(self, draft: Draft, accepted: Collection[int]) -> None:
        """Count the rows of a draft."""
        ranks: dict[int, int] = {}
        for node, (parent, depth) in enumerate(zip(draft.parents, depths_of(draft.parents), strict=True)):
            rank = ranks[parent] = ranks.get(parent, -1) + 1
            if parent < 0 or parent in accepted:
                _at(self.offered, depth - 1, rank)
                _at(self.stood, depth - 1, rank)
                self.offered[depth - 1][rank] += 1
                self.stood[depth - 1][rank] += node in accepted

    def chance(self, depth: int, rank: int) -> float:
        """Returns the chance that a row stands once its parent does: what was counted here, and for few counts what is
        usual for its rank."""
        offered, stood = _read(self.offered, depth, rank), _read(self.stood, depth, rank)
        return (stood + _WEIGHT * self._usual(rank)) / (offered + _WEIGHT)

    def _usual(self, rank: int) -> float:
        offered = sum(_read(self.offered, depth, rank) for depth in range(len(self.offered)))
        stood = sum(_read(self.stood, depth, rank) for depth in range(len(self.stood)))
        return (stood + _WEIGHT * (0.6 if rank == 0 else 0.15 * 0.5**rank)) / (offered + _WEIGHT)


def _at(counts: list[list[int]], depth: int, rank: int) -> None:
    """Make room for a count."""
    counts += [[] for _ in range(depth + 1 - len(counts))]
    counts[depth] += [0] * (rank + 1 - len(counts[depth]))


def _read(counts: Sequence[Sequence[int]], depth: int, rank: int) -> int:
    return counts[depth][rank] if depth < len(counts) and rank < len(counts[depth]) else 0


@dataclass(frozen=True)
class PlannedTree:
    """A shape, and what it is expected to bring."""

    parents: tuple[int, ...]  # the parent of each node, level by level; -1 is the root
    expected: float  # draft tokens that stand, on average


def best_tree(profile: AcceptanceProfile, num_rows: int, max_depth: int) -> PlannedTree:
    """The shape of at most `num_rows` nodes and `max_depth` levels that is expected to bring the most tokens."""

    @cache
    def below(depth: int, rows: int, rank: int) -> tuple[float, int]:
        """The best that `rows` rows bring as children of rank `rank` and later of a node, whose children have `depth`, with
        all that is below them; and how many of the rows go to the child of this rank and what is below it."""
        best = (0.0, 0)
        if rows == 0 or depth >= max_depth or rank >= _RANKS:
            return best
        chance = profile.chance(depth, rank)
        for size in range(1, rows + 1):
            value = chance * (1.0 + below(depth + 1, size - 1, 0)[0]) + below(depth, rows - size, rank + 1)[0]
            if value > best[0]:
                best = (value, size)
        return best

    parents, level = list[int](), [(-1, num_rows)]
    for depth in range(max_depth):
        next_level = list[tuple[int, int]]()
        for parent, rows in level:
            rank, size = 0, below(depth, rows, 0)[1]
            while size:
                parents.append(parent)
                next_level.append((len(parents) - 1, size - 1))
                rows, rank = rows - size, rank + 1
                size = below(depth, rows, rank)[1]
        level = next_level
    return PlannedTree(tuple(parents), below(0, num_rows, 0)[0])


class SequoiaTree(TemplateTree):
    """Grows trees of the best shape for the acceptance so far.

    Args:
        pace: What rows and levels cost.
    """

    learns: ClassVar[bool] = True

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.profiles: dict[Mode, AcceptanceProfile] = {}
        self._num_drafts = 0
        self._renew_at = _FIRST_DRAFTS
        self._planned: dict[tuple[Mode, int], PlannedTree] = {}

    def parents(self, growth: GrowingTree) -> tuple[int, ...]:
        if not growth.budget:
            return ()
        key = (growth.mode, min(growth.budget, _ROWS))
        if key not in self._planned:
            self._planned[key] = self.plan(*key)
        return self._planned[key].parents

    def plan(self, mode: Mode, num_rows: int) -> PlannedTree:
        """The shape of at most so many rows that brings the most tokens for its time."""
        profile = self.profiles.get(mode, AcceptanceProfile())
        sizes = sorted({num_rows, *(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if size < num_rows)})
        trees = [(size, depth, best_tree(profile, size, depth)) for size in sizes for depth in _DEPTHS if depth <= size]
        return max(trees, key=lambda each: self._gain(*each))[2]

    def learn(self, draft: Draft, accepted: Collection[int], mode: Mode) -> None:
        self.profiles.setdefault(mode, AcceptanceProfile()).learn(draft, accepted)
        self._num_drafts += 1
        if self._num_drafts >= self._renew_at:
            self._renew_at = 2 * self._num_drafts
            self._planned.clear()

    def _gain(self, size: int, depth: int, tree: PlannedTree) -> float:
        """Expected tokens, less those that would be written in its time anyway."""
        rows = sum(self.pace.row_price(number) for number in range(1, size + 1))
        return tree.expected - rows - depth * self.pace.level_price()


# --- The value of time in tokens, against which adaptive trees weigh the chances of their rows.


#: Steps that the running means look back on, roughly.
_MEMORY = 50.0
#: Before any draft was timed, a level of one is taken to cost this share of a pass.
_FIRST_LEVEL = 0.05


class Pace:
    """Says how long rows and levels of drafts take, and how many tokens a second come out.

    A row is worth its time where the tokens that it is expected to bring are more than the engine writes in that time
    anyway. This maximises tokens over time (a fractional programme; Dinkelbach 1967).
    """

    def __init__(self, pass_seconds: Mapping[int, float]) -> None:
        self._hull = _lower_hull(sorted(pass_seconds.items()))
        one = self._hull[0][1]
        self._tokens, self._seconds = _MEMORY, _MEMORY * one
        self._levels, self._level_seconds = 1.0, _FIRST_LEVEL * one

    @property
    def tokens_per_second(self) -> float:
        """Returns what all sequences together write in a second."""
        return self._tokens / self._seconds

    @property
    def level_seconds(self) -> float:
        """Time of one level of a draft."""
        return self._level_seconds / self._levels

    def row_price(self, num_rows: int) -> float:
        """Tokens that would be written in the time by which one more row than `num_rows` makes a pass longer."""
        (rows, seconds), (more_rows, more_seconds) = self._hull[-2:]
        for (a, s), (b, t) in pairwise(self._hull):
            if a <= num_rows < b:
                (rows, seconds), (more_rows, more_seconds) = (a, s), (b, t)
                break
        return max(0.0, (more_seconds - seconds) / (more_rows - rows)) * self.tokens_per_second

    def level_price(self) -> float:
        """Tokens that would be written in the time of one level of a draft."""
        return self.level_seconds * self.tokens_per_second

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step of sequences that decode has ended."""
        keep = 1.0 - 1.0 / _MEMORY
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds

    def observe_levels(self, num_levels: int, seconds: float) -> None:
        """Drafts of so many levels were made."""
        keep = 1.0 - 1.0 / _MEMORY
        self._levels = keep * self._levels + num_levels
        self._level_seconds = keep * self._level_seconds + seconds


class FixedPace(Pace):
    """A pace that does not follow the clock, for proofs: the shape of a draft must come again on the same path."""

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        return

    def observe_levels(self, num_levels: int, seconds: float) -> None:
        return


def _lower_hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The largest convex function below the points: a step of a staircase is spread over the rows that it makes free."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull if len(hull) > 1 else [*hull, (hull[0][0] + 1, hull[0][1])]


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])

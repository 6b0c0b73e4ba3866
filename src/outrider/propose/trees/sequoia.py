"""Trees of the best fixed shape for the acceptance that was measured (Chen et al. 2024, "Sequoia", arXiv 2402.12374).

The profile says how often the sibling of a rank at a depth stands once its parent does. A dynamic programme finds the
shape that is expected to bring the most tokens for a number of rows and a depth. Of these shapes, the one that brings the
most for its time is taken. The profile is learnt while the shape is in use, and the shape follows it each time the number
of drafts has doubled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from outrider.draft import Draft, depths_of
from outrider.propose.trees.pace import Pace
from outrider.propose.trees.tree import GrowingTree, Mode, TemplateTree

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
    """Counts of rows whose parent stood, and of those that stood themselves.

    Attributes:
        offered: By depth, from 0 for the first draft token, and rank.
        stood: The same.
    """

    offered: list[list[int]] = field(default_factory=list)
    stood: list[list[int]] = field(default_factory=list)

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
        """That a row stands once its parent does: what was counted here, and for few counts what is usual for its rank."""
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
    """A shape, and what it is expected to bring.

    Attributes:
        parents: The parent of each node, level by level; -1 is the root.
        expected: Draft tokens that stand, on average.
    """

    parents: tuple[int, ...]
    expected: float


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

"""Estimates how often rows of adaptive trees are accepted, from earlier rows of the same rank, depth and confidence.

It is asked while a draft grows. Before that, the governor's estimate (`govern/acceptance.py`) says whether to draft at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass

from outrider.draft import Draft, Law, depths_of
from outrider.propose.trees.tree import RANKS, Mode

#: Upper ends of the ranges of confidence that are counted apart.
_ENDS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
#: Depths that are counted apart; deeper rows count as the last of these.
_DEPTHS = 6
#: How many observations the first guess weighs.
_WEIGHT = 12.0
#: Beyond so many observations older ones fade, so that a change of text is followed.
_FADES_AT = 1024.0


@dataclass
class _Count:
    """Rows whose fate was decided, and those of them that stood; fractions where older ones have faded."""

    tried: float
    stood: float

    def add(self, stood: bool) -> None:
        if self.tried >= _FADES_AT:
            self.tried, self.stood = self.tried / 2, self.stood / 2
        self.tried += 1
        self.stood += stood

    @property
    def share(self) -> float:
        return self.stood / self.tried

    @property
    def odds(self) -> float:
        return (self.stood + 0.5) / (self.tried - self.stood + 0.5)


class AcceptanceRates:
    """The chance that a row stands once the target's text has come to its parent and refused its elder siblings.

    Before a token is drawn, the chance follows from the largest probability of what it is drawn from, and behind the draw
    from the probability of the token itself. Where the likeliest tokens are taken, both are one. Deeper rows stand more
    often, since block verification and traversal weigh whole paths, and since easy text goes on being easy. Confidence
    and depth are taken to say independent things: each changes the odds.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[Hashable, ...], _Count] = {}
        self._chances: dict[tuple[Hashable, ...], float] = {}  # until the next draft is learnt from

    def before(self, mode: Mode, rank: int, depth: int, confidence: float) -> float:
        """The chance of a row without a token yet.

        Args:
            mode: How its token will be chosen.
            rank: Number of its elder siblings.
            depth: Tokens from the root to it, itself included.
            confidence: The largest probability of what it is drawn from. Where the likeliest tokens are taken, the
                probability of its token among those that its elder siblings have left.
        """
        return self._chance(mode, "before", rank, depth, confidence)

    def behind(self, mode: Mode, rank: int, depth: int, confidence: float) -> float:
        """The chance of a row whose token has the probability `confidence`; the other arguments as for `before`."""
        kind = "before" if mode[0] is Law.DETERMINISTIC else "behind"
        return self._chance(mode, kind, rank, depth, confidence)

    def usual(self, mode: Mode, rank: int, depth: int) -> float:
        """The chance of a row before its law is known; the arguments as for `before`."""
        key = (mode, rank, depth)
        chance = self._chances.get(key)
        if chance is None:
            chance = self._chances[key] = self._at(mode, rank, depth).share
        return chance

    def learn(self, draft: Draft, accepted: Collection[int], mode: Mode) -> None:
        """Count the rows of a draft whose fate was decided."""
        self._chances.clear()
        depths = depths_of(draft.parents)
        for node, rank, taken in tried(draft, accepted):
            stood = node in accepted
            best, token = draft.confidences[node]
            if mode[0] is Law.DETERMINISTIC:
                self._of(mode, "before", rank, token / max(1.0 - taken, token, 1e-9)).add(stood)
            else:
                self._of(mode, "before", rank, best).add(stood)
                self._of(mode, "behind", rank, token).add(stood)
            self._at(mode, rank, depths[node]).add(stood)
            self._any(mode, rank).add(stood)

    def fade(self) -> None:
        """Believe half as much of what was seen, so that new observations soon weigh more."""
        self._chances.clear()
        for count in self._counts.values():
            count.tried, count.stood = count.tried / 2, count.stood / 2

    def _chance(self, mode: Mode, kind: str, rank: int, depth: int, confidence: float) -> float:
        key = (mode, kind, rank, depth, bisect_right(_ENDS, confidence))
        chance = self._chances.get(key)
        if chance is None:
            own, here, usual = self._of(mode, kind, rank, confidence), self._at(mode, rank, depth), self._any(mode, rank)
            odds = own.odds * here.odds / usual.odds
            chance = self._chances[key] = odds / (1.0 + odds)
        return chance

    def _of(self, mode: Mode, kind: str, rank: int, confidence: float) -> _Count:
        """Rows of one confidence at any depth."""
        return self._count(_first_guess(mode, rank, confidence), mode, kind, rank, bisect_right(_ENDS, confidence))

    def _at(self, mode: Mode, rank: int, depth: int) -> _Count:
        """Rows of one depth and any confidence."""
        return self._count(_first_guess(mode, rank, 0.3), mode, "depth", rank, min(depth, _DEPTHS))

    def _any(self, mode: Mode, rank: int) -> _Count:
        """Rows of any depth and any confidence."""
        return self._count(_first_guess(mode, rank, 0.3), mode, "any", rank, 0)

    def _count(self, guess: float, mode: Mode, kind: str, rank: int, cell: int) -> _Count:
        key = (mode, kind, min(rank, RANKS - 1), cell)
        if key not in self._counts:
            self._counts[key] = _Count(_WEIGHT, _WEIGHT * guess)
        return self._counts[key]


def tried(draft: Draft, accepted: Collection[int]) -> Iterator[tuple[int, int, float]]:
    """The nodes whose fate was decided: the parent stands, and no elder sibling does.

    Yields each node, its rank, and the probability that its elder siblings have together.
    """
    seen: defaultdict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(draft.parents):
        elders = seen[parent]
        if (parent < 0 or parent in accepted) and not any(elder in accepted for elder in elders):
            taken = sum(draft.confidences[elder].token for elder in elders) if draft.confidences else 0.0
            yield node, len(elders), taken
        elders.append(node)


def _first_guess(mode: Mode, rank: int, confidence: float) -> float:
    """What holds before anything is known, from the embedded pair of models."""
    law, target_is_greedy = mode
    if law is Law.DETERMINISTIC and not target_is_greedy:
        return 0.05 + 0.8 * confidence
    first = 0.5 + 0.45 * confidence
    return first if rank == 0 else 0.25 * 0.8 ** (rank - 1)

"""How many rows each member of a merged draft gets, by how often its tokens have stood; no torch.

Shares are fixed before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from outrider.propose.compositions import Composition, Merge, parts_of
from outrider.propose.method import Method
from outrider.propose.speculation import SpeculationConfig

#: Share of the past that each further outcome leaves.
_KEPT = 0.98
#: What is believed of a method before it has drafted, and as how many outcomes that counts.
_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0
#: Methods, and merges of them, that are remembered; methods unused for longest are forgotten.
_MOST = 256


@dataclass
class _Counts:
    tried: float = 0.0
    stood: float = 0.0

    @property
    def rate(self) -> float:
        return (self.stood + _PRIOR * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)


class _Deal:
    """Rows of a merge's members, dealt out one after another: each to the member whose next row stands most often. A row
    stands where all rows of its member before it do.

    Args:
        merge: The merge.
        rates: How often a token of each member stands, in the order of their turns.

    Attributes:
        merge: The same.
        members: In the order of their turns.
    """

    def __init__(self, merge: Merge, rates: Sequence[float]) -> None:
        self.merge, self.members = merge, merge.in_order()
        self._rates, self._chances = rates, list(rates)
        self._dealt = [(0,) * len(rates)]

    def rows(self, budget: int) -> tuple[int, ...]:
        """Of each member, where there are so many in all."""
        while len(self._dealt) <= budget and (chance := max(self._chances)) >= 0.0:
            rows, place = list(self._dealt[-1]), self._chances.index(chance)
            rows[place] += 1
            self._chances[place] = (
                chance * self._rates[place] if rows[place] < self.members[place].num_draft_tokens else -1.0
            )
            self._dealt.append(tuple(rows))
        return self._dealt[min(budget, len(self._dealt) - 1)]


class RowShares:
    """Shares rows out among members, and learns from what stood."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Counts] = {}
        self._deals: dict[int, _Deal] = {}  # by object: to compare settings takes longer than to deal anew

    def forget(self) -> None:
        """Forget what was learnt; the proofs need the same shares on every path."""
        self._counts.clear()
        self._deals.clear()

    def of(self, config: SpeculationConfig, budget: int) -> list[int]:
        """Rows of each turn of a composition, in the order of `turns_of`; `budget` in all, at most."""
        method = config.method
        if not isinstance(method, Composition):
            return [min(config.num_draft_tokens, budget)]
        if isinstance(method, Merge):
            deal = self._deal(method)
            shares = zip(deal.members, deal.rows(budget), strict=True)
            return [share for member, own in shares for share in self.of(member, own)]
        found = list[int]()
        for member in method.methods:
            own = min(member.num_draft_tokens, budget)
            budget -= own
            found += self.of(member, own)
        return found

    def observe(self, method: Method, tried: int, stood: int) -> None:
        """Of so many places where a method proposed tokens and whose fate was decided, at so many one of them stood."""
        self._deals.clear()
        counts = self._of(method)
        counts.tried, counts.stood = counts.tried * _KEPT**tried + tried, counts.stood * _KEPT**tried + stood

    def _deal(self, merge: Merge) -> _Deal:
        """By what is known now; the same until more is learnt."""
        found = self._deals.get(id(merge))
        if found is None:
            members = merge.in_order()
            rates = [max(self._of(part.method).rate for part in parts_of(member) if part.method) for member in members]
            found = _Deal(merge, rates)
            if len(self._deals) >= _MOST:
                self._deals.clear()
            self._deals[id(merge)] = found
        return found

    def _of(self, method: Method) -> _Counts:
        try:
            key: Hashable = method
            counts = self._counts.get(key)
        except TypeError:  # its settings cannot be hashed
            key = method.name
            counts = self._counts.get(key)
        self._counts.pop(key, None)
        counts = _Counts() if counts is None else counts
        self._counts[key] = counts  # the most recently used come last
        if len(self._counts) > _MOST:
            del self._counts[next(iter(self._counts))]
        return counts

"""How many rows each member of a merged draft gets, by how often its tokens have stood; no torch.

Shares are fixed before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from outrider.propose.compositions import Composition, Merge, parts_of
from outrider.propose.method import Method
from outrider.propose.speculation import SpeculationConfig

#: Share of the past that each further outcome leaves.
_KEPT = 0.98
#: What is believed of a method before it has drafted, and as how many outcomes that counts.
_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0
#: Methods that are remembered; those unused for longest are forgotten.
_MOST = 256


@dataclass
class _Counts:
    tried: float = 0.0
    stood: float = 0.0

    @property
    def rate(self) -> float:
        return (self.stood + _PRIOR * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)


class RowShares:
    """Shares rows out among members, and learns from what stood."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Counts] = {}

    def forget(self) -> None:
        """Forget what was learnt; the proofs need the same shares on every path."""
        self._counts.clear()

    def of(self, config: SpeculationConfig, budget: int) -> list[int]:
        """Rows of each turn of a composition, in the order of `turns_of`; `budget` in all, at most."""
        method = config.method
        if not isinstance(method, Composition):
            return [min(config.num_draft_tokens, budget)]
        if isinstance(method, Merge):
            members = method.in_order()
            rows = self._merged(members, budget)
        else:
            members, rows = method.methods, []
            for member in members:
                rows.append(min(member.num_draft_tokens, budget - sum(rows)))
        return [share for member, own in zip(members, rows, strict=True) for share in self.of(member, own)]

    def observe(self, method: Method, tried: int, stood: int) -> None:
        """Of so many places where a method proposed tokens and whose fate was decided, at so many one of them stood."""
        counts = self._of(method)
        counts.tried, counts.stood = counts.tried * _KEPT**tried + tried, counts.stood * _KEPT**tried + stood

    def _merged(self, members: tuple[SpeculationConfig, ...], budget: int) -> list[int]:
        """The rows of highest expected acceptance: row d of a member stands where all rows before it do."""
        rates = [max(self._of(part.method).rate for part in parts_of(member) if part.method) for member in members]
        rows, chances = [0] * len(members), list(rates)
        for _ in range(min(budget, sum(member.num_draft_tokens for member in members))):
            place = chances.index(max(chances))
            rows[place] += 1
            chances[place] = chances[place] * rates[place] if rows[place] < members[place].num_draft_tokens else -1.0
        return rows

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

"""Computes figures of speculation from counts and times, and tells how far a measurement is."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from time import perf_counter
from typing import Self

from pydantic import BaseModel

#: A text with a larger share of repeated 8-grams is in a loop. Its figures must not be a headline.
LOOPS_ABOVE = 0.10


class Spread(BaseModel):
    """A median, and the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """The spread of some values. None where there are no values."""
        return cls(median=median(values), low=min(values), high=max(values)) if values else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least a share (0 to 1) of the values do not exceed. None where there are no values."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None


def expected_tokens(acceptance: float, num_draft_tokens: float) -> float:
    """The tokens that a draft yields if each is accepted with the same probability: (1 - a^(K+1)) / (1 - a)."""
    if acceptance >= 1.0:
        return num_draft_tokens + 1.0
    return float((1.0 - acceptance ** (num_draft_tokens + 1.0)) / (1.0 - acceptance))


def conditional_acceptance(accepted: Sequence[int], tried: Sequence[int]) -> list[float | None]:
    """For each position, the share of drafts whose token stood there, among those that had one and stood until there."""
    return [a / t if t else None for a, t in zip(accepted, tried, strict=True)]


def repeated_8grams(token_ids: Sequence[int]) -> float:
    """The share of 8-grams that occurred earlier in the same text, 0 to 1."""
    grams = Counter(tuple(token_ids[i : i + 8]) for i in range(len(token_ids) - 7))
    total = sum(grams.values())
    return (total - len(grams)) / total if total else 0.0


def row_cost_ratio(seconds: Mapping[int, float], num_rows: float, base_rows: int = 1) -> float | None:
    """C = T(num_rows) / T(base_rows), interpolated linearly between measured passes, whose seconds are given by their
    number of rows. It is None outside the measured range."""
    top, bottom = _between(seconds, num_rows), _between(seconds, base_rows)
    return None if top is None or bottom is None else top / bottom


def _between(seconds: Mapping[int, float], rows: float) -> float | None:
    known = sorted(seconds)
    if not known or not known[0] <= rows <= known[-1]:
        return None
    place = bisect_left(known, rows)
    upper = known[place]
    if upper == rows:
        return seconds[upper]
    lower = known[place - 1]
    return seconds[lower] + (seconds[upper] - seconds[lower]) * (rows - lower) / (upper - lower)


# --- Tells how far a long measurement is.


class Progress:
    """Counts turns, and says how long those take that are left, if they go on to take as long as they did on average.
    Between two turns the time that is left runs down, and where a turn takes longer than those before it grows again. A
    display shows it by a subclass; this class shows nothing."""

    def __init__(self) -> None:
        self.what, self.done, self.total = "loading", 0, 0
        self._begun = self._last = perf_counter()
        self._first = 0

    def shown(self, *, begun: bool = False) -> None:
        """Called when something has changed; `begun` says that other turns than before are counted."""

    def expect(self, what: str, total: int, done: int = 0) -> None:
        """So many turns of this come next, of which some may be done."""
        self.what, self.done, self.total = what, done, total
        self._begun = self._last = perf_counter()
        self._first = done
        self.shown(begun=True)

    def reach(self, done: int) -> None:
        """So many turns are done."""
        self.done, self._last = done, perf_counter()
        self.shown()

    def advance(self) -> None:
        """A turn is done."""
        self.reach(self.done + 1)

    def change(self, turns: int) -> None:
        """There are so many turns more than was expected, or fewer."""
        self.total += turns
        self.shown()

    def tell(self, what: str, done: int, total: int) -> None:
        """So much of it is done; the first call says where it began."""
        if not self.total:
            self.expect(what, total, done)
        self.what, self.total = what, total
        self.reach(done)

    def left(self) -> float | None:
        """Seconds; None where nothing is known of them."""
        turns, rest = self.done - self._first, self.total - self.done
        if turns <= 0 or rest <= 0:
            return None
        now, mean = perf_counter(), (self._last - self._begun) / turns
        waited = now - self._last
        return mean * rest - waited if waited <= mean else (now - self._begun) / (turns + 1) * (rest - 1)


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

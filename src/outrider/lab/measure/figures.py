"""Computes figures of speculation from counts and times, and tells how far a measurement is."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
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

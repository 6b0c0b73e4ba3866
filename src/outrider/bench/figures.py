"""The arithmetic of speculation, as pure functions of counts and times."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Self

from pydantic import BaseModel

#: A text with a larger share of repeated 8-grams is in a loop, and its figure may be no headline.
LOOPS_ABOVE = 0.10


class Spread(BaseModel):
    """A median and the range around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None where there are no values."""
        return cls(median=median(values), low=min(values), high=max(values)) if values else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` (0 to 1) of them do not exceed; None where there are none."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None


def expected_tokens(acceptance: float, num_draft_tokens: float) -> float:
    """Tokens a verified draft yields if every one is accepted with the same chance: (1 - a^(K+1)) / (1 - a).

    Args:
        acceptance: Conditional acceptance a, from 0 to 1.
        num_draft_tokens: K, draft tokens in a row; a mean where lengths differ.
    """
    if acceptance >= 1.0:
        return num_draft_tokens + 1.0
    return float((1.0 - acceptance ** (num_draft_tokens + 1.0)) / (1.0 - acceptance))


def conditional_acceptance(accepted: Sequence[int], tried: Sequence[int]) -> list[float | None]:
    """By position: of the drafts whose earlier tokens all stood and that went on, the share whose token stood too."""
    return [a / t if t else None for a, t in zip(accepted, tried, strict=True)]


def repeated_8grams(token_ids: Sequence[int]) -> float:
    """Share of 8-grams that stood before in the same text, 0 to 1."""
    grams = Counter(tuple(token_ids[i : i + 8]) for i in range(len(token_ids) - 7))
    total = sum(grams.values())
    return (total - len(grams)) / total if total else 0.0


def row_cost_ratio(seconds: Mapping[int, float], num_rows: float, base_rows: int = 1) -> float | None:
    """C = T(num_rows) / T(base_rows), read off measured passes with straight lines between them.

    Args:
        seconds: Of a pass, by rows.
        num_rows: May be a fraction: a mean over passes.
        base_rows: Rows of the plain pass: the batch.

    Returns:
        None outside the measured range.
    """
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

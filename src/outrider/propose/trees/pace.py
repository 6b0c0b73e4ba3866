"""The value of time in tokens, against which adaptive trees weigh the chances of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

#: Steps that the running means look back on, roughly.
_MEMORY = 50.0
#: Before any draft was timed, a level of one is taken to cost this share of a pass.
_FIRST_LEVEL = 0.05


class Pace:
    """How long rows and levels of drafts take, and how many tokens a second come out.

    A row is worth its time where the tokens that it is expected to bring are more than the engine writes in that time
    anyway. This maximises tokens over time (a fractional programme; Dinkelbach 1967).

    Args:
        pass_seconds: Time of a target pass by its number of rows, one row among them.
    """

    def __init__(self, pass_seconds: Mapping[int, float]) -> None:
        self._hull = _lower_hull(sorted(pass_seconds.items()))
        one = self._hull[0][1]
        self._tokens, self._seconds = _MEMORY, _MEMORY * one
        self._levels, self._level_seconds = 1.0, _FIRST_LEVEL * one

    @property
    def tokens_per_second(self) -> float:
        """What all sequences together write in a second."""
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

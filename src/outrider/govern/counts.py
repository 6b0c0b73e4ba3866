"""Counts how many draft tokens were tried and how many stood, by position; older ones fade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Positions that are counted apart; deeper ones count as the last of these.
POSITIONS = 12
#: Drafts that the share of a position weighs as a prior for the next one.
_BEFORE_WEIGHT = 8.0
#: What a file may say at most: drafts of one position, and tokens that the text gained with one draft.
_MOST_TRIED, _MOST_GAINED = 1e6, 1e4


@dataclass(frozen=True)
class Shares:
    """Counts at one moment.

    Attributes:
        tried: By position, how many were tried.
        stood: By position, how many of them stood.
        gained: Tokens that the text gained with the drafts whose first token stood.
    """

    tried: tuple[float, ...]
    stood: tuple[float, ...]
    gained: float

    def check(self) -> None:
        """Raise ValueError where no drafts could have been counted so."""
        if not len(self.tried) == len(self.stood) == POSITIONS:
            raise ValueError(f"{len(self.tried)} and {len(self.stood)} positions are no {POSITIONS}")
        for tried, stood in zip(self.tried, self.stood, strict=True):
            if not 0.0 <= stood <= tried <= _MOST_TRIED:
                raise ValueError(f"{stood} of {tried} draft tokens cannot have stood")
        if not 0.999 * self.stood[0] <= self.gained <= _MOST_GAINED * self.stood[0]:
            raise ValueError(f"{self.stood[0]} good drafts cannot have brought {self.gained} tokens")


class Counts:
    """How many were tried and how many stood, by position; older ones fade.

    Args:
        memory: Drafts that are remembered.

    Attributes:
        version: Grows with everything that is learnt.
    """

    def __init__(self, memory: float) -> None:
        self._growth = memory / (memory - 1.0)
        self._weight = 1.0
        self._tried = [0.0] * POSITIONS
        self._stood = [0.0] * POSITIONS
        self._gained = 0.0
        self.version = 0

    @property
    def shares(self) -> Shares:
        """As they are now."""
        scale = 1.0 / self._weight
        tried, stood = ([scale * each for each in counted] for counted in (self._tried, self._stood))
        return Shares(tuple(tried), tuple(stood), scale * self._gained)

    def begin(self, shares: Shares, most: float) -> None:
        """Go on from counts of earlier texts, as if they were of so many drafts at most."""
        scale = self._weight * min(1.0, most / max(shares.tried[0], 1e-9))
        self._tried, self._stood = [scale * each for each in shares.tried], [scale * each for each in shares.stood]
        self._gained = scale * shares.gained
        self.version += 1

    def add(self, scores: Sequence[float], tokens: float = 1.0) -> None:
        """One draft: for each position that was tried, in order, whether it stood (or with which chance); and tokens that
        the text gained with it."""
        self.version += 1
        self._weight *= self._growth
        for place, score in enumerate(scores):
            position = min(place, POSITIONS - 1)
            self._tried[position] += self._weight
            self._stood[position] += self._weight * score
        self._gained += self._weight * scores[0] * tokens
        if self._weight > 1e12:
            self.fade(1.0 / self._weight)
            self._weight = 1.0

    def fade(self, share: float) -> None:
        """Keep only this share of all counts."""
        self.version += 1
        self._tried = [each * share for each in self._tried]
        self._stood = [each * share for each in self._stood]
        self._gained *= share

    @property
    def tokens_of_good_drafts(self) -> float:
        """Tokens that the text gained on average with a draft whose first token stood."""
        return self._gained / self._stood[0] if self._stood[0] > 0.0 else 1.0

    def along(self, guess: float, weight: float) -> list[float]:
        """Share that stood, by position. `guess` is the prior of the first position, and each further one has the share of
        the one before it: deep positions are seldom tried, and stand about as often."""
        scale, shares = self._weight, list[float]()
        for tried, stood in zip(self._tried, self._stood, strict=True):
            guess = (stood / scale + weight * guess) / (tried / scale + weight)
            shares.append(guess)
            weight = _BEFORE_WEIGHT
        return shares

    def chances(self, prior: Sequence[float], weight: float) -> list[float]:
        """Share that stood, by position. The prior of the first position weighs as much as `weight` drafts; behind it
        `prior` says how much less or more often than the one before it a position stands."""
        scale, shares, guess = self._weight, list[float](), prior[0]
        for place, (tried, stood) in enumerate(zip(self._tried, self._stood, strict=True)):
            if place:
                guess = min(shares[-1] * prior[place] / max(prior[place - 1], 1e-6), 1.0)
                weight = _BEFORE_WEIGHT
            shares.append((stood / scale + weight * guess) / (tried / scale + weight))
        return shares

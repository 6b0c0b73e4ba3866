"""A source of noise that takes every branch, so that the distribution of the real engine can be computed.

`explore` runs a program again and again, once for each path through its decisions, and adds up the probabilities of its
outcomes. Probabilities are float64. With d decisions on a path over v tokens, the total variation is wrong by at most
about 4 * d * v * 2**-53, which is below 1e-13 for everything proved here. Branches below `FLOOR` exist only by rounding.
They are not followed, and `Distribution.dropped` reports an upper bound of their probability.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.errors import NoiseReuseError
from outrider.lab.prove.reference import WHOLE, Polygon, area, cell
from outrider.verify.noise import Key, Stream

#: Branches that are less likely than this are counted, but not followed.
FLOOR = 1e-14

Outcome = tuple[Hashable, ...]
#: The name of a decision: sample, stream, position, round, branch, drafter. The seed is left out, since the engine may draw
#: another one in every run. Decisions of other programs have their number on the path as their name.
Name = tuple[int, ...]


@dataclass(frozen=True)
class Distribution:
    """Holds what a program may return, and how likely."""

    probs: dict[Outcome, float]  # probability of each outcome
    num_paths: int = 0  # the number of paths through the program
    dropped: float = 0.0  # an upper bound of the probability of all branches that were too unlikely to follow


def total_variation(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    """Half the sum of the absolute differences between two distributions, from 0 to 1."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


@dataclass
class ForkedPath:
    """One path through the program: decisions to repeat, and then new ones."""

    choices: dict[Name, int] = field(default_factory=dict)
    weight: float = 1.0
    owners: list[int] = field(default_factory=list)
    spent: set[Key] = field(default_factory=set)
    # None: used, with unknown result
    races: dict[tuple[int, int, int, int, int], Polygon | None] = field(default_factory=dict)
    met: set[Name] = field(default_factory=set)


class ForkingNoise:
    """A NoiseSource for `explore`. Outside of `explore` there is no path to follow, and every request fails."""

    def __init__(self, floor: float = FLOOR) -> None:
        self._floor = floor
        self._paths: list[ForkedPath] = []
        self._by_owner: dict[int, ForkedPath] = {}
        self._pending: list[ForkedPath] = []
        self.dropped = 0.0

    def bernoulli(self, probability: Tensor, keys: Sequence[Key]) -> Tensor:
        """See NoiseSource. Raises NoiseReuseError for a key, or noise, that was used before."""
        coins = [self._toss(p, key) for p, key in zip(probability.tolist(), keys, strict=True)]
        return torch.tensor(coins, dtype=torch.bool, device=probability.device)

    def categorical(self, probs: Tensor, keys: Sequence[Key]) -> Tensor:
        """See NoiseSource. Raises NoiseReuseError for a key, or noise, that was used before."""
        tokens = [self._draw(row, key) for row, key in zip(probs.tolist(), keys, strict=True)]
        return torch.tensor(tokens, dtype=torch.long, device=probs.device)

    def forget(self, owner: int) -> None:
        """Do nothing: what a path has used is forgotten when the path ends."""

    def mark(self) -> None:
        """Do nothing: a path goes only forward."""

    def rewind(self) -> None:
        """Raise again what made the engine take draws back: a path goes only forward."""
        raise

    # -- driving -------------------------------------------------------------------------------------------------------

    def start(self, width: int) -> int:
        """Set up at most `width` of the paths that wait; returns how many. It is 0 when all paths have been walked."""
        taken = [self._pending.pop() for _ in range(min(width, len(self._pending)))]
        self._paths, self._by_owner = taken, {}
        return len(taken)

    def begin(self) -> None:
        """Forget everything and plan the first path."""
        self._pending, self._paths, self._by_owner, self.dropped = [ForkedPath()], [], {}, 0.0

    def weights(self) -> list[float]:
        """The probability of each path of the last run, in the order of their owners' ids."""
        for path in self._paths:
            assert path.choices.keys() == path.met, "a decision did not come again: the program is not deterministic"
        if len(self._paths) == 1:
            return [self._paths[0].weight]
        assert len(self._by_owner) == len(self._paths), "a path made no draw, so it cannot be told from the others"
        return [self._by_owner[owner].weight for owner in sorted(self._by_owner)]

    # -- decisions -----------------------------------------------------------------------------------------------------

    def choose(self, chances: Sequence[float]) -> int:
        """A decision of the only path, which is known by the order in which the program makes its decisions."""
        (path,) = self._paths
        return self._fork(path, (len(path.met),), list(enumerate(chances)))

    def _toss(self, probability: float, key: Key) -> bool:
        path = self._spend(key)
        assert probability == probability, f"{key}: the probability is NaN"
        if probability <= 0.0 or probability >= 1.0:
            return probability >= 1.0
        return bool(self._fork(path, name_of(key), [(1, probability), (0, 1.0 - probability)]))

    def _draw(self, probs: list[float], key: Key) -> int:
        path = self._spend(key)
        total = sum(probs)
        assert total > 0.0, f"{key}: no probability anywhere, or NaN"
        if key.stream not in (Stream.TARGET, Stream.GUESS):
            return self._fork(path, name_of(key), [(token, p / total) for token, p in enumerate(probs) if p > 0.0])
        return self._race(path, key, probs, total)

    def _race(self, path: ForkedPath, key: Key, probs: list[float], total: float) -> int:
        """A draw that may share its noise with another draw."""
        # Whoever guesses, guesses the noise of the engine's own verification, which is the same in every round.
        drafter, round_ = (0, 0) if key.stream is Stream.GUESS else (key.drafter, key.round)
        noise = (key.seed, key.sample, key.position, drafter, round_)
        if len(probs) != 3:
            assert key.stream is Stream.TARGET, "guesses can be followed over a vocabulary of 3 only"
            assert noise not in path.races, f"{key}: the noise of this position was used before"
            path.races[noise] = None
            return self._fork(path, name_of(key), [(token, p / total) for token, p in enumerate(probs) if p > 0.0])
        known = path.races.get(noise, WHOLE)
        assert known is not None, "a vocabulary changed its size"
        cells = [cell(known, probs, token) if probs[token] > 0.0 else () for token in range(3)]
        areas = [float(area(c)) for c in cells]
        mass = sum(areas)
        token = self._fork(path, name_of(key), [(t, a / mass) for t, a in enumerate(areas) if a > 0.0])
        path.races[noise] = cells[token]
        return token

    def _spend(self, key: Key) -> ForkedPath:
        path = self._path(key.owner)
        bits = key._replace(owner=0)  # the noise does not depend on the owner: two owners with one key are correlated
        if bits in path.spent:
            raise NoiseReuseError(f"{key} was used before")
        path.spent.add(bits)
        return path

    def _path(self, owner: int) -> ForkedPath:
        if len(self._paths) == 1:  # all owners are samples of the same program
            return self._paths[0]
        if owner not in self._by_owner:
            assert len(self._by_owner) < len(self._paths), "more sequences than paths"
            self._by_owner[owner] = self._paths[len(self._by_owner)]
        return self._by_owner[owner]

    def _fork(self, path: ForkedPath, name: Name, branches: list[tuple[int, float]]) -> int:
        """The choice that the path repeats, or else the likeliest one. The other choices are left to later paths."""
        self.dropped += sum(path.weight * probability for _, probability in branches if probability < self._floor)
        branches = sorted((b for b in branches if b[1] >= self._floor), key=lambda b: -b[1])
        if len(branches) == 1:
            return branches[0][0]
        path.met.add(name)
        if name in path.choices:
            return path.choices[name]
        for choice, probability in branches[1:]:
            self._pending.append(ForkedPath({**path.choices, name: choice}, path.weight * probability))
        choice, probability = branches[0]
        path.choices[name] = choice
        path.weight *= probability
        return choice


def name_of(key: Key) -> Name:
    """The name of the decision that a key stands for."""
    return (key.sample, int(key.stream), key.position, key.round, key.branch, key.drafter)


def explore(
    run: Callable[[int], Iterable[Outcome]], noise: ForkingNoise, *, width: int = 1, max_paths: int = 200_000
) -> Distribution:
    """The exact distribution of what a program returns when all its chance comes from `noise`. A run has up to `width`
    copies, which share batches and caches, so that these are proved too."""
    noise.begin()
    probs: dict[Outcome, float] = {}
    num_paths = 0
    while count := noise.start(width):
        outcomes = list(run(count))
        for outcome, weight in zip(outcomes, noise.weights(), strict=True):
            probs[outcome] = probs.get(outcome, 0.0) + weight
        num_paths += count
        assert num_paths <= max_paths, f"more than {max_paths} paths"
    return Distribution(probs, num_paths, noise.dropped)

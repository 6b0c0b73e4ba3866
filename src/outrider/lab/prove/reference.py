"""The acceptance rules in exact rational arithmetic, written from the papers and from nothing else in this package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from fractions import Fraction
from functools import cache
from itertools import product
from random import Random
from typing import Any

# --- The noise of an exponential race over three tokens, as polygons, so that two draws can share it.
#
# A race picks argmax p_i / E_i, where the E_i are independent Exp(1) variables (Gumbel-max; Maddison et al. 2014). Only
# the direction of E matters, and it is uniform on the simplex. If token y wins under the probabilities p, then E lies
# in the convex cell {E_y * p_k <= E_k * p_y for every k}, whose share of the simplex is p_y. The probability that a
# token wins a second race with the *same* noise, given the winner of the first, is therefore a ratio of areas. The
# functions take floats and, exactly, fractions.


#: A point of the simplex: three coordinates, floats or fractions.
Point = tuple[Any, Any, Any]
#: The corners in order. A cell with fewer than three corners is empty.
Polygon = tuple[Point, ...]

#: The whole simplex: nothing is known of the noise.
WHOLE: Polygon = ((1, 0, 0), (0, 1, 0), (0, 0, 1))


def area(polygon: Polygon) -> Any:
    """The share of the whole simplex that a polygon covers, from 0 to 1."""
    twice: Any = 0
    for a, b in zip(polygon, (*polygon[1:], *polygon[:1]), strict=True):
        twice = twice + a[0] * b[1] - b[0] * a[1]
    return abs(twice)


def cell(polygon: Polygon, probs: Sequence[Any], winner: int) -> Polygon:
    """The part of `polygon` in which `winner` wins under `probs` (three entries, at any scale)."""
    for rival in range(3):
        if rival != winner:
            polygon = _clip(polygon, probs, winner, rival)
    return polygon


def _clip(polygon: Polygon, probs: Sequence[Any], winner: int, rival: int) -> Polygon:
    """Clip by the half-plane in which `winner` beats `rival` (Sutherland and Hodgman 1974)."""
    lead = [e[rival] * probs[winner] - e[winner] * probs[rival] for e in polygon]
    kept: list[Point] = []
    for i, point in enumerate(polygon):
        before = polygon[i - 1]
        if (lead[i] > 0 and lead[i - 1] < 0) or (lead[i] < 0 and lead[i - 1] > 0):
            share = lead[i - 1] / (lead[i - 1] - lead[i])
            kept.append(_between(before, point, share))
        if lead[i] >= 0:
            kept.append(point)
    return tuple(kept)


def _between(a: Point, b: Point, share: Any) -> Point:
    return (a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share, a[2] + (b[2] - a[2]) * share)


# --- The rules.
#
# R1 is speculative sampling (Leviathan et al. 2023, Chen et al. 2023). R2 samples from the target and follows the draft
# while the two agree. R3 is block verification (Sun et al. 2024). RC is R2 where the proposer and the target run one
# exponential race (Daliri et al. 2024). All probabilities depend on the whole context. `speculative_distribution` gives
# the joint distribution of the first tokens, over as many consecutive rounds as they take. Its total variation from
# `plain_distribution` must be exactly 0.


VOCAB_SIZE = 3
Context = tuple[int, ...]
Probs = tuple[Fraction, ...]
Joint = dict[Context, Fraction]


class ReferenceRule(StrEnum):
    TOKEN = "token"
    BLOCK = "block"
    WALK = "walk"
    COUPLED = "coupled"


#: How the probabilities of target and draft relate in a case.
KINDS = ("generic", "zeros", "equal", "one-hot draft", "one-hot target", "disjoint", "near", "mixed")


class Case:
    """The probabilities of a target and of a draft, for every context over three tokens."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self._pairs: dict[Context, tuple[Probs, Probs]] = {}

    def target(self, context: Context) -> Probs:
        return self._pair(context)[0]

    def draft(self, context: Context) -> Probs:
        return self._pair(context)[1]

    def _pair(self, context: Context) -> tuple[Probs, Probs]:
        if context not in self._pairs:
            random = Random(f"{self.seed}:{context}")
            kind = random.choice(KINDS[:-1]) if self.kind == "mixed" else self.kind
            self._pairs[context] = _random_pair(kind, random)
        return self._pairs[context]

    def __str__(self) -> str:
        return f"{self.kind} #{self.seed}"


def cases(count: int, seed: int = 0) -> list[Case]:
    """`count` cases that take the kinds in turn."""
    return [Case(KINDS[i % len(KINDS)], seed * 1_000_003 + i) for i in range(count)]


def _random_pair(kind: str, random: Random) -> tuple[Probs, Probs]:
    p, q = _random_probs(random, 1), _random_probs(random, 1)
    spot = random.randrange(VOCAB_SIZE)
    one_hot = tuple(Fraction(int(t == spot)) for t in range(VOCAB_SIZE))
    if kind == "zeros":
        return _random_probs(random, 0), _random_probs(random, 0)
    if kind == "equal":
        return p, p
    if kind == "one-hot draft":
        return p, one_hot
    if kind == "one-hot target":
        return one_hot, q
    if kind == "disjoint":
        rest = _normalised([0 if t == spot else random.randint(1, 9) for t in range(VOCAB_SIZE)])
        return (one_hot, rest) if random.random() < 0.5 else (rest, one_hot)
    if kind == "near":
        return p, _normalised([100 * w + random.randint(1, 9) for w in p])
    return p, q


def _random_probs(random: Random, least: int) -> Probs:
    weights = [random.randint(1, 12) if least or random.random() < 0.6 else 0 for _ in range(VOCAB_SIZE)]
    return _normalised(weights if any(weights) else [1, 0, 2])


def _normalised(weights: list[int] | list[Fraction]) -> Probs:
    total = Fraction(sum(weights)) or Fraction(1)
    return tuple(Fraction(w) / total for w in weights)


# -- joint distributions -----------------------------------------------------------------------------------------------


def plain_distribution(case: Case, length: int) -> Joint:
    """Joint distribution of the target's first `length` tokens."""
    joint: Joint = {(): Fraction(1)}
    for _ in range(length):
        joint = {(*c, t): weight * p for c, weight in joint.items() for t, p in enumerate(case.target(c)) if p}
    return joint


def speculative_distribution(case: Case, rule: ReferenceRule, num_draft_tokens: int, length: int) -> Joint:
    """Joint distribution of the first `length` tokens under consecutive rounds of draft and verification."""
    if rule is ReferenceRule.COUPLED:
        return _coupled_distribution(case, num_draft_tokens, length)

    return over_rounds(lambda context: round_distribution(case, rule, context, num_draft_tokens), length)


def over_rounds(one_round: Callable[[Context], Joint], length: int) -> Joint:
    """Joint distribution of the first `length` tokens of rounds, whose own distributions depend on the text before."""

    @cache
    def continued(context: Context) -> Mapping[Context, Fraction]:
        if len(context) >= length:
            return {context[:length]: Fraction(1)}
        joint: defaultdict[Context, Fraction] = defaultdict(Fraction)
        for tokens, weight in one_round(context).items():
            for outcome, share in continued(context + tokens).items():
                joint[outcome] += weight * share
        return joint

    return dict(continued(()))


def distance(a: Mapping[Context, Fraction], b: Mapping[Context, Fraction]) -> Fraction:
    """The exact total variation between two distributions."""
    zero = Fraction(0)
    return sum((abs(a.get(c, zero) - b.get(c, zero)) for c in a.keys() | b.keys()), zero) / 2


def round_distribution(case: Case, rule: ReferenceRule, context: Context, num_draft_tokens: int) -> Joint:
    """Joint distribution of the tokens that one round commits after `context`, the recovered or bonus token included."""
    joint: defaultdict[Context, Fraction] = defaultdict(Fraction)
    for draft in product(range(VOCAB_SIZE), repeat=num_draft_tokens):
        chance = Fraction(1)
        for i, token in enumerate(draft):
            chance *= case.draft(context + draft[:i])[token]
        if chance:
            for accepted, weight, following in stops(case, rule, context, draft):
                for token, p in enumerate(following):
                    joint[(*draft[:accepted], token)] += chance * weight * p
    return {tokens: weight for tokens, weight in joint.items() if weight}


def stops(case: Case, rule: ReferenceRule, context: Context, draft: Context) -> Iterator[tuple[int, Fraction, Probs]]:
    """For one draft: (accepted length, its probability, the probabilities of the next token)."""
    if rule is ReferenceRule.TOKEN:
        yield from _token_stops(case, context, draft)
    elif rule is ReferenceRule.BLOCK:
        yield from _block_stops(case, context, draft)
    else:
        yield from _walk_stops(case, context, draft)


def _token_stops(case: Case, context: Context, draft: Context) -> Iterator[tuple[int, Fraction, Probs]]:
    reached = Fraction(1)
    for i, coin in enumerate(token_coins(case, context, draft)):
        here = context + draft[:i]
        if coin < 1:
            yield i, reached * (1 - coin), owed(case.target(here), case.draft(here), Fraction(1))
        reached *= coin
    yield len(draft), reached, case.target(context + draft)


def token_coins(case: Case, context: Context, draft: Context) -> list[Fraction]:
    """The coins of R1: min(1, p / q) for each draft token."""
    return [min(Fraction(1), ratio) for ratio in _likelihood_ratios(case, context, draft)]


def _block_stops(case: Case, context: Context, draft: Context) -> Iterator[tuple[int, Fraction, Probs]]:
    coins, weights = block_coins(case, context, draft)
    remaining = Fraction(1)
    for i in range(len(draft), -1, -1):  # the largest i whose coin succeeds wins; at 0 it always succeeds
        coin = coins[i - 1] if i else Fraction(1)
        here = context + draft[:i]
        following = case.target(here) if i == len(draft) else owed(case.target(here), case.draft(here), weights[i])
        if remaining * coin:
            yield i, remaining * coin, following
        remaining *= 1 - coin


def block_coins(case: Case, context: Context, draft: Context) -> tuple[list[Fraction], list[Fraction]]:
    """The coins h_1 .. h_K and the weights P_0 .. P_K of R3."""
    weights = [Fraction(1)]
    for ratio in _likelihood_ratios(case, context, draft):
        weights.append(min(Fraction(1), weights[-1] * ratio))
    coins = []
    for i in range(1, len(draft)):
        p, q = case.target(context + draft[:i]), case.draft(context + draft[:i])
        excess = sum((max(Fraction(0), weights[i] * a - b) for a, b in zip(p, q, strict=True)), Fraction(0))
        below = excess + 1 - weights[i]
        coins.append(excess / below if below else Fraction(1))
    return [*coins, weights[-1]], weights


def _walk_stops(case: Case, context: Context, draft: Context) -> Iterator[tuple[int, Fraction, Probs]]:
    reached = Fraction(1)
    for i, token in enumerate(draft):
        p = case.target(context + draft[:i])
        if p[token] < 1:
            others = [a if t != token else Fraction(0) for t, a in enumerate(p)]
            yield i, reached * (1 - p[token]), _normalised(others)
        reached *= p[token]
    if reached:
        yield len(draft), reached, case.target(context + draft)


def owed(target_probs: Probs, draft_probs: Probs, weight: Fraction) -> Probs:
    """The residual: max(weight * p - q, 0), normalised; p where that is 0 everywhere."""
    parts = [max(Fraction(0), weight * a - b) for a, b in zip(target_probs, draft_probs, strict=True)]
    return _normalised(parts) if any(parts) else target_probs


def _likelihood_ratios(case: Case, context: Context, draft: Context) -> list[Fraction]:
    rows = [context + draft[:i] for i in range(len(draft))]
    return [case.target(row)[token] / case.draft(row)[token] for row, token in zip(rows, draft, strict=True)]


# -- shared noise ------------------------------------------------------------------------------------------------------


def _coupled_distribution(case: Case, num_draft_tokens: int, length: int) -> Joint:
    """RC over consecutive rounds. The noise of a position is kept after the round that first guessed with it."""
    joint: defaultdict[Context, Fraction] = defaultdict(Fraction)
    noise = dict.fromkeys(range(length), WHOLE)
    todo: list[tuple[Context, Fraction, dict[int, Polygon]]] = [((), Fraction(1), noise)]
    while todo:
        context, weight, noise = todo.pop()
        budget = min(num_draft_tokens, length - len(context))
        for draft, share, guessed in _guesses(case, context, budget, noise):
            for tokens, rest, left in _checks(case, context, draft, length, guessed):
                if len(context) + len(tokens) >= length:
                    joint[context + tokens] += weight * share * rest
                else:
                    todo.append((context + tokens, weight * share * rest, left))
    return dict(joint)


Branch = tuple[Context, Fraction, dict[int, Polygon]]


def _guesses(case: Case, context: Context, budget: int, noise: dict[int, Polygon]) -> list[Branch]:
    branches: list[Branch] = [((), Fraction(1), noise)]
    for _ in range(budget):
        branches = [
            ((*draft, token), weight * share, after)
            for draft, weight, before in branches
            for token, share, after in _race(case.draft(context + draft), len(context) + len(draft), before)
        ]
    return branches


def _checks(case: Case, context: Context, draft: Context, length: int, noise: dict[int, Polygon]) -> Iterator[Branch]:
    """The race of the target at each position, for as long as the draft agrees with its winner."""
    alive: list[Branch] = [((), Fraction(1), noise)]
    while alive:
        tokens, weight, before = alive.pop()
        for token, share, after in _race(case.target(context + tokens), len(context) + len(tokens), before):
            branch = ((*tokens, token), weight * share, after)
            agrees = len(tokens) < len(draft) and draft[len(tokens)] == token
            if agrees and len(context) + len(tokens) + 1 < length:
                alive.append(branch)
            else:
                yield branch


def _race(probs: Probs, position: int, noise: dict[int, Polygon]) -> Iterator[tuple[int, Fraction, dict[int, Polygon]]]:
    known = noise[position]
    whole = area(known)
    for token, p in enumerate(probs):
        if p:
            won = cell(known, probs, token)
            if share := Fraction(area(won)) / whole:
                yield token, share, {**noise, position: won}

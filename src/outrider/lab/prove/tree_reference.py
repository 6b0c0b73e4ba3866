"""The rules of draft trees in exact rational arithmetic, written from the papers, for drafts of one or several members.

R4 is recursive rejection without replacement (Yang et al. 2024, Jeon et al. 2024). R5 is traversal (Weng et al. 2025). Each
member draws a tree of its own, siblings without replacement, and knows nothing of the others. A round merges the trees. A
token that two members drew after the same text stands once in the tree and is tested twice. A guess that follows from the
context alone may stand beside them. A round commits the tokens that stand and one more. The total variation of the joint
distribution from `reference.plain_distribution` must be exactly 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from outrider.lab.prove.reference import VOCAB_SIZE, Case, Context, Joint, Probs, over_rounds, owed

_ONE, _ZERO = Fraction(1), Fraction(0)
#: The tokens that a member drew after each path, in order.
Drawn = Mapping[Context, Context]
#: Each member's widths: children of each node by depth.
Shape = tuple[tuple[int, ...], ...]


class TreeRule(StrEnum):
    RECURSIVE = "recursive"
    TRAVERSAL = "traversal"
    MERGED = "merged"


@dataclass(frozen=True)
class Members:
    """A target and the members that draft for it."""

    case: Case  # the target's probabilities, and those of the first member
    alike: bool = True  # whether all members draw from the same probabilities
    guessed_tokens: int = 0  # the length of a guess that stands beside what the members drew; 0, 1 or 2

    def draft(self, member: int, context: Context) -> Probs:
        """Returns what a member draws from after a context."""
        case = self.case if self.alike or not member else Case(self.case.kind, self.case.seed + 7_919 * member)
        return case.draft(context)

    def guessed(self, context: Context) -> Context:
        """The guess that follows from the context alone."""
        token = (len(context) + sum(context)) % VOCAB_SIZE
        return (token, (token + 1) % VOCAB_SIZE)[: self.guessed_tokens]


def alone(case: Case, rule: TreeRule) -> Members:
    """The only member of a tree; a guess of one token stands beside what it draws where the rule is for merged trees."""
    return Members(case, guessed_tokens=int(rule is TreeRule.MERGED))


@dataclass(frozen=True)
class _Round:
    """Holds what one round verifies: the drawn trees, and the guess beside them."""

    members: Members
    context: Context
    drawn: tuple[Drawn, ...]

    def draws(self, path: Context) -> tuple[tuple[int, int], ...]:
        """(member, token) of each draw after a path, in the order of their tests."""
        return tuple((member, token) for member, tree in enumerate(self.drawn) for token in tree.get(path, ()))

    def target(self, path: Context) -> Probs:
        return self.members.case.target(self.context + path)

    def proposals(self, path: Context) -> tuple[Probs, ...]:
        return tuple(self.members.draft(member, self.context + path) for member in range(len(self.drawn)))

    def walks(self, path: Context) -> bool:
        """Tells whether the guess goes along a path."""
        return self.members.guessed(self.context)[: len(path)] == path


def speculative_distribution(members: Members, rule: TreeRule, shape: Shape, length: int) -> Joint:
    """The joint distribution of the first `length` tokens, over consecutive rounds."""
    return over_rounds(lambda context: round_distribution(members, rule, context, shape), length)


def round_distribution(members: Members, rule: TreeRule, context: Context, shape: Shape) -> Joint:
    """Joint distribution of the tokens that one round commits after `context`."""
    verify: Callable[[_Round, Context], Iterator[tuple[Context, Fraction]]]
    verify = _traversal if rule is TreeRule.TRAVERSAL else _recursive
    joint: defaultdict[Context, Fraction] = defaultdict(Fraction)
    for drawn, chance in _drafts(members, context, shape):
        for tokens, weight in verify(_Round(members, context, drawn), ()):
            joint[tokens] += chance * weight
    return {tokens: weight for tokens, weight in joint.items() if weight}


def _drafts(
    members: Members, context: Context, shape: Shape, first: int = 0
) -> Iterator[tuple[tuple[Drawn, ...], Fraction]]:
    if first == len(shape):
        yield (), _ONE
        return
    for others, rest in _drafts(members, context, shape, first + 1):
        for tree, chance in _trees(members, first, context, (), shape[first]):
            yield (tree, *others), chance * rest


def _trees(
    members: Members, member: int, context: Context, path: Context, widths: tuple[int, ...]
) -> Iterator[tuple[Drawn, Fraction]]:
    """Every tree of a member below `path`, with its probability."""
    if not widths:
        yield {}, _ONE
        return
    for tokens, chance in orders(members.draft(member, context + path), widths[0]):
        below: list[tuple[Drawn, Fraction]] = [({path: tokens}, chance)]
        for token in tokens:
            trees = list(_trees(members, member, context, (*path, token), widths[1:]))
            below = [({**one, **tree}, so_far * own) for one, so_far in below for tree, own in trees]
        yield from below


def orders(probs: Probs, count: int) -> Iterator[tuple[Context, Fraction]]:
    """All draws of `count` tokens without replacement, in order. A draw is shorter where no more tokens are possible."""
    if count == 0 or not any(probs):
        yield (), _ONE
        return
    for token, p in enumerate(probs):
        if p:
            for rest, chance in orders(without(probs, token), count - 1):
                yield (token, *rest), p * chance


def without(probs: Probs, token: int) -> Probs:
    left = tuple(_ZERO if t == token else p for t, p in enumerate(probs))
    total = sum(left, _ZERO)
    return tuple(p / total for p in left) if total else left


# -- R4 ----------------------------------------------------------------------------------------------------------------


def _recursive(drafted: _Round, path: Context) -> Iterator[tuple[Context, Fraction]]:
    """(tokens committed behind the context, their probability): the draws in turn, then the walk along the guess."""
    p, proposals = drafted.target(path), list(drafted.proposals(path))
    reached = _ONE
    for member, token in drafted.draws(path):
        q = proposals[member]
        coin = min(_ONE, p[token] / q[token])
        if coin:
            for tokens, weight in _recursive(drafted, (*path, token)):
                yield tokens, reached * coin * weight
        reached *= 1 - coin
        if not reached:
            return
        p, proposals[member] = owed(p, q, _ONE), without(q, token)
    for token, weight in enumerate(p):
        if weight and drafted.walks((*path, token)):
            for tokens, rest in _recursive(drafted, (*path, token)):
                yield tokens, reached * weight * rest
        elif weight:
            yield (*path, token), reached * weight


# -- R5 ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Level:
    """A node on the way from the root to the current leaf, with what is left of it after refusals."""

    path: Context
    weight: Fraction
    p: Probs
    proposals: tuple[Probs, ...]
    left: tuple[tuple[int, int], ...]


def _traversal(drafted: _Round, root: Context) -> Iterator[tuple[Context, Fraction]]:
    yield from _from_leaf(drafted, _descend(drafted, (_enter(drafted, root, _ONE),)), _ONE)


def _enter(drafted: _Round, path: Context, weight: Fraction) -> _Level:
    left = drafted.draws(path) if weight else ()  # below a token of which nothing is left every coin falls against it
    return _Level(path, weight, drafted.target(path), drafted.proposals(path), left)


def _descend(drafted: _Round, spine: tuple[_Level, ...]) -> tuple[_Level, ...]:
    while spine[-1].left:
        level, (member, token) = spine[-1], spine[-1].left[0]
        weight = min(_ONE, level.weight * level.p[token] / level.proposals[member][token])
        spine = (*spine, _enter(drafted, (*level.path, token), weight))
    return spine


def _from_leaf(drafted: _Round, spine: tuple[_Level, ...], reached: Fraction) -> Iterator[tuple[Context, Fraction]]:
    leaf = spine[-1]
    coin = leaf.weight if len(spine) > 1 else _ONE
    for token, p in enumerate(leaf.p):
        path, weight = (*leaf.path, token), reached * coin * p
        if weight and drafted.walks(path):
            for tokens, rest in _traversal(drafted, path):
                yield tokens, weight * rest
        elif weight:
            yield path, weight
    if coin < 1 and reached:
        above = _refuse(spine[-2])
        yield from _from_leaf(drafted, _descend(drafted, (*spine[:-2], above)), reached * (1 - coin))


def _refuse(level: _Level) -> _Level:
    """Returns what is left of a node after its first remaining draw was refused."""
    member, token = level.left[0]
    q = level.proposals[member]
    excess = sum((max(_ZERO, level.weight * a - b) for a, b in zip(level.p, q, strict=True)), _ZERO)
    below = excess + 1 - level.weight
    proposals = (*level.proposals[:member], without(q, token), *level.proposals[member + 1 :])
    weight = excess / below if below else _ONE
    return replace(level, weight=weight, p=owed(level.p, q, level.weight), proposals=proposals, left=level.left[1:])

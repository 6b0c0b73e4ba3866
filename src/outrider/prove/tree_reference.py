"""The tree rules in exact rational arithmetic, written from the papers: R4, R5, and R4 with drawn and walked children.

R4 is recursive rejection without replacement (Yang et al. 2024, Jeon et al. 2024). R5 is traversal (Weng et al. 2025). A
round draws a tree of fixed widths with siblings without replacement. It verifies the tree, and commits the tokens that
stand and one more. The total variation of the joint distribution from `reference.plain_distribution` must be exactly 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import cache

from outrider.prove.reference import VOCAB_SIZE, Case, Context, Joint, Probs, owed

_ONE, _ZERO = Fraction(1), Fraction(0)


class TreeRule(StrEnum):
    RECURSIVE = "recursive"
    TRAVERSAL = "traversal"
    MERGED = "merged"


@dataclass(frozen=True)
class Node:
    """A node of a draft tree. `drawn` is false for a guess that follows from the context alone."""

    path: Context
    children: tuple[Node, ...] = ()
    drawn: bool = True


def speculative_distribution(case: Case, rule: TreeRule, widths: tuple[int, ...], length: int) -> Joint:
    """The joint distribution of the first `length` tokens, over consecutive rounds."""

    @cache
    def continued(context: Context) -> Mapping[Context, Fraction]:
        if len(context) >= length:
            return {context[:length]: _ONE}
        joint: defaultdict[Context, Fraction] = defaultdict(Fraction)
        for tokens, weight in round_distribution(case, rule, context, widths).items():
            for outcome, share in continued(context + tokens).items():
                joint[outcome] += weight * share
        return joint

    return dict(continued(()))


def round_distribution(case: Case, rule: TreeRule, context: Context, widths: tuple[int, ...]) -> Joint:
    """Joint distribution of the tokens that one round commits after `context`."""
    verify = _traversal if rule is TreeRule.TRAVERSAL else _recursive
    joint: defaultdict[Context, Fraction] = defaultdict(Fraction)
    for tree, chance in _trees(case, context, (), widths):
        root = replace(tree, children=(*tree.children, _guess(context))) if rule is TreeRule.MERGED else tree
        for tokens, weight in verify(case, context, root):
            joint[tokens] += chance * weight
    return {tokens: weight for tokens, weight in joint.items() if weight}


def _guess(context: Context) -> Node:
    return Node(((len(context) + sum(context)) % VOCAB_SIZE,), drawn=False)


def _trees(case: Case, context: Context, path: Context, widths: tuple[int, ...]) -> Iterator[tuple[Node, Fraction]]:
    """Every tree below `path`, with its probability."""
    if not widths:
        yield Node(path), _ONE
        return
    for tokens, chance in orders(case.draft(context + path), widths[0]):
        for children, rest in _families(case, context, path, tokens, widths[1:]):
            yield Node(path, children), chance * rest


def _families(
    case: Case, context: Context, path: Context, tokens: Context, widths: tuple[int, ...]
) -> Iterator[tuple[tuple[Node, ...], Fraction]]:
    if not tokens:
        yield (), _ONE
        return
    for first, chance in _trees(case, context, (*path, tokens[0]), widths):
        for others, rest in _families(case, context, path, tokens[1:], widths):
            yield (first, *others), chance * rest


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


def _recursive(case: Case, context: Context, node: Node) -> Iterator[tuple[Context, Fraction]]:
    """(tokens committed below the root, their probability): the drawn children first, then the walk over the others."""
    p, q = case.target(context + node.path), case.draft(context + node.path)
    reached = _ONE
    for child in (c for c in node.children if c.drawn):
        token = child.path[-1]
        coin = min(_ONE, p[token] / q[token])
        for tokens, weight in _recursive(case, context, child):
            yield tokens, reached * coin * weight
        reached *= 1 - coin
        if not reached:
            return
        p, q = owed(p, q, _ONE), without(q, token)
    walked = {child.path[-1]: child for child in node.children if not child.drawn}
    for token, weight in enumerate(p):
        if weight and token in walked:
            for tokens, rest in _recursive(case, context, walked[token]):
                yield tokens, reached * weight * rest
        elif weight:
            yield (*node.path, token), reached * weight


# -- R5 ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Level:
    """A node on the way from the root to the current leaf, with what is left of it after refusals."""

    node: Node
    weight: Fraction
    p: Probs
    q: Probs
    left: tuple[Node, ...]


def _traversal(case: Case, context: Context, root: Node) -> Iterator[tuple[Context, Fraction]]:
    yield from _from_leaf(case, context, _descend(case, context, (_enter(case, context, root, _ONE),)), _ONE)


def _enter(case: Case, context: Context, node: Node, weight: Fraction) -> _Level:
    here = context + node.path
    return _Level(node, weight, case.target(here), case.draft(here), node.children)


def _descend(case: Case, context: Context, spine: tuple[_Level, ...]) -> tuple[_Level, ...]:
    while spine[-1].left:
        level, child = spine[-1], spine[-1].left[0]
        token = child.path[-1]
        spine = (*spine, _enter(case, context, child, min(_ONE, level.weight * level.p[token] / level.q[token])))
    return spine


def _from_leaf(
    case: Case, context: Context, spine: tuple[_Level, ...], reached: Fraction
) -> Iterator[tuple[Context, Fraction]]:
    leaf = spine[-1]
    coin = leaf.weight if len(spine) > 1 else _ONE
    for token, p in enumerate(leaf.p):
        if reached * coin * p:
            yield (*leaf.node.path, token), reached * coin * p
    if coin < 1 and reached:
        above = _refuse(spine[-2], leaf.node.path[-1])
        yield from _from_leaf(case, context, _descend(case, context, (*spine[:-2], above)), reached * (1 - coin))


def _refuse(level: _Level, token: int) -> _Level:
    """What is left of a node after its first remaining child was refused."""
    excess = sum((max(_ZERO, level.weight * a - b) for a, b in zip(level.p, level.q, strict=True)), _ZERO)
    below = excess + 1 - level.weight
    return replace(
        level,
        weight=excess / below if below else _ONE,
        p=owed(level.p, level.q, level.weight),
        q=without(level.q, token),
        left=level.left[1:],
    )

"""Proves the rules for drafts of several members: the rational reference, and the production Verifier against the target.

tree_distribution.py does the same for the trees of one member.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from outrider.draft import EMPTY, Draft, Law
from outrider.propose.base import DraftNoise
from outrider.prove import forking, reference, tree_reference
from outrider.prove.findings import Finding
from outrider.prove.recorded_rounds import WrittenText
from outrider.prove.reference import Probs
from outrider.prove.rules_distribution import tensor
from outrider.prove.tree_distribution import RULE_NAMES, draw_tree
from outrider.prove.tree_reference import Members, Shape, TreeRule
from outrider.verify.noise import NoiseSource
from outrider.verify.verifier import Verifier

_MANY = 1_000


def prove_merged_reference(
    rule: TreeRule, shape: Shape, count: int, length: int, *, alike: bool = False, guessed_tokens: int = 0
) -> Finding:
    """The rational reference of the rules for several members has a total variation of exactly 0."""
    worst = Fraction(0)
    for case in reference.cases(count, seed=8):
        found = tree_reference.speculative_distribution(Members(case, alike, guessed_tokens), rule, shape, length)
        worst = max(worst, reference.distance(found, reference.plain_distribution(case, length)))
    detail = f"{count} cases, members of widths {shape}, joint of {length} tokens, in fractions"
    return Finding(float(worst), 0.0, detail, worst == 0)


def prove_merged_verifier(
    rule: TreeRule, shape: Shape, count: int, length: int, *, alike: bool = False, guessed_tokens: int = 0
) -> Finding:
    """Total variation between what rounds of `Verifier.verify` on merged trees write and the target's distribution."""
    worst, paths = 0.0, 0
    for case in reference.cases(count, seed=9):
        found = merged_verifier_distribution(Members(case, alike, guessed_tokens), rule, shape, length)
        exact = {c: float(w) for c, w in reference.plain_distribution(case, length).items()}
        worst = max(worst, forking.total_variation(found.probs, exact) + found.dropped)
        paths += found.num_paths
    return Finding(worst, 1e-12, f"{count} cases, members of widths {shape}, joint of {length} tokens, {paths} paths")


def merged_verifier_distribution(members: Members, rule: TreeRule, shape: Shape, length: int) -> forking.Distribution:
    """The joint distribution of the first `length` tokens."""
    noise = forking.ForkingNoise()
    return forking.explore(lambda width: _decode(members, rule, noise, shape, length, width), noise, width=_MANY)


def _decode(
    members: Members, rule: TreeRule, noise: NoiseSource, shape: Shape, length: int, width: int
) -> list[forking.Outcome]:
    texts = [WrittenText.begin(i, RULE_NAMES[rule]) for i in range(width)]
    verifier = Verifier(noise)
    while running := [text for text in texts if len(text.output) < length]:
        candidates, rows = [], list[Probs]()
        for text in running:
            draft = _draw(members, text, noise, shape, length - len(text.output) - 1)
            first = len(rows)
            rows += [members.case.target(text.output + path) for path in ((), *draft.paths)]
            candidates.append(text.candidate(draft, (first, len(rows))))
        verdicts = verifier.verify(candidates, tensor(rows).log())
        for text, candidate, verdict in zip(running, candidates, verdicts, strict=True):
            text.commit(candidate.draft, verdict)
    return [text.output[:length] for text in texts]


def _draw(members: Members, text: WrittenText, noise: NoiseSource, shape: Shape, depth: int) -> Draft:
    """The trees of all members, joined, with the guess beside them."""
    draft = EMPTY
    for member, widths in enumerate(shape):
        source = DraftNoise(noise).member(member)
        tree = draw_tree(partial(members.draft, member), text, source, widths[:depth])
        draft, _ = draft.joined(tree, -1)
    guess = members.guessed(text.output)[:depth]
    return draft.joined(Draft.chain(guess, Law.DETERMINISTIC), -1)[0]

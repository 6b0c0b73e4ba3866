"""Proves the production Verifier on trees, over consecutive rounds, on synthetic probabilities.

rules_distribution.py does the same for chains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.draft import EMPTY, Draft, Law
from outrider.propose.base import DraftNoise
from outrider.prove import forking, reference
from outrider.prove.findings import Finding
from outrider.prove.recorded_rounds import WrittenText
from outrider.prove.reference import VOCAB_SIZE, Case, Context, Probs
from outrider.prove.rules_distribution import tensor
from outrider.prove.tree_reference import TreeRule
from outrider.verify.noise import NoiseSource
from outrider.verify.verifier import RuleName, Verifier

#: The rule that a request asks for so that the Verifier applies the tree rule.
RULE_NAMES: dict[TreeRule, RuleName] = {TreeRule.RECURSIVE: "token", TreeRule.TRAVERSAL: "block", TreeRule.MERGED: "auto"}
_MANY = 1_000


def prove_tree_verifier(rule: TreeRule, widths: tuple[int, ...], count: int, length: int) -> Finding:
    """Total variation between what rounds of `Verifier.verify` on trees write and the exact distribution of the target."""
    worst, paths = 0.0, 0
    for case in reference.cases(count, seed=5):
        found = tree_verifier_distribution(case, rule, widths, length)
        exact = {c: float(w) for c, w in reference.plain_distribution(case, length).items()}
        worst = max(worst, forking.total_variation(found.probs, exact) + found.dropped)
        paths += found.num_paths
    return Finding(worst, 1e-12, f"{count} cases, trees of {widths}, joint of {length} tokens, {paths} paths")


def tree_verifier_distribution(case: Case, rule: TreeRule, widths: tuple[int, ...], length: int) -> forking.Distribution:
    """The joint distribution of the first `length` tokens."""
    noise = forking.ForkingNoise()
    return forking.explore(lambda width: _decode(case, rule, noise, widths, length, width), noise, width=_MANY)


def _decode(
    case: Case, rule: TreeRule, noise: NoiseSource, widths: tuple[int, ...], length: int, width: int
) -> list[forking.Outcome]:
    texts = [WrittenText.begin(i, RULE_NAMES[rule]) for i in range(width)]
    verifier = Verifier(noise)
    while running := [text for text in texts if len(text.output) < length]:
        candidates, rows = [], list[Probs]()
        for text in running:
            context = text.output
            draft = draw_tree(case.draft, text, DraftNoise(noise), widths[: length - len(context) - 1])
            if rule is TreeRule.MERGED:
                draft = _with_guess(draft, context)
            first = len(rows)
            rows += [case.target(context + path) for path in ((), *draft.paths)]
            candidates.append(text.candidate(draft, (first, len(rows))))
        verdicts = verifier.verify(candidates, tensor(rows).log())
        for text, candidate, verdict in zip(running, candidates, verdicts, strict=True):
            text.commit(candidate.draft, verdict)
    return [text.output[:length] for text in texts]


def draw_tree(law: Callable[[Context], Probs], text: WrittenText, source: DraftNoise, widths: tuple[int, ...]) -> Draft:
    """A tree of `widths`, drawn from `law` of each context. Siblings are drawn one after another, without replacement."""
    context, request = text.output, text.request
    tokens: list[int] = []
    parents: list[int] = []
    rows: list[Probs] = []
    level: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
    for width in widths:
        below = []
        for node, path in level:
            probs = law(context + path)
            for _ in range(min(width, sum(p > 0 for p in probs))):
                (token,) = source.categorical(tensor([probs]), [request], [path])
                below.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(node)
                rows.append(probs)
        level = below
    if not tokens:
        return EMPTY
    return Draft(tuple(tokens), tuple(parents), (source.law(request),) * len(tokens), tensor(rows))


def _with_guess(draft: Draft, context: tuple[int, ...]) -> Draft:
    """The draft with a deterministic child of the root beside the drawn ones."""
    if draft.draft_probs is None:
        return draft
    return Draft(
        (*draft.token_ids, (len(context) + sum(context)) % VOCAB_SIZE),
        (*draft.parents, -1),
        (*draft.laws, Law.DETERMINISTIC),
        torch.cat([draft.draft_probs, draft.draft_probs.new_zeros(1, VOCAB_SIZE)]),
    )

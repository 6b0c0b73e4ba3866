"""Proves the production rules and the Verifier against the references, on synthetic probabilities."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import product

import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.state import KVView
from outrider.draft import EMPTY, Draft, Law
from outrider.lab.prove import forking, reference, tree_reference
from outrider.lab.prove.reference import VOCAB_SIZE, Case, Context, Joint, Probs, ReferenceRule
from outrider.lab.prove.running import Finding
from outrider.lab.prove.tree_reference import TreeRule, alone
from outrider.params import SamplingParams
from outrider.propose.base import DraftNoise, ProposeRequest, ProposerSequence, Tokens
from outrider.verify import rules
from outrider.verify.noise import Key, NoiseSource
from outrider.verify.processing import Processing
from outrider.verify.verifier import CandidateKeys, DraftCandidate, RuleName, Verdict, Verifier, rule_for

_MANY = 1_000


def prove_reference(rule: ReferenceRule, count: int, num_draft_tokens: int, length: int) -> Finding:
    """The rational reference itself has a total variation of exactly 0."""

    def written(case: Case) -> Joint:
        return reference.speculative_distribution(case, rule, num_draft_tokens, length)

    return reference_is_exact(reference.cases(count), written, length, f"{num_draft_tokens} draft tokens")


def prove_tree_reference(rule: TreeRule, widths: tuple[int, ...], count: int, length: int) -> Finding:
    """The rational reference of the rules on trees has a total variation of exactly 0."""

    def written(case: Case) -> Joint:
        return tree_reference.speculative_distribution(alone(case, rule), rule, (widths,), length)

    return reference_is_exact(reference.cases(count, seed=4), written, length, f"trees of {widths}")


def reference_is_exact(cases: Seq[Case], written: Callable[[Case], Joint], length: int, said: str) -> Finding:
    """Total variation, in fractions, between what a reference writes in the worst case and what the target alone does."""
    worst = max(reference.distance(written(case), reference.plain_distribution(case, length)) for case in cases)
    detail = f"{len(cases)} cases, {said}, joint of {length} tokens, in fractions"
    return Finding(float(worst), 0.0, detail, worst == 0)


def prove_functions(count: int, num_draft_tokens: int = 3) -> Finding:
    """`verify.rules` gives the coins, weights and residuals of the reference, for every draft."""
    worst = 0.0
    for case in reference.cases(count, seed=1):
        worst = max(worst, _functions_differ(case, num_draft_tokens))
    return Finding(worst, 1e-13, f"{count} cases, every draft of {num_draft_tokens}: coins, weights, residuals")


def _functions_differ(case: Case, k: int) -> float:
    drafts = [d for d in product(range(VOCAB_SIZE), repeat=k) if all(case.draft(d[:i])[d[i]] for i in range(k))]
    p = tensor([[case.target(d[:i]) for i in range(k + 1)] for d in drafts])
    q = tensor([[case.draft(d[:i]) for i in range(k)] for d in drafts])
    x = torch.tensor(drafts)
    blocks = [reference.block_coins(case, (), d) for d in drafts]
    chances, weights = rules.block_acceptance(p, q, x)
    pairs = [
        (rules.token_acceptance(p, q, x), tensor([reference.token_coins(case, (), d) for d in drafts])),
        (chances, tensor([coins for coins, _ in blocks])),
        (weights, tensor([weight for _, weight in blocks])),
    ]
    for i in range(k):
        for scale, exact in ((weights[:, i], [w[i] for _, w in blocks]), (weights[:, 0], [Fraction(1)] * len(drafts))):
            exact_residual = tensor(
                [reference.owed(case.target(d[:i]), case.draft(d[:i]), e) for d, e in zip(drafts, exact, strict=True)]
            )
            here = (p[:, i], q[:, i], scale)
            pairs.append((_owing(rules.residual(*here), *here), _owing(exact_residual, *here)))
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def _owing(probs: Tensor, p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """Rows with next to no residual become 0. Rounding decides their shape, and they are reached as rarely."""
    owed = (scale[:, None] * p - q).clamp(min=0).sum(-1, keepdim=True)
    return probs * (owed > 1e-9)


# -- decisions on a grid -----------------------------------------------------------------------------------------------


class GridNoise(forking.ForkingNoise):
    """Coins with given uniform numbers: each succeeds if its number is below its probability. Draws take the best token."""

    def __init__(self, grid: Seq[float]) -> None:
        super().__init__()
        self.grid = grid

    def bernoulli(self, probability: Tensor, keys: Seq[Key]) -> Tensor:
        return torch.tensor(self.grid, dtype=probability.dtype) < probability

    def categorical(self, probs: Tensor, keys: Seq[Key]) -> Tensor:
        return probs.argmax(-1)


def prove_decisions(rule: ReferenceRule, count: int, steps: int = 7, k: int = 2) -> Finding:
    """With uniform numbers from a grid, the Verifier always accepts as many tokens as the reference."""
    points = [Fraction(2 * i + 1, 2 * steps) + Fraction(1, 10_007) for i in range(steps)]  # away from likely ties
    points[0] = Fraction(0)  # a coin at exactly 0 must not accept what the target forbids
    wrong = total = 0
    for case in reference.cases(count, seed=2):
        for draft in product(range(VOCAB_SIZE), repeat=k):
            if all(case.draft(draft[:i])[draft[i]] for i in range(k)):
                for coins in product(points, repeat=k):
                    wrong += _accepted(case, rule, draft, coins) != _expected(case, rule, draft, coins)
                    total += 1
    return Finding(float(wrong), 0.0, f"{total} decisions with injected coins over {count} cases")


def _accepted(case: Case, rule: ReferenceRule, draft: Context, coins: Seq[Fraction]) -> int:
    text = WrittenText.begin(0, rule.value)
    guess = Draft.chain(draft, Law.SAMPLED, tensor([case.draft(draft[:i]) for i in range(len(draft))]))
    logits = tensor([case.target(draft[:i]) for i in range(len(draft) + 1)]).log()
    verifier = Verifier(GridNoise([float(c) for c in coins]))
    return len(verifier.verify([text.candidate(guess, (0, len(draft) + 1))], logits)[0].path)


def _expected(case: Case, rule: ReferenceRule, draft: Context, coins: Seq[Fraction]) -> int:
    if rule is ReferenceRule.TOKEN:
        falls = [u < c for u, c in zip(coins, reference.token_coins(case, (), draft), strict=True)]
        return next((i for i, fell in enumerate(falls) if not fell), len(falls))
    chances, _ = reference.block_coins(case, (), draft)
    return max((i + 1 for i, (u, c) in enumerate(zip(coins, chances, strict=True)) if u < c), default=0)


# -- the forked Verifier -----------------------------------------------------------------------------------------------


#: The rule that a request asks for so that the Verifier applies the tree rule.
RULE_NAMES: dict[TreeRule, RuleName] = {TreeRule.RECURSIVE: "token", TreeRule.TRAVERSAL: "block", TreeRule.MERGED: "auto"}
#: Drafts for a text up to a depth: case, text, noise, depth.
Draw = Callable[[Case, "WrittenText", DraftNoise, int], Draft]


def prove_verifier(rule: ReferenceRule, count: int, num_draft_tokens: int, length: int) -> Finding:
    """Total variation between what rounds of the production Verifier write and the exact distribution of the target."""

    def chain(case: Case, text: WrittenText, source: DraftNoise, depth: int) -> Draft:
        return draw_tree(case.draft, text, source, (1,) * min(num_draft_tokens, depth))

    cases, said = reference.cases(count, seed=3), f"{num_draft_tokens} draft tokens"
    return verifier_is_exact(cases, rule.value, chain, length, said)


def prove_tree_verifier(rule: TreeRule, widths: tuple[int, ...], count: int, length: int) -> Finding:
    """Total variation between what rounds of `Verifier.verify` on trees write and the exact distribution of the target."""

    def tree(case: Case, text: WrittenText, source: DraftNoise, depth: int) -> Draft:
        draft = draw_tree(case.draft, text, source, widths[:depth])
        return _with_guess(draft, text.output) if rule is TreeRule.MERGED else draft

    return verifier_is_exact(reference.cases(count, seed=5), RULE_NAMES[rule], tree, length, f"trees of {widths}")


def verifier_is_exact(cases: Seq[Case], rule: RuleName, draw: Draw, length: int, said: str) -> Finding:
    """Total variation, in the worst case, between what rounds of drafts and the Verifier write and the target's own law."""
    worst, paths = 0.0, 0
    for case in cases:
        noise = forking.ForkingNoise()
        found = forking.explore(partial(_written, case, rule, noise, draw, length), noise, width=_MANY)
        exact = {c: float(w) for c, w in reference.plain_distribution(case, length).items()}
        worst = max(worst, forking.total_variation(found.probs, exact) + found.dropped)
        paths += found.num_paths
    return Finding(worst, 1e-12, f"{len(cases)} cases, {said}, joint of {length} tokens, {paths} paths")


def _written(case: Case, rule: RuleName, noise: NoiseSource, draw: Draw, length: int, width: int) -> list[forking.Outcome]:
    """The first `length` tokens of texts that are written side by side, in rounds of a draft and its verification."""
    texts = [WrittenText.begin(i, rule) for i in range(width)]
    verifier = Verifier(noise)
    while running := [text for text in texts if len(text.output) < length]:
        candidates, rows = [], list[Probs]()
        for text in running:
            context = text.output
            draft = draw(case, text, DraftNoise(noise), length - len(context) - 1)
            first = len(rows)
            rows += [case.target(context + path) for path in ((), *draft.paths)]
            candidates.append(text.candidate(draft, (first, len(rows))))
        verdicts = verifier.verify(candidates, tensor(rows).log())
        for text, candidate, verdict in zip(running, candidates, verdicts, strict=True):
            text.commit(candidate.draft, verdict)
    return [text.output[:length] for text in texts]


def tensor(values: object) -> Tensor:
    """Nested fractions in float64."""
    return torch.tensor(_floats(values), dtype=torch.float64)


def _floats(values: object) -> object:
    return [_floats(v) for v in values] if isinstance(values, list | tuple) else float(values)  # type: ignore[arg-type]


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


# --- A text that is drafted and verified without an engine, for proofs of the Verifier.


_PROMPT = (0,)


@dataclass
class WrittenText:
    """A prompt of one token, and the text behind it."""

    view: ProposerSequence  # the sequence as proposers see it
    tokens: list[int]  # all tokens, the prompt's included
    rule: RuleName  # the rule that verifies its drafts

    @staticmethod
    def begin(seq_id: int, rule: RuleName) -> WrittenText:
        """A text without output."""
        tokens, params = list(_PROMPT), SamplingParams(max_tokens=64)
        shown = Tokens(tokens)
        kv = KVView(StateMemory(BlockManager(1, 1)).state())  # nothing is ever kept in it
        view = ProposerSequence(seq_id, shown, len(_PROMPT), params, Processing(params, shown, 1), 0, 0, kv)
        return WrittenText(view, tokens, rule)

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens behind the prompt."""
        return tuple(self.tokens[len(_PROMPT) :])

    @property
    def request(self) -> ProposeRequest:
        """The request for a draft."""
        return ProposeRequest(self.view, 64, coupled=self.rule == "coupled")

    def candidate(self, draft: Draft, rows: tuple[int, int]) -> DraftCandidate:
        """A draft for this text as the Verifier takes it; `rows` are the first row and the row after the last."""
        view = self.view
        keys = CandidateKeys(view.seq_id, view.seed, view.sample, view.round, len(self.tokens))
        rule = rule_for(draft, self.rule, coupled=self.rule == "coupled")
        return DraftCandidate(draft, rows, view.sampling, keys, rule)

    def commit(self, draft: Draft, verdict: Verdict) -> None:
        """Append the draft tokens that stand, and the token behind them."""
        self.tokens += [*(draft.token_ids[node] for node in verdict.path), verdict.token_id]
        self.view.round += 1

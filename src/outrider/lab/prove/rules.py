"""Proves the production rules and the Verifier against the references, on synthetic probabilities."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.state import KVView
from outrider.draft import EMPTY, Draft, Law
from outrider.lab.prove import forking, reference, tree_reference
from outrider.lab.prove.reference import VOCAB_SIZE, Case, Context, Probs, ReferenceRule
from outrider.lab.prove.running import Finding
from outrider.lab.prove.tree_reference import TreeRule, alone
from outrider.params import SamplingParams
from outrider.propose.base import DraftNoise, ProposeRequest, ProposerSequence, Tokens
from outrider.verify import rules
from outrider.verify.noise import Key, NoiseSource
from outrider.verify.processing import Processing
from outrider.verify.verifier import CandidateKeys, DraftCandidate, RuleName, Verdict, Verifier, rule_for

# --- Compares the production rules and the production Verifier with the rational reference, on synthetic probabilities.


_MANY = 1_000


def prove_reference(rule: ReferenceRule, count: int, num_draft_tokens: int, length: int) -> Finding:
    """The rational reference itself has a total variation of exactly 0."""
    worst = Fraction(0)
    for case in reference.cases(count):
        found = reference.speculative_distribution(case, rule, num_draft_tokens, length)
        worst = max(worst, reference.distance(found, reference.plain_distribution(case, length)))
    detail = f"{count} cases, {num_draft_tokens} draft tokens, joint of {length} tokens, in fractions"
    return Finding(float(worst), 0.0, detail, worst == 0)


def prove_tree_reference(rule: TreeRule, widths: tuple[int, ...], count: int, length: int) -> Finding:
    """The rational reference of the rules on trees has a total variation of exactly 0."""
    worst = Fraction(0)
    for case in reference.cases(count, seed=4):
        found = tree_reference.speculative_distribution(alone(case, rule), rule, (widths,), length)
        worst = max(worst, reference.distance(found, reference.plain_distribution(case, length)))
    detail = f"{count} cases, trees of {widths}, joint of {length} tokens, in fractions"
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


class GridNoise:
    """Coins with given uniform numbers: each succeeds if its number is below its probability. Draws take the best token."""

    def __init__(self, grid: Seq[float]) -> None:
        self.grid = grid

    def bernoulli(self, probability: Tensor, keys: Seq[Key]) -> Tensor:
        return torch.tensor(self.grid, dtype=probability.dtype) < probability

    def categorical(self, probs: Tensor, keys: Seq[Key]) -> Tensor:
        return probs.argmax(-1)

    def forget(self, owner: int) -> None:
        pass

    def mark(self) -> None:
        pass

    def rewind(self) -> None:
        pass


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


def prove_verifier(rule: ReferenceRule, count: int, num_draft_tokens: int, length: int) -> Finding:
    """Total variation between what rounds of the production Verifier write and the exact distribution of the target."""
    worst, paths = 0.0, 0
    for case in reference.cases(count, seed=3):
        found = verifier_distribution(case, rule, num_draft_tokens, length)
        exact = {c: float(w) for c, w in reference.plain_distribution(case, length).items()}
        worst = max(worst, forking.total_variation(found.probs, exact) + found.dropped)
        paths += found.num_paths
    detail = f"{count} cases, {num_draft_tokens} draft tokens, joint of {length} tokens, {paths} paths"
    return Finding(worst, 1e-12, detail)


def verifier_distribution(case: Case, rule: ReferenceRule, num_draft_tokens: int, length: int) -> forking.Distribution:
    """The joint distribution of the first `length` tokens that rounds of drafting and `Verifier.verify` write."""
    noise = forking.ForkingNoise()
    return forking.explore(
        lambda width: _decode_chains(case, rule, noise, num_draft_tokens, length, width), noise, width=_MANY
    )


def _decode_chains(
    case: Case, rule: ReferenceRule, noise: NoiseSource, k: int, length: int, width: int
) -> list[forking.Outcome]:
    texts = [WrittenText.begin(i, rule.value) for i in range(width)]
    verifier = Verifier(noise)
    while running := [text for text in texts if len(text.output) < length]:
        drafts = _draft(case, running, noise, k, length)
        rows: list[reference.Probs] = []
        candidates = []
        for text, draft in zip(running, drafts, strict=True):
            first = len(rows)
            rows += [case.target(text.output + draft.token_ids[:i]) for i in range(len(draft) + 1)]
            candidates.append(text.candidate(draft, (first, len(rows))))
        verdicts = verifier.verify(candidates, tensor(rows).log())
        for text, draft, verdict in zip(running, drafts, verdicts, strict=True):
            text.commit(draft, verdict)
    return [text.output[:length] for text in texts]


def _draft(case: Case, texts: list[WrittenText], noise: NoiseSource, k: int, length: int) -> list[Draft]:
    """Drafts of up to `k` tokens. They leave room in each text for the token that the target adds."""
    source, requests = DraftNoise(noise), [text.request for text in texts]
    budgets = [min(k, length - len(text.output) - 1) for text in texts]
    tokens: list[list[int]] = [[] for _ in texts]
    probs: list[list[reference.Probs]] = [[] for _ in texts]
    for offset in range(k):
        members = [i for i, budget in enumerate(budgets) if offset < budget]
        if not members:
            break
        rows = [case.draft((*texts[i].output, *tokens[i])) for i in members]
        drawn = source.categorical(tensor(rows), [requests[i] for i in members], [tuple(tokens[i]) for i in members])
        for i, row, token in zip(members, rows, drawn, strict=True):
            tokens[i].append(token)
            probs[i].append(row)
    return [
        Draft.chain(t, source.law(request), tensor(q)) if t else EMPTY
        for request, t, q in zip(requests, tokens, probs, strict=True)
    ]


def tensor(values: object) -> Tensor:
    """Nested fractions in float64."""
    return torch.tensor(_floats(values), dtype=torch.float64)


def _floats(values: object) -> object:
    return [_floats(v) for v in values] if isinstance(values, list | tuple) else float(values)  # type: ignore[arg-type]


# --- Proves the production Verifier on trees, over consecutive rounds, on synthetic probabilities.


#: The rule that a request asks for so that the Verifier applies the tree rule.
RULE_NAMES: dict[TreeRule, RuleName] = {TreeRule.RECURSIVE: "token", TreeRule.TRAVERSAL: "block", TreeRule.MERGED: "auto"}


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
    return forking.explore(lambda width: _decode_trees(case, rule, noise, widths, length, width), noise, width=_MANY)


def _decode_trees(
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

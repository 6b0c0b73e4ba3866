"""Proves the laws of merged drafts and of stages, by enumeration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.state import KVView
from outrider.draft import EMPTY, Draft, Law
from outrider.lab.prove import reference, tree_reference
from outrider.lab.prove.forking import ForkingNoise, Outcome, explore, total_variation
from outrider.lab.prove.reference import Case, Joint
from outrider.lab.prove.rules import RULE_NAMES, WrittenText, draw_tree, reference_is_exact, verifier_is_exact
from outrider.lab.prove.running import Finding
from outrider.lab.prove.target_settings import SHARED_TARGET_LAYERS
from outrider.lab.prove.tiny import raise_engine_norms, save_tiny_llama
from outrider.lab.prove.tiny_heads import save_tiny_heads
from outrider.lab.prove.tree_reference import Members, Shape, TreeRule
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.propose.base import DraftNoise, PromptRows, Proposer, ProposeRequest, ProposerSequence, Tokens
from outrider.propose.settings import SpeculationConfig
from outrider.verify.processing import Processing

# --- Proves the rules for drafts of several members: the rational reference, and the production Verifier against the
# target.


def prove_merged_reference(
    rule: TreeRule, shape: Shape, count: int, length: int, *, alike: bool = False, guessed_tokens: int = 0
) -> Finding:
    """The rational reference of the rules for several members has a total variation of exactly 0."""

    def written(case: Case) -> Joint:
        return tree_reference.speculative_distribution(Members(case, alike, guessed_tokens), rule, shape, length)

    return reference_is_exact(reference.cases(count, seed=8), written, length, f"members of widths {shape}")


def prove_merged_verifier(
    rule: TreeRule, shape: Shape, count: int, length: int, *, alike: bool = False, guessed_tokens: int = 0
) -> Finding:
    """Total variation between what rounds of `Verifier.verify` on merged trees write and the target's distribution."""

    def joined(case: Case, text: WrittenText, source: DraftNoise, depth: int) -> Draft:
        return _draw(Members(case, alike, guessed_tokens), text, source, shape, depth)

    cases, said = reference.cases(count, seed=9), f"members of widths {shape}"
    return verifier_is_exact(cases, RULE_NAMES[rule], joined, length, said)


def _draw(members: Members, text: WrittenText, noise: DraftNoise, shape: Shape, depth: int) -> Draft:
    """The trees of all members, joined, with the guess beside them."""
    draft = EMPTY
    for member, widths in enumerate(shape):
        source = noise.member(member)
        tree = draw_tree(partial(members.draft, member), text, source, widths[:depth])
        draft, _ = draft.joined(tree, -1)
    guess = members.guessed(text.output)[:depth]
    return draft.joined(Draft.chain(guess, Law.DETERMINISTIC), -1)[0]


# --- The exact law of what a stage drafts, by enumeration of all paths through its rounds.
#
# The engine's proof enumerates texts of four tokens, in which a drafter guesses two tokens at most. Here nothing but
# the draft is enumerated, so guesses are deeper, and may be refused at each place.


_PROMPT = (0, 1, 2, 0, 1)
#: Tokens of a draft.
LENGTH = 4
#: The largest total variation that rounding may explain.
BOUND = 1e-12
#: Drafts that are made side by side, as those of a batch are.
_WIDTH = 32


def prove_stage(guesses: Mapping[str, Any], params: SamplingParams, folder: Path) -> Finding:
    """Total variation between what a stage drafts and what its draft model drafts alone, or what the stage says of it,
    whichever is larger.

    Args:
        guesses: How its drafter guesses: a draft model with other weights where no method is named, or heads or layers of
            the draft model.
        params: Of the text.
        folder: Where two tiny models are written, and heads.
    """
    layers = SHARED_TARGET_LAYERS if "method" in guesses else 1
    target, own = (
        save_tiny_llama(folder / name, seed, num_layers=count)
        for name, seed, count in (("target", 1, 1), ("draft", 2, layers))
    )
    models = {"draft_model": target} | (save_tiny_heads(folder, own) if layers > 1 else {})
    drafter = {"method": "draft_model", **guesses}
    drafter |= {"model": models[drafter["method"]]} if drafter["method"] in models else {}
    llm = LLM(target, dtype="float64", device="cpu", block_size=2, max_num_seqs=_WIDTH, kv_cache_tokens=64 * _WIDTH)
    alone = {"method": "draft_model", "model": own, "num_draft_tokens": LENGTH}
    staged = {**alone, "method": "staged", "drafter": drafter}
    laws = []
    for asked in (staged, alone):
        (proposer,) = llm.engine.proposers.prepare(llm.resolve(SpeculationConfig.of(asked)))
        raise_engine_norms(llm)
        laws.append(_drafts(proposer, params))
    (found, stated), (expected, _) = laws
    distance = max(total_variation(found, expected), total_variation(found, stated))
    return Finding(distance, BOUND, f"drafts of {LENGTH} tokens", horizon=LENGTH)


def _drafts(proposer: Proposer, params: SamplingParams) -> tuple[dict[Outcome, float], dict[Outcome, float]]:
    """The exact law of a draft, and the probability of each draft by the laws that it states of its tokens."""
    noise, numbers, stated = ForkingNoise(), count(1 << 40), dict[Outcome, float]()

    def run(width: int) -> Iterator[Outcome]:
        texts = [_text(next(numbers), params) for _ in range(width)]
        for text in texts:
            proposer.begin(text)
        try:
            proposer.prefill([PromptRows(text, len(_PROMPT) - 1) for text in texts])  # so that the first guess is deep
            drafts = proposer.propose([ProposeRequest(text, LENGTH, LENGTH) for text in texts], DraftNoise(noise))
        finally:
            for text in texts:
                proposer.finish(text)
        for draft in drafts:
            assert draft.is_chain
            assert draft.draft_probs is not None
            probability = prod(float(row[token]) for row, token in zip(draft.draft_probs, draft.token_ids, strict=True))
            first = stated.setdefault(draft.token_ids, probability)
            if abs(first - probability) > BOUND:
                stated[draft.token_ids] = 1.0 + first  # what a stage says of a token must not depend on how it came to it
            yield draft.token_ids

    return explore(run, noise, width=_WIDTH).probs, stated


def _text(number: int, params: SamplingParams) -> ProposerSequence:
    tokens = Tokens(list(_PROMPT))
    kv = KVView(StateMemory(BlockManager(1, 1)).state())  # nothing is ever kept in it
    return ProposerSequence(number, tokens, 1, params, Processing(params, tokens, 1), 0, 0, kv)

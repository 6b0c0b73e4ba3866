"""Asking proposers for drafts, and making sure that a broken one costs speed and never a token."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.sequence import Sequence
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.draft import EMPTY, Draft, Law
from outrider.verify.noise import NoiseSource

logger = logging.getLogger(__name__)

#: How far the entries of a law may sum from 1 (float32 rounding over a large vocabulary).
_MASS_TOLERANCE = 1e-3


def propose_all(items: Seq[ScheduledSequence], noise: NoiseSource, vocab_size: int) -> list[Draft]:
    """One draft an item, in order. Each proposer is asked once for all its sequences.

    A proposer that raises, or answers nonsense, loses its draft for this round. What is cut is cut by the first faulty
    row, never by what the tokens say (see `sound_prefix`).
    """
    drafts = [EMPTY] * len(items)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for place, item in enumerate(items):
        if item.draft_budget > 0 and item.seq.request.proposer is not None:
            groups[id(item.seq.request.proposer)].append(place)
    for places in groups.values():
        members = [items[p] for p in places]
        proposer = members[0].seq.request.proposer
        assert proposer is not None
        for place, draft in zip(places, _ask(proposer, members, noise, vocab_size), strict=True):
            drafts[place] = draft
    return drafts


def _ask(proposer: Proposer, members: Seq[ScheduledSequence], noise: NoiseSource, vocab_size: int) -> list[Draft]:
    requests = [ProposeRequest(item.seq.view, item.draft_budget, item.draft_depth) for item in members]
    try:
        answers = list(proposer.propose(requests, DraftNoise(noise)))
        if len(answers) != len(members):
            raise ValueError(f"{len(answers)} drafts for {len(members)} requests")
    except Exception as error:
        for item in members:
            report_fault(item.seq, proposer, repr(error))
        return [EMPTY] * len(members)
    return [_checked(item, answer, proposer, vocab_size) for item, answer in zip(members, answers, strict=True)]


def _checked(item: ScheduledSequence, draft: Draft, proposer: Proposer, vocab_size: int) -> Draft:
    try:
        sound, problem = sound_prefix(draft, item.draft_budget, item.draft_depth, vocab_size)
    except Exception as error:  # an answer so malformed that looking at it raises
        sound, problem = EMPTY, repr(error)
    was_demoted = item.seq.demoted
    if problem is not None:
        report_fault(item.seq, proposer, problem)
    return sound.opaque() if was_demoted else sound


def report_fault(seq: Sequence, proposer: Proposer, problem: str) -> None:
    """Count a fault and stop believing what this proposer says of its laws for the rest of the request."""
    seq.stats.num_proposer_faults += 1
    seq.demoted = True
    logger.warning("proposer %s, request %d: %s", type(proposer).__name__, seq.request.request_id, problem)


def sound_prefix(draft: Draft, budget: int, max_depth: int, vocab_size: int) -> tuple[Draft, str | None]:
    """The nodes before the first faulty one, and what is wrong with that one (None for a sound draft).

    Cutting there is exact as long as a fault does not depend on what was drawn: nodes before it were drawn from the
    laws they claim, whatever came later.
    """
    if not isinstance(draft, Draft):
        return EMPTY, f"returned {type(draft).__name__} instead of a Draft"
    size = len(draft.token_ids)
    if not size == len(draft.parents) == len(draft.laws):
        return EMPTY, "token_ids, parents and laws differ in length"
    if Law.SAMPLED in draft.laws and (draft.draft_probs is None or draft.draft_probs.shape != (size, vocab_size)):
        return EMPTY, f"draft_probs is not [{size}, {vocab_size}]"
    bad_laws = _unsound_laws(draft)
    depths: list[int] = []
    for node in range(size):
        problem = _node_problem(draft, node, vocab_size) or bad_laws.get(node)
        if problem is None and node >= budget:
            problem = f"more than {budget} nodes"
        if problem is None:
            depths.append(1 + (depths[draft.parents[node]] if draft.parents[node] >= 0 else 0))
            problem = f"deeper than {max_depth}" if depths[-1] > max_depth else None
        if problem is not None:
            return draft.first(node) if node else EMPTY, f"node {node}: {problem}"
    if problem := _misdrawn_siblings(draft):
        return draft.opaque(), problem  # whatever they are, following them where the target goes is exact
    return draft, None


def _misdrawn_siblings(draft: Draft) -> str | None:
    """What tells that sampled siblings were not drawn one after another, without replacement, from one law."""
    first: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()
    for node, (parent, token, law) in enumerate(zip(draft.parents, draft.token_ids, draft.laws, strict=True)):
        if law is not Law.SAMPLED:
            continue
        if (parent, token) in seen:
            return f"node {node}: token {token} was drawn before among its siblings"
        seen.add((parent, token))
        probs, elder = draft.draft_probs, first.setdefault(parent, node)
        if probs is not None and elder != node and not torch.equal(probs[elder], probs[node]):
            return f"node {node}: its law is not the one its elder sibling {elder} was drawn from"
    return None


def _node_problem(draft: Draft, node: int, vocab_size: int) -> str | None:
    token, parent, law = draft.token_ids[node], draft.parents[node], draft.laws[node]
    if not _is_int(token):
        return f"token {token!r} is no int"
    if not 0 <= token < vocab_size:
        return f"token {token} is outside the vocabulary of {vocab_size}"
    if not _is_int(parent) or not -1 <= parent < node:
        return f"parent {parent!r} does not come before it"
    if not isinstance(law, Law):
        return f"law {law!r} is no Law"
    return None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unsound_laws(draft: Draft) -> dict[int, str]:
    """Sampled nodes whose law is no probability law, or could not have drawn their token."""
    sampled = [node for node, law in enumerate(draft.laws) if law is Law.SAMPLED]
    probs: Tensor | None = draft.draft_probs
    if not sampled or probs is None:
        return {}
    mass, least = probs.double().sum(-1).tolist(), probs.amin(-1).tolist()
    problems = {}
    for node in sampled:
        token = draft.token_ids[node]
        if not (abs(mass[node] - 1.0) <= _MASS_TOLERANCE and least[node] >= 0.0):
            problems[node] = f"its law sums to {mass[node]}, least entry {least[node]}"
        elif _is_int(token) and 0 <= token < probs.shape[-1] and not float(probs[node, token]) > 0.0:
            problems[node] = f"token {token} has probability 0 under its own law"
    return problems

"""Asking proposers for drafts, and making sure that a broken one costs speed and never a token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.draft import EMPTY, NO_SCRATCH, Draft, Law, ScratchRows
from outrider.engine.drafter import Drafter
from outrider.engine.scheduler import ScheduledSequence, Turn
from outrider.engine.sequence import Sequence
from outrider.engine.tree_builders import TreeBuilders
from outrider.propose.base import DraftNoise, PromptRows, Proposer, ProposeRequest
from outrider.propose.tree import TreeBuilder
from outrider.verify.noise import NoiseSource

#: How far the probabilities of a row may sum from 1 (float32 rounding over a large vocabulary).
_MASS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Part:
    """One proposer's part of a step's draft.

    Attributes:
        drafter: Whose.
        builder: Who shaped it.
        nodes: (first, end) of its draft tokens.
        scratch: (first, end) of its scratch rows among those of the whole draft.
    """

    drafter: Drafter
    builder: TreeBuilder
    nodes: tuple[int, int]
    scratch: tuple[int, int]


@dataclass
class StepDraft:
    """The draft of one sequence in one step, and who drafted what.

    Attributes:
        draft: All parts, each further one behind the deepest token of the one before.
        parts: In order.
    """

    draft: Draft = EMPTY
    parts: list[Part] = field(default_factory=list)

    def add(self, drafter: Drafter, builder: TreeBuilder, tail: Draft) -> None:
        """Go on with what another proposer drafted."""
        before, rows = len(self.draft), len(self.draft.scratch)
        self.draft = self.draft.extended(tail)
        if tail.num_rows:
            self.parts.append(Part(drafter, builder, (before, before + len(tail)), (rows, rows + len(tail.scratch))))


def prefill_all(items: Seq[ScheduledSequence]) -> None:
    """Tell the proposers of sequences whose prompts are computed in this step. Each is told once, of all its sequences; one
    that raises has a fault with them.

    Args:
        items: What is scheduled.
    """
    groups: defaultdict[int, list[tuple[Drafter, ScheduledSequence]]] = defaultdict(list)
    for item in items:
        if item.is_prompt_of_drafts:
            for drafter in item.seq.drafters:
                groups[id(drafter.proposer)].append((drafter, item))
    for members in groups.values():
        try:
            stops = [PromptRows(item.seq.view, item.seq.kv.num_computed + item.num_rows) for _, item in members]
            members[0][0].proposer.prefill(stops)
        except Exception as error:
            for drafter, item in members:
                drafter.report_fault(item.seq.request.request_id, f"prefill raised {error!r}")
                item.seq.stats.num_proposer_faults += 1


def propose_all(
    items: Seq[ScheduledSequence],
    drafters: Seq[Seq[Drafter | None]],
    builders: TreeBuilders,
    noise: NoiseSource,
    vocab_size: int,
) -> list[StepDraft]:
    """The draft of each item, in order. Each proposer is asked once a turn for all its sequences.

    A proposer that raises, or answers nonsense, loses its draft for this round. What is cut is cut by the first faulty
    row, never by what the tokens say (see `sound_prefix`).

    Args:
        items: What is scheduled.
        drafters: Who drafts in each turn of each item; None for a proposer that cannot be had.
        builders: Who shapes drafts.
        noise: Source of all chance.
        vocab_size: Width of the target's logits.
    """
    drafts = [StepDraft() for _ in items]
    for turn in range(max((len(item.turns) for item in items), default=0)):
        groups: defaultdict[int, list[_Asked]] = defaultdict(list)
        for item, who, step in zip(items, drafters, drafts, strict=True):
            drafter = who[turn] if turn < len(who) else None
            if drafter is not None:
                asked = _asked(item, item.turns[turn], drafter, step, builders)
                groups[id(drafter.proposer)] += [] if asked is None else [asked]
        for members in filter(None, groups.values()):
            for asked, answer in zip(members, _ask(members, noise, vocab_size), strict=True):
                asked.step.add(asked.drafter, asked.builder, answer)
    return drafts


def teach(step: StepDraft, accepted: Collection[int], *, greedy: bool) -> None:
    """Tell those who shaped a draft what of it stands.

    Args:
        step: The draft.
        accepted: Its nodes that stand.
        greedy: Whether the target took its most likely token.
    """
    draft = step.draft
    for part in step.parts:
        first, end = part.nodes
        outside = [parent for parent in draft.parents[first:end] if parent < first]
        reached = all(parent < 0 or parent in accepted for parent in outside)
        confidences = draft.confidences[first:end]
        if not part.builder.learns or not reached or not confidences:
            continue
        parents = tuple(max(parent - first, -1) for parent in draft.parents[first:end])
        own = Draft(draft.token_ids[first:end], parents, draft.laws[first:end], confidences=confidences)
        stood = {node - first for node in accepted if first <= node < end}
        part.builder.learn(own, stood, (own.laws[0], greedy))


@dataclass(frozen=True)
class _Asked:
    """One turn of one sequence."""

    item: ScheduledSequence
    turn: Turn
    drafter: Drafter
    step: StepDraft
    builder: TreeBuilder

    @property
    def seq(self) -> Sequence:
        return self.item.seq

    @property
    def request(self) -> ProposeRequest:
        draft = self.step.draft
        path = draft.paths[draft.deepest] if len(draft) else ()
        return ProposeRequest(
            self.seq.view,
            self.turn.budget,
            self.turn.max_depth,
            path,
            self.builder,
            self.turn.greedy,
            self.item.coupled,
            self.drafter.index,
        )

    def report(self, problem: str, *, useless: bool = True) -> None:
        self.drafter.report_fault(self.seq.request.request_id, problem, useless=useless)
        self.seq.stats.num_proposer_faults += 1


def _asked(item: ScheduledSequence, turn: Turn, drafter: Drafter, step: StepDraft, builders: TreeBuilders) -> _Asked | None:
    """A turn with whoever shapes its draft; None, and nothing is drafted, where he cannot be had."""
    try:
        return _Asked(item, turn, drafter, step, builders.of(drafter.proposer, turn.tree))
    except Exception as error:
        drafter.report_fault(item.seq.request.request_id, f"its tree builder raised {error!r}")
        item.seq.stats.num_proposer_faults += 1
        return None


def _ask(members: Seq[_Asked], noise: NoiseSource, vocab_size: int) -> list[Draft]:
    proposer: Proposer = members[0].drafter.proposer
    for asked in members:
        asked.drafter.conduct.served(asked.seq.request.request_id)
    try:
        answers = list(proposer.propose([asked.request for asked in members], DraftNoise(noise)))
        if len(answers) != len(members):
            raise ValueError(f"{len(answers)} drafts for {len(members)} requests")
    except Exception as error:
        for asked in members:
            asked.report(repr(error))
        return [EMPTY] * len(members)
    return [_checked(asked, answer, vocab_size) for asked, answer in zip(members, answers, strict=True)]


def _checked(asked: _Asked, draft: Draft, vocab_size: int) -> Draft:
    try:
        sound, problem = sound_prefix(draft, asked.turn.budget, asked.turn.max_depth, vocab_size)
    except Exception as error:  # an answer so malformed that looking at it raises
        sound, problem = EMPTY, repr(error)
    was_demoted = asked.drafter.demoted
    if problem is not None:
        asked.report(problem, useless=not sound.num_rows)
    return sound.opaque() if was_demoted else sound


def sound_prefix(draft: Draft, budget: int, max_depth: int, vocab_size: int) -> tuple[Draft, str | None]:
    """The rows before the first faulty one, and what is wrong with that one (None for a sound draft).

    Cutting there is exact as long as a fault does not depend on what was drawn: nodes before it were drawn from the
    probabilities they claim, whatever came later.
    """
    if not isinstance(draft, Draft):
        return EMPTY, f"returned {type(draft).__name__} instead of a Draft"
    size = len(draft.token_ids)
    if not size == len(draft.parents) == len(draft.laws):
        return EMPTY, "token_ids, parents and laws differ in length"
    fitting = isinstance(draft.draft_probs, Tensor) and draft.draft_probs.shape == (size, vocab_size)
    if Law.SAMPLED in draft.laws and not fitting:
        return EMPTY, f"draft_probs is not [{size}, {vocab_size}]"
    draft = _plain(draft, draft.draft_probs if fitting else None)
    bad_probs = _unsound_probs(draft)
    depths: list[int] = []
    for node in range(size):
        problem = _node_problem(draft, node, vocab_size) or bad_probs.get(node)
        if problem is None and node >= budget:
            problem = f"more than {budget} nodes"
        if problem is None:
            depths.append(1 + (depths[draft.parents[node]] if draft.parents[node] >= 0 else 0))
            problem = f"deeper than {max_depth}" if depths[-1] > max_depth else None
        if problem is not None:
            return draft.first(node) if node else EMPTY, f"node {node}: {problem}"
    misdrawn = _misdrawn_siblings(draft)
    if misdrawn is not None:  # whatever they are, following them where the target goes is exact
        draft = draft.opaque()
    sound, problem = _sound_scratch(draft, budget, max_depth, vocab_size)
    return sound, misdrawn or problem


def _plain(draft: Draft, draft_probs: Tensor | None) -> Draft:
    """The draft with tuples in the place of whatever sequences its proposer used, and probabilities only if they fit."""
    scratch = draft.scratch
    if isinstance(scratch, ScratchRows):
        scratch = ScratchRows(tuple(scratch.token_ids), tuple(scratch.parents))
    tokens, parents, laws = tuple(draft.token_ids), tuple(draft.parents), tuple(draft.laws)
    confidences = tuple(draft.confidences) if len(draft.confidences) == len(tokens) else ()
    plain = replace(draft, token_ids=tokens, parents=parents, laws=laws, draft_probs=draft_probs, scratch=scratch)
    return replace(plain, confidences=confidences)


def _sound_scratch(draft: Draft, budget: int, max_depth: int, vocab_size: int) -> tuple[Draft, str | None]:
    """The draft with the scratch rows before the first faulty one, and what is wrong with that one."""
    scratch, size, depths = draft.scratch, len(draft), draft.depths
    if not isinstance(scratch, ScratchRows):
        return replace(draft, scratch=NO_SCRATCH), f"its scratch rows are {type(scratch).__name__} instead of ScratchRows"
    if len(scratch.token_ids) != len(scratch.parents):
        return draft.with_scratch(0), "token_ids and parents of its scratch rows differ in length"
    for row, (token, parent) in enumerate(zip(scratch.token_ids, scratch.parents, strict=True)):
        problem = _row_problem(token, parent, size + row, vocab_size)
        if problem is None and size + row >= budget:
            problem = f"more than {budget} rows"
        if problem is None:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            problem = f"deeper than {max_depth}" if depths[-1] > max_depth else None
        if problem is not None:
            return draft.with_scratch(row), f"scratch row {row}: {problem}"
    return draft, None


def _misdrawn_siblings(draft: Draft) -> str | None:
    """What tells that sampled siblings were not drawn one after another, without replacement, from the same
    probabilities."""
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
            return f"node {node}: its probabilities are not those its elder sibling {elder} was drawn from"
    return None


def _node_problem(draft: Draft, node: int, vocab_size: int) -> str | None:
    problem = _row_problem(draft.token_ids[node], draft.parents[node], node, vocab_size)
    if problem is None and not isinstance(draft.laws[node], Law):
        problem = f"law {draft.laws[node]!r} is no Law"
    return problem


def _row_problem(token: object, parent: object, row: int, vocab_size: int) -> str | None:
    if not isinstance(token, int) or isinstance(token, bool):
        return f"token {token!r} is no int"
    if not 0 <= token < vocab_size:
        return f"token {token} is outside the vocabulary of {vocab_size}"
    if not isinstance(parent, int) or isinstance(parent, bool) or not -1 <= parent < row:
        return f"parent {parent!r} does not come before it"
    return None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unsound_probs(draft: Draft) -> dict[int, str]:
    """Sampled nodes whose probabilities are none, or could not have drawn their token."""
    sampled = [node for node, law in enumerate(draft.laws) if law is Law.SAMPLED]
    probs: Tensor | None = draft.draft_probs
    if not sampled or probs is None:
        return {}
    mass, least = probs.double().sum(-1).tolist(), probs.amin(-1).tolist()
    problems = {}
    for node in sampled:
        token = draft.token_ids[node]
        if not (abs(mass[node] - 1.0) <= _MASS_TOLERANCE and least[node] >= 0.0):
            problems[node] = f"its probabilities sum to {mass[node]}, least entry {least[node]}"
        elif _is_int(token) and 0 <= token < probs.shape[-1] and not float(probs[node, token]) > 0.0:
            problems[node] = f"token {token} has probability 0 among those it was drawn from"
    return problems

"""Asks proposers for drafts and joins their answers, and shows proposers what the pass computed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from outrider.draft import EMPTY, Draft, Law
from outrider.engine.drafting.proposers import TreeBuilders
from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.sequence import Drafter
from outrider.model.runner import ForwardOutput
from outrider.propose.base import DraftNoise, ObservedRows, PromptRows, ProposeRequest, Requirements
from outrider.propose.host import PassRows, blaming
from outrider.propose.tree import CHAIN, TreeBuilder
from outrider.results import FORCED
from outrider.verify.noise import NoiseSource
from outrider.verify.verifier import Verdict

# --- The draft of a sequence in a step, and who drafted what.


@dataclass(frozen=True)
class DraftPart:
    """One proposer's part of a step's draft, or what the structure of the output forces."""

    drafter: Drafter | None  # None for what is forced
    builder: TreeBuilder  # that shaped it
    draft: Draft
    root: int  # the node of the whole draft that it follows; -1 is the last committed token
    nodes: tuple[int, ...]  # of the whole draft, for each of its own. Another part may have proposed the same one
    draws: tuple[int, int]  # (first, end) of its draws among those of the whole draft
    scratch: tuple[int, int]  # (first, end) of its scratch rows among those of the whole draft
    turn: int = -1  # of the step

    @property
    def member(self) -> str:
        """The name under which its tokens are counted and shown: that of the method."""
        return FORCED if self.drafter is None else self.drafter.method.name

    def outcome(self, accepted: Collection[int]) -> tuple[int, int]:
        """At how many places of the text it proposed a token, and at how many of them one of its tokens stands."""
        reached = {-1, *accepted}
        parents = [self.root if parent < 0 else self.nodes[parent] for parent in self.draft.parents]
        tried = {parent for parent in parents if parent in reached}
        stood = {parent for parent, node in zip(parents, self.nodes, strict=True) if node in accepted}
        return len(tried), len(stood)

    def accepted(self, accepted: Collection[int]) -> set[int]:
        """Those of its own nodes that stand, from the nodes of the whole draft that do."""
        return {own for own, node in enumerate(self.nodes) if node in accepted}


@dataclass
class StepDraft:
    """The draft of one sequence in one step, and who drafted what."""

    draft: Draft = EMPTY  # all parts, joined
    parts: list[DraftPart] = field(default_factory=list)  # in order
    spare: int = 0  # rows that pooled turns have left over

    @staticmethod
    def of_forced(token_ids: Seq[int]) -> StepDraft:
        """The draft of what the structure forces, which everybody else drafts behind. It is verified like any guess: what
        else the request asks for may forbid it."""
        step = StepDraft()
        step.add(None, CHAIN, Draft.chain(token_ids, Law.OPAQUE), -1, -1)
        return step

    @property
    def drafted(self) -> list[tuple[DraftPart, Drafter]]:
        """The parts that proposers drafted, and whose each is."""
        return [(part, part.drafter) for part in self.parts if part.drafter is not None]

    def member(self, node: int) -> str:
        """The name of the member that drafted a node, or of the first that did."""
        return next(part.member for part in self.parts if node in part.nodes)

    @property
    def num_forced(self) -> int:
        """Its nodes that the structure forces; they are its first."""
        return sum(len(part.nodes) for part in self.parts if part.drafter is None)

    def root(self, turns: Collection[int]) -> int:
        """The first of the deepest nodes that these turns drafted; where they drafted nothing, that which turns begin
        behind."""
        nodes = sorted({node for part in self.parts if part.turn in turns for node in part.nodes})
        depths = self.draft.depths if nodes else []
        return max(nodes, key=lambda node: depths[node], default=self.num_forced - 1)

    def leave_over(self, budget: int, before: int, tail: Draft) -> None:
        """A pooled turn with `budget` rows has drafted `tail`, with `before` rows before it. What drawn tokens leave is
        left to nobody: how many rows others have may not follow from what was drawn."""
        if Law.SAMPLED not in tail.laws:
            self.spare += max(0, budget - (self.draft.num_rows - before))

    def add(self, drafter: Drafter | None, builder: TreeBuilder, tail: Draft, root: int, turn: int) -> None:
        """Join what another proposer drafted behind node `root`."""
        if not tail.num_rows:
            return
        draws, rows = self.draft.num_draws, len(self.draft.scratch)
        self.draft, nodes = self.draft.joined(tail, root)
        places = (draws, draws + tail.num_draws), (rows, rows + len(tail.scratch))
        self.parts.append(DraftPart(drafter, builder, tail, root, nodes, *places, turn))


# --- Asks proposers for drafts.


_T = TypeVar("_T")


def _by_proposer(pairs: Iterable[tuple[Drafter, _T]]) -> Iterable[tuple[list[Drafter], list[_T]]]:
    """Drafters of one proposer together, since each is called once, for all its sequences."""
    groups: dict[int, tuple[list[Drafter], list[_T]]] = {}
    for drafter, value in pairs:
        drafters, values = groups.setdefault(id(drafter.proposer), ([], []))
        drafters.append(drafter)
        values.append(value)
    return groups.values()


def prefill_all(items: Seq[ScheduledSequence]) -> None:
    """Tell the proposers of sequences whose prompts are computed in this step."""
    told = ((drafter, item) for item in items if item.is_prompt_of_drafts for drafter in item.seq.drafters)
    for drafters, prompts in _by_proposer(told):
        with blaming(drafters, "prefill"):
            stops = [PromptRows(item.seq.view, item.seq.state.num_computed + item.num_rows) for item in prompts]
            drafters[0].proposer.prefill(stops)


class _Asked(NamedTuple):
    """One turn of one sequence."""

    request: ProposeRequest
    step: StepDraft
    root: int  # the node of the draft so far that it follows
    pooled: bool


def propose_all(
    items: Seq[ScheduledSequence],
    drafters: Seq[Seq[Drafter | None]],
    builders: TreeBuilders,
    noise: NoiseSource,
) -> list[StepDraft]:
    """The draft of each item, in order, by the drafters of its turns; None is one that cannot be had."""
    drafts = [StepDraft.of_forced(item.forced) for item in items]
    for turn in range(max((len(item.turns) for item in items), default=0)):
        asked = (
            (who[turn], _asked(item, turn, who[turn], step, builders))
            for item, who, step in zip(items, drafters, drafts, strict=True)
            if turn < len(item.turns)
        )
        found = [(drafter, each) for drafter, each in asked if drafter is not None and each is not None]
        for members, turns in _by_proposer(found):
            for drafter in members:
                drafter.served()
            requests = [each.request for each in turns]
            answers = members[0].host.ask(members, requests, DraftNoise(noise))
            for drafter, (request, step, root, pooled), answer in zip(members, turns, answers, strict=True):
                before = step.draft.num_rows
                step.add(drafter, request.builder, answer, root, turn)
                if pooled:
                    step.leave_over(request.budget, before, answer)
    return drafts


def _asked(
    item: ScheduledSequence, place: int, drafter: Drafter | None, step: StepDraft, builders: TreeBuilders
) -> _Asked | None:
    """A turn with whoever shapes its draft; None, and nothing is drafted, where one of them cannot be had or no row is
    left. The rows that others have left over are taken out of the draft's."""
    turn, root = item.turns[place], step.root(item.turns[place].behind)
    path = step.draft.paths[root] if root >= 0 else ()
    budget, max_depth = turn.budget, turn.max_depth
    if turn.pooled:
        budget, step.spare = budget + step.spare, 0
        max_depth -= len(path) - step.num_forced if root >= 0 else 0
        if drafter is None or budget <= 0 or max_depth <= 0:
            step.spare = budget
            return None
        budget = budget if turn.tree or turn.method.branches_freely else min(budget, max_depth)
    if drafter is None:
        return None
    with drafter.blaming("its tree builder"):
        request = ProposeRequest(
            item.seq.view,
            budget,
            max_depth,
            path,
            builders.of(drafter.host, turn.tree, comes_again=item.seq.request.comes_again),
            turn.greedy,
            item.coupled,
            place,
            drafter.report_inner_fault,
            drafter.count_stage,
        )
        return _Asked(request, step, root, turn.pooled)
    return None


# --- Shows proposers the rows that a pass computed, and tells who shaped drafts what of them stands.


@dataclass
class Committed(PassRows):
    """The rows of a sequence that a step has committed, with the draft tokens that entered the text."""

    item: ScheduledSequence
    step: StepDraft
    verdict: Verdict | None  # None where no token was due


def requirements(item: ScheduledSequence) -> list[Requirements]:
    """The wishes of a sequence's proposers to be shown rows."""
    return [drafter.requires for drafter in item.seq.drafters if drafter.requires is not None]


def aux_layers(items: Seq[ScheduledSequence]) -> list[int]:
    """Hidden states that a pass must bring."""
    return sorted({layer for item in items for needed in requirements(item) for layer in needed.aux_layers})


def show(committed: Seq[Committed], out: ForwardOutput) -> None:
    """Call `observe` of every proposer that asked."""
    told = ((drafter, rows) for rows in committed for drafter in rows.item.seq.drafters if drafter.requires is not None)
    for drafters, shown in _by_proposer(told):
        with blaming(drafters, "observe"):
            pairs = zip(drafters, shown, strict=True)
            drafters[0].proposer.observe([_shown_to(drafter, rows, out) for drafter, rows in pairs])


def _shown_to(drafter: Drafter, rows: Committed, out: ForwardOutput) -> ObservedRows:
    assert drafter.requires is not None
    own = (row for part in rows.step.parts if part.drafter is drafter for row in range(*part.scratch))
    return rows.shown(drafter.requires, out, own)


def teach(step: StepDraft, accepted: Collection[int], *, greedy: bool) -> None:
    """Tell those who shaped a draft which of its nodes stand, and whether the target took its most likely token."""
    for part in step.parts:
        own, reached = part.draft, part.root < 0 or part.root in accepted
        if part.builder.learns and reached and own.confidences:
            part.builder.learn(own, part.accepted(accepted), (own.laws[0], greedy))

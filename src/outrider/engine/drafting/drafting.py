"""Asks proposers for drafts, inspects the answers, and shows proposers what the pass computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.draft import EMPTY, Draft, Law
from outrider.engine.drafting.proposers import TreeBuilders
from outrider.engine.scheduler import ScheduledSequence, Turn
from outrider.engine.sequence import Drafter, Sequence
from outrider.model.runner import ForwardOutput
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    PromptRows,
    Proposer,
    ProposeRequest,
    Requirements,
    RowStatus,
    TopK,
    rows_at,
)
from outrider.propose.inspection import inspected
from outrider.propose.tree import CHAIN, TreeBuilder
from outrider.results import FORCED
from outrider.verify.noise import NoiseSource

# --- Asks proposers for drafts and inspects the answers: a fault costs speed and never a token.


@dataclass(frozen=True)
class DraftPart:
    """One proposer's part of a step's draft, or what the structure of the output forces.

    Attributes:
        drafter: Whose; None for what is forced.
        builder: Who shaped it.
        draft: What it drafted.
        root: The node of the whole draft that it follows; -1 is the last committed token.
        nodes: The node of the whole draft that each of its nodes is. Another part may have proposed the same one.
        draws: (first, end) of its draws among those of the whole draft.
        scratch: (first, end) of its scratch rows among those of the whole draft.
        turn: Which turn of the step it was.
    """

    drafter: Drafter | None
    builder: TreeBuilder
    draft: Draft
    root: int
    nodes: tuple[int, ...]
    draws: tuple[int, int]
    scratch: tuple[int, int]
    turn: int = -1

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
    """The draft of one sequence in one step, and who drafted what.

    Attributes:
        draft: All parts, joined.
        parts: In order.
        spare: Rows that pooled turns have left over.
    """

    draft: Draft = EMPTY
    parts: list[DraftPart] = field(default_factory=list)
    spare: int = 0

    @staticmethod
    def of_forced(token_ids: Seq[int]) -> StepDraft:
        """What the structure forces, which everybody else drafts behind. It is verified like any guess: what else the
        request asks for may forbid it."""
        step = StepDraft()
        step.add(None, CHAIN, Draft.chain(token_ids, Law.OPAQUE), -1, -1)
        return step

    @property
    def drafted(self) -> list[tuple[DraftPart, Drafter]]:
        """The parts that proposers drafted, and whose each is."""
        return [(part, part.drafter) for part in self.parts if part.drafter is not None]

    def member(self, node: int) -> str:
        """Who drafted a node, or the first of those who did."""
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
            stops = [PromptRows(item.seq.view, item.seq.state.num_computed + item.num_rows) for _, item in members]
            members[0][0].proposer.prefill(stops)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
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

    A proposer that raises, or answers nonsense, has a fault. What it drew before stays in the draft (see `Drawn`), and the
    rest is cut by the first faulty row, never by what the tokens say (see `sound_prefix`).

    Args:
        items: What is scheduled.
        drafters: Who drafts in each turn of each item; None for a proposer that cannot be had.
        builders: Who shapes drafts.
        noise: Source of all chance.
        vocab_size: Width of the target's logits.
    """
    drafts = [StepDraft.of_forced(item.forced) for item in items]
    for turn in range(max((len(item.turns) for item in items), default=0)):
        groups: defaultdict[int, list[_Asked]] = defaultdict(list)
        for item, who, step in zip(items, drafters, drafts, strict=True):
            drafter = who[turn] if turn < len(who) else None
            if turn < len(item.turns):
                asked = _asked(item, turn, drafter, step, builders)
                if asked is not None:
                    groups[id(asked.drafter.proposer)].append(asked)
        for members in filter(None, groups.values()):
            for asked, answer in zip(members, _ask(members, noise, vocab_size), strict=True):
                before = asked.step.draft.num_rows
                asked.step.add(asked.drafter, asked.builder, answer, asked.root, turn)
                if asked.turn.pooled:
                    asked.step.leave_over(asked.budget, before, answer)
    return drafts


def teach(step: StepDraft, accepted: Collection[int], *, greedy: bool) -> None:
    """Tell those who shaped a draft what of it stands.

    Args:
        step: The draft.
        accepted: Its nodes that stand.
        greedy: Whether the target took its most likely token.
    """
    for part in step.parts:
        own, reached = part.draft, part.root < 0 or part.root in accepted
        if part.builder.learns and reached and own.confidences:
            part.builder.learn(own, part.accepted(accepted), (own.laws[0], greedy))


@dataclass(frozen=True)
class _Asked:
    """One turn of one sequence.

    Attributes:
        item: The sequence.
        place: Which turn of the step it is; part of the keys of its draws, since a drafter may have several.
        turn: The turn.
        drafter: Who drafts.
        step: The draft so far.
        builder: Who shapes what is added.
        budget: Most rows of that.
        max_depth: Its longest path that may be of use.
        root: The node that it follows.
    """

    item: ScheduledSequence
    place: int
    turn: Turn
    drafter: Drafter
    step: StepDraft
    builder: TreeBuilder
    budget: int
    max_depth: int
    root: int

    @property
    def seq(self) -> Sequence:
        return self.item.seq

    @property
    def request(self) -> ProposeRequest:
        path = self.step.draft.paths[self.root] if self.root >= 0 else ()
        return ProposeRequest(
            self.seq.view,
            self.budget,
            self.max_depth,
            path,
            self.builder,
            self.turn.greedy,
            self.item.coupled,
            self.place,
            self.report_inner,
            self.count_stage,
        )

    def report(self, problem: str, *, useless: bool = True) -> None:
        self.drafter.report_fault(self.seq.request.request_id, problem, useless=useless)
        self.seq.stats.num_proposer_faults += 1

    def report_inner(self, problem: str) -> None:
        """Count a fault of a proposer inside this one, which cost the inner one's guesses alone."""
        self.drafter.report_inner_fault(self.seq.request.request_id, problem)
        self.seq.stats.num_proposer_faults += 1

    def count_stage(self, stage: str, num_drafted: int, num_accepted: int) -> None:
        """Count one pass of a stage of this proposer for the text."""
        self.seq.stats.observe_stage(f"{self.drafter.method.name}.{stage}", num_drafted, num_accepted)


def _asked(
    item: ScheduledSequence, place: int, drafter: Drafter | None, step: StepDraft, builders: TreeBuilders
) -> _Asked | None:
    """A turn with whoever shapes its draft; None, and nothing is drafted, where one of them cannot be had or no row is
    left. The rows that others have left over are taken out of the draft's."""
    turn, root = item.turns[place], step.root(item.turns[place].behind)
    budget, max_depth = turn.budget, turn.max_depth
    if turn.pooled:
        budget, step.spare = budget + step.spare, 0
        max_depth -= len(step.draft.paths[root]) - step.num_forced if root >= 0 else 0
        if drafter is None or budget <= 0 or max_depth <= 0:
            step.spare = budget
            return None
        budget = budget if turn.tree or turn.method.branches_freely else min(budget, max_depth)
    if drafter is None:
        return None
    try:
        builder = builders.of(drafter.proposer, turn.tree)
    except Exception as error:
        drafter.report_fault(item.seq.request.request_id, f"its tree builder raised {error!r}")
        item.seq.stats.num_proposer_faults += 1
        return None
    return _Asked(item, place, turn, drafter, step, builder, budget, max_depth, root)


def _ask(members: Seq[_Asked], noise: NoiseSource, vocab_size: int) -> list[Draft]:
    """The drafts of one proposer's requests. Whether its laws are believed was decided before it drew anything."""
    proposer: Proposer = members[0].drafter.proposer
    for asked in members:
        asked.drafter.breaker.served(asked.seq.request.request_id)
    requests, believed = [asked.request for asked in members], [not asked.drafter.demoted for asked in members]
    answers: Seq[object]
    try:
        answers = list(proposer.propose(requests, DraftNoise(noise)))
        if len(answers) != len(members):
            raise ValueError(f"{len(answers)} drafts for {len(members)} requests")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        answers = [error] * len(members)
    drafts = list[Draft]()
    for asked, request, answer, truthful in zip(members, requests, answers, believed, strict=True):
        sound, problem = inspected(request, answer, vocab_size)
        if problem is not None:
            asked.report(problem, useless=not sound.num_rows)
        drafts.append(sound if truthful else sound.opaque())
    return drafts


# --- Shows proposers the rows that a pass computed.


@dataclass(frozen=True)
class ComputedRows:
    """The rows of one sequence in a pass, after the verdict.

    Attributes:
        item: What was scheduled.
        step: Its draft.
        place: Of its segment in the pass.
        start: Position of the first row.
        accepted: Draft tokens that entered the text.
    """

    item: ScheduledSequence
    step: StepDraft
    place: int
    start: int
    accepted: tuple[int, ...]


def requirements(item: ScheduledSequence) -> list[Requirements]:
    """What the proposers of a sequence want to be shown."""
    return [drafter.requires for drafter in item.seq.drafters if drafter.requires is not None]


def aux_layers(items: Seq[ScheduledSequence]) -> list[int]:
    """Hidden states that a pass must bring."""
    return sorted({layer for item in items for needed in requirements(item) for layer in needed.aux_layers})


def show(computed: Seq[ComputedRows], out: ForwardOutput) -> None:
    """Call `observe` of every proposer that asked; one that raises has a fault with the sequences concerned."""
    groups: defaultdict[int, list[tuple[Drafter, ComputedRows]]] = defaultdict(list)
    for rows in computed:
        for drafter in rows.item.seq.drafters:
            if drafter.requires is not None:
                groups[id(drafter.proposer)].append((drafter, rows))
    for pairs in groups.values():
        try:
            pairs[0][0].proposer.observe([_shown_to(drafter, rows, out) for drafter, rows in pairs])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            for drafter, rows in pairs:
                drafter.report_fault(rows.item.seq.request.request_id, f"observe raised {error!r}")
                rows.item.seq.stats.num_proposer_faults += 1


def _shown_to(drafter: Drafter, rows: ComputedRows, out: ForwardOutput) -> ObservedRows:
    """What one proposer is shown of one sequence: all rows but the scratch rows of others."""
    needed = drafter.requires
    assert needed is not None
    seq, num_rows, draft = rows.item.seq, rows.item.num_rows, rows.step.draft
    first_node, first_scratch = num_rows, num_rows + len(draft)
    own = [row for part in rows.step.parts if part.drafter is drafter for row in range(*part.scratch)]
    shown = [*range(first_scratch), *(first_scratch + row for row in own)]
    places = {row: place for place, row in enumerate(shown)}
    root = num_rows - 1
    parents = [row - 1 for row in range(num_rows)]
    parents += [root if parent < 0 else first_node + parent for parent in draft.row_parents]
    depths: list[int] = []
    for row, parent in enumerate(parents):
        depths.append(row if row < num_rows else depths[parent] + 1)
    accepted = frozenset(rows.accepted)
    statuses = [RowStatus.TEXT] * num_rows
    statuses += [RowStatus.ACCEPTED if node in accepted else RowStatus.REJECTED for node in range(len(draft))]
    statuses += [RowStatus.SCRATCH] * len(own)
    tokens = (*seq.token_ids[rows.start : rows.start + num_rows], *draft.row_token_ids)
    return ObservedRows(
        sequence=seq.view,
        token_ids=tuple(tokens[row] for row in shown),
        positions=tuple(rows.start + depths[row] for row in shown),
        parents=tuple(places[parents[row]] if parents[row] >= 0 else -1 for row in shown),
        statuses=tuple(statuses),
        aux_hidden_states=_hidden_states(needed, shown, rows.place, out),
        target_top_k=_top_k(needed, shown, rows.place, out),
    )


def _hidden_states(needed: Requirements, shown: list[int], place: int, out: ForwardOutput) -> dict[int, Tensor]:
    if not needed.aux_layers:
        return {}
    first = out.row_spans[place][0]
    chosen = rows_at([first + row for row in shown])
    return {layer: out.aux_hidden_states[layer][chosen] for layer in needed.aux_layers}


def _top_k(needed: Requirements, shown: list[int], place: int, out: ForwardOutput) -> TopK | None:
    if not needed.target_top_k:
        return None
    (begin, end), first_row = out.logits_spans[place], out.logits_first_rows[place]
    rows = [(place, row) for place, row in enumerate(shown) if 0 <= row - first_row < end - begin]
    index = torch.tensor([begin + row - first_row for _, row in rows], dtype=torch.long, device=out.logits.device)
    values, tokens = out.logits[index].topk(needed.target_top_k, -1)
    return TopK(tuple(place for place, _ in rows), tokens, values)

"""Connects the governor with the engine: reports sequences and rounds to it, and carries out its choices."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import thread_time

from outrider.draft import Draft
from outrider.engine.proposing.drafting import StepDraft
from outrider.engine.proposing.experience import ExperienceFiles
from outrider.engine.proposing.proposers import ProposerSet
from outrider.engine.scheduling.scheduler import MOST_FORCED, ScheduledSequence, as_requested
from outrider.engine.sequence import Sequence, Status
from outrider.govern.acceptance import Experience
from outrider.govern.costs import CostTable, DraftWork, StepTimes, StepWork
from outrider.govern.governor import HOLDS, Candidate, Decision, Governor, Running, Shadow
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.method import Method, same_method
from outrider.propose.methods.draft_model import CATCH_UP_ROWS
from outrider.propose.speculation import SpeculationConfig
from outrider.verify.noise import NoiseSource

logger = logging.getLogger(__name__)

#: A method that has failed so often for a sequence is not chosen for it any more. Nor is a governor asked that has raised
#: so often.
_MOST_FAULTS = 3

#: Sets of methods for which it is remembered what was learnt; those unused for longest are forgotten.
_MOST_SETTINGS = 8

#: Why nothing is drafted for a text that has not begun.
_FIRST = "plain, until the first token is written"

#: What a text does for which no governor could decide.
_FAULT = Decision(None, 0, "plain, since the governor failed", "fault")

#: Where costs are scripted, nothing is known from earlier processes and nothing is kept.
_NOTHING_KEPT = ExperienceFiles({})

#: What a request leaves to be chosen from.
Candidates = tuple[SpeculationConfig, ...]

#: Times of a step as the governor is to believe them, from what was done and what a clock measured.
Clock = Callable[[StepWork, StepTimes], StepTimes]


def measured(work: StepWork, times: StepTimes) -> StepTimes:
    """What the clock said."""
    return times


@dataclass
class _Pending:
    """A draft that an idle lookup would have made, until the text has come past it.

    Attributes:
        method: Whose.
        draft: The draft.
        length: Of the text up to which it was compared.
        asked: Tokens that were asked for.
        seconds: That it took.
        node: Where the text is in it.
        accepted: Tokens of it that stand.
    """

    method: str
    draft: Draft
    length: int
    asked: int
    seconds: float = 0.0
    node: int = -1
    accepted: int = 0

    def follow(self, token_ids: Seq[int]) -> bool:
        """Go along the text; returns whether there may be more to come.

        Args:
            token_ids: The whole text.
        """
        for token in token_ids[self.length :]:
            child = self.draft.child(self.node, token)
            if child is None:
                return False
            self.node, self.accepted = child, self.accepted + 1
        self.length = len(token_ids)
        return bool(self.draft.children(self.node))


@dataclass
class _Governed:
    """One set of methods, and who chooses among them.

    Attributes:
        candidates: As requests leave the choice among them.
        members: By the name of the candidate.
        governor: Who chooses.
        experience: What the members showed in earlier processes.
        lengths: The members at each length.
        num_faults: How often a governor of theirs has raised.
    """

    candidates: Candidates
    members: dict[str, SpeculationConfig]
    governor: Governor
    experience: ExperienceFiles
    lengths: dict[tuple[str, int], SpeculationConfig] = field(default_factory=dict)
    num_faults: int = 0

    @cached_property
    def methods(self) -> dict[str, Method]:
        """Those of the members."""
        return {name: config.method for name, config in self.members.items() if config.method is not None}

    @cached_property
    def models(self) -> frozenset[str]:
        """The members with a model of their own."""
        return frozenset(name for name, each in self.governor.candidates.items() if not each.lookup)

    @property
    def is_off(self) -> bool:
        """Whether its governor has raised too often to be asked again."""
        return self.num_faults >= _MOST_FAULTS

    def config(self, decision: Decision) -> SpeculationConfig:
        """The settings of a decision to draft."""
        assert decision.method is not None
        key = (decision.method, decision.num_draft_tokens)
        if key not in self.lengths:
            member = self.members[decision.method]
            assert member.method is not None
            length = max(decision.num_draft_tokens, member.method.least_length())
            self.lengths[key] = member.replace(num_draft_tokens=length)
        return self.lengths[key]


class Governing:
    """Lets governors decide for the requests that leave the choice to the engine.

    Args:
        proposers: Who may draft.
        calibrate: Finds what passes cost, once, when the first such request comes; given the draft methods' proposers.
        remember: Finds what methods showed in earlier processes; given their settings and proposers.
        invariant: Whether a row's bits do not depend on the other rows of its pass.
        max_rows: Rows that a pass may hold.

    Attributes:
        decisions: Of the step that is under way, by sequence.
    """

    def __init__(
        self,
        proposers: ProposerSet,
        calibrate: Callable[[Mapping[str, Proposer]], CostTable],
        remember: Callable[[Mapping[str, SpeculationConfig], Mapping[str, Proposer]], ExperienceFiles],
        *,
        invariant: bool,
        max_rows: int,
    ) -> None:
        self.decisions: dict[int, Decision] = {}
        self._proposers = proposers
        self._calibrate = calibrate
        self._remember = remember
        self._invariant = invariant
        self._max_rows = max_rows
        self._clock: Clock = measured
        self._scripted: CostTable | None = None
        self._holds = HOLDS
        self._governed: list[_Governed] = []
        self._of: dict[int, _Governed] = {}
        self._pending: dict[int, list[_Pending]] = {}
        self._probs: dict[int, deque[float]] = {}
        self._decoding: list[Sequence] = []

    # -- life ----------------------------------------------------------------------------------------------------------

    def admit(self, candidates: Candidates) -> None:
        """Requests that leave this choice will come: their methods are built and costs are measured now, not in a step.

        Raises:
            InputError, ModelError, ProposerError: A method cannot be used.
        """
        self._find(candidates)

    def begin(self, seq: Sequence) -> None:
        """A sequence begins to decode."""
        asked = seq.request.speculation
        if asked.engine_chooses and seq.seq_id not in self._of:
            found = self._find(asked.candidates)
            if not found.is_off:
                with self._contained(found):
                    self._of[seq.seq_id] = found
                    found.governor.begin(seq.seq_id, seq.request.options.namespace)

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended."""
        found = self._of.get(seq.seq_id)
        self._drop(seq.seq_id)
        if found is not None:
            with self._contained(found):
                found.governor.finish(seq.seq_id)
                found.experience.keep(found.governor.acceptance)

    def _drop(self, seq_id: int) -> None:
        for kept in (self._of, self._pending, self._probs, self.decisions):
            kept.pop(seq_id, None)

    @contextmanager
    def _contained(self, governed: _Governed) -> Iterator[None]:
        """What a governor raises in this block costs the choice, and no request. What it has learnt may be at fault, and so
        may the table of costs: another one begins with assumed costs, and knows its texts from the next step on."""
        try:
            yield
        except Exception:
            governed.num_faults += 1
            then = "its requests are decoded plainly from now on" if governed.is_off else "another one begins"
            logger.exception("the governor of %s failed; %s", ", ".join(governed.members), then)
            governed.governor = self._new_governor(governed.members, CostTable.assumed())
            for seq_id in [seq_id for seq_id, owner in self._of.items() if owner is governed]:
                self._drop(seq_id)

    def forget(self) -> None:
        """Forget everything that was learnt, and let the proposers go; while no such request is under way."""
        self._governed, self._of, self._pending, self._probs, self.decisions = [], {}, {}, {}, {}

    def script(self, table: CostTable, clock: Clock, holds: int = HOLDS) -> None:
        """Take these costs and this clock instead of a calibration and the machine's, and forget what was learnt. In the
        proofs both must come again on the same path."""
        self._scripted, self._clock, self._holds = table, clock, holds
        for found in self._governed:
            found.governor, found.num_faults = self._new_governor(found.members, table), 0
            found.experience = _NOTHING_KEPT
        self._of, self._pending, self._probs, self.decisions = {}, {}, {}, {}

    def _find(self, candidates: Candidates) -> _Governed:
        for place, found in enumerate(self._governed):
            if found.candidates == candidates:
                self._governed.append(self._governed.pop(place))  # the most recently used come last
                return found
        members: dict[str, SpeculationConfig] = {}
        for config in candidates:
            if config.method is not None:
                name = config.name if config.name not in members else f"{config.name} {len(members) + 1}"
                members[name] = config
        proposers = {name: self._proposers.get(c.method) for name, c in members.items() if c.method is not None}
        table, experience = self._scripted, _NOTHING_KEPT
        if table is None:
            table, experience = self._calibrate(proposers), self._remember(members, proposers)
        found = _Governed(candidates, members, self._new_governor(members, table, experience.read()), experience)
        idle = [each for each in self._governed if all(each is not used for used in self._of.values())]
        for each in idle[: max(0, len(self._governed) + 1 - _MOST_SETTINGS)]:
            self._governed.remove(each)
        self._governed.append(found)
        return found

    def _new_governor(
        self, members: Mapping[str, SpeculationConfig], table: CostTable, known: Mapping[str, Experience] | None = None
    ) -> Governor:
        experience = (known or {}).get
        candidates = [
            Candidate(
                name,
                config.num_draft_tokens,
                lookup=not config.method.grows_from_probabilities,
                experience=experience(name),
            )
            for name, config in members.items()
            if config.method is not None
        ]
        return Governor(candidates, table, self._max_rows, self._holds, CATCH_UP_ROWS)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def decide(self, running: Seq[Sequence], depth: Callable[[Sequence], int]) -> None:
        """Decide for the coming step, before it is scheduled.

        Args:
            running: All sequences that run.
            depth: Longest draft that may be of use to one.
        """
        self._decoding = [seq for seq in running if seq.status is Status.RUNNING and seq.num_missing == 1 and seq.forked]
        if self._all_rest():
            return
        self.decisions.clear()
        for seq in self._decoding:
            self.begin(seq)
        for found in self._governed:
            begun = thread_time()
            own = [self._running(seq, found, depth(seq)) for seq in self._decoding if self._of.get(seq.seq_id) is found]
            if own:
                with self._contained(found):
                    self.decisions |= found.governor.decide(own)
                    found.governor.observe_own_seconds(self._believed(thread_time() - begun, texts=0))
        for seq in self._decoding:
            if seq.request.speculation.engine_chooses:
                self.decisions.setdefault(seq.seq_id, _FAULT)

    def _all_rest(self) -> bool:
        """Whether all that decode were decided for before, by one governor, and go on plainly as then."""
        if len(self._governed) != 1 or self.decisions.keys() != {seq.seq_id for seq in self._decoding}:
            return False
        (governed,) = self._governed
        with self._contained(governed):
            if governed.governor.rests([seq.seq_id for seq in self._decoding]):
                governed.governor.rest()
                return True
        return False

    def planner(self, seq: Sequence) -> tuple[SpeculationConfig, ...]:
        """A planner: the governor's decision where the request leaves it the choice, else what the request asks for."""
        if not seq.request.speculation.engine_chooses:
            return as_requested(seq)
        decision = self.decisions.get(seq.seq_id)
        if decision is None or decision.method is None:
            return ()
        return (self._of[seq.seq_id].config(decision),)

    def reason(self, seq: Sequence, *, drafted: bool) -> str:
        """Why a sequence does what it does in this step; empty where its request asked for it.

        Args:
            seq: Which.
            drafted: Whether there is a draft. A method that was asked may have had no guess.
        """
        if not seq.request.speculation.engine_chooses:
            return ""
        decision = self.decisions.get(seq.seq_id)
        if decision is None:
            return _FIRST
        if drafted or decision.method is None:
            return decision.reason
        return f"{decision.method} was asked ({decision.reason}), and had no guess"

    def _running(self, seq: Sequence, found: _Governed, depth: int) -> Running:
        why, params = "", seq.request.params
        if not seq.num_output_tokens:
            why = _FIRST
        elif not self._invariant and (params.greedy or params.seed is not None):
            why = "plain, since rows depend on their pass here, and this text must not depend on a clock"
        methods = tuple(name for name, method in found.methods.items() if _usable(seq, method))
        lags = {name: self._lag(seq, found.methods[name]) for name in methods if name in found.models}
        forced = len(seq.view.processing.forced(min(depth, MOST_FORCED)))
        longest = 0 if why else depth - forced
        return Running(seq.seq_id, len(seq.token_ids), longest, methods, lags, why, forced)

    def _lag(self, seq: Sequence, method: Method) -> int:
        drafter = seq.drafter(method)
        proposer = self._proposers.get(method) if drafter is None else drafter.proposer
        return proposer.lag(seq.view)

    # -- scoring idle methods --------------------------------------------------------------------------------------------

    def shadows(self) -> list[tuple[Sequence, Method, Shadow]]:
        """Idle methods that are to be scored in this step."""
        found = []
        for governed in self._governed:
            with self._contained(governed):
                if not governed.governor.scores_now:
                    continue
            begun, chosen = thread_time(), list[Shadow]()
            by_id = {seq.seq_id: seq for seq in self._decoding if self._of.get(seq.seq_id) is governed}
            with self._contained(governed):
                chosen = governed.governor.shadows([self._running(seq, governed, 1) for seq in by_id.values()])
                governed.governor.observe_own_seconds(self._believed(thread_time() - begun, texts=0))
            for shadow in chosen:
                if not any(each.method == shadow.method for each in self._pending.get(shadow.request, ())):
                    method = governed.members[shadow.method].method
                    assert method is not None
                    found.append((by_id[shadow.request], method, shadow))
        return found

    def shadow(self, seq: Sequence, proposer: Proposer, index: int, shadow: Shadow, noise: NoiseSource) -> None:
        """Ask an idle lookup for a draft that nobody will verify, and remember it until the text has come past it. A model
        reads what it has yet to read, and what it would have drafted there is compared with what was written."""
        governed = self._of.get(seq.seq_id)
        if governed is None:
            return  # its governor failed meanwhile
        governor = governed.governor
        if not governor.candidates[shadow.method].lookup:
            overlaps = proposer.overlaps(seq.view, list(self._probs.get(seq.seq_id, ())))
            with self._contained(governed):
                governor.observe_overlaps(seq.seq_id, shadow.method, overlaps)
            return
        asked = governor.candidates[shadow.method].longest
        (draft,) = proposer.propose([ProposeRequest(seq.view, asked, asked, drafter=index)], DraftNoise(noise))
        pending = _Pending(shadow.method, draft, len(seq.token_ids), asked)
        self._pending.setdefault(seq.seq_id, []).append(pending)

    def watches(self, seq: Sequence) -> bool:
        """Whether it is to be told with which probabilities the target writes this text: where a model is idle."""
        governed, decision = self._of.get(seq.seq_id), self.decisions.get(seq.seq_id)
        return governed is not None and decision is not None and decision.method is None and bool(governed.models)

    def note(self, seq: Sequence, probs: Iterable[float]) -> None:
        """The target wrote tokens with these probabilities."""
        self._probs.setdefault(seq.seq_id, deque(maxlen=CATCH_UP_ROWS)).extend(probs)

    def spent(self, seq: Sequence, shadow: Shadow, seconds: float) -> None:
        """A shadow took so long."""
        governed = self._of.get(seq.seq_id)
        if governed is None:
            return  # its governor failed meanwhile
        seconds = self._believed(seconds)
        pending = [each for each in self._pending.get(seq.seq_id, ()) if each.method == shadow.method]
        if pending:
            pending[-1].seconds = seconds  # and more, until it is known what it was worth
        else:
            with self._contained(governed):
                governed.governor.observe_shadow_seconds(shadow.method, 1, seconds)

    def _believed(self, seconds: float, texts: int = 1) -> float:
        """Seconds of something that was done for one text beside the step, or for none but the governor itself. What this
        thread did alone is measured by its own clock, so that pauses of the machine cost nothing."""
        return self._clock(StepWork(0, texts, 0), StepTimes(seconds, 0.0, 0.0)).propose

    def _settle(self, seq: Sequence) -> None:
        """Score the drafts that the text has come past."""
        left = []
        for pending in self._pending.pop(seq.seq_id, ()):
            if pending.follow(seq.token_ids):
                left.append(pending)
                continue
            begun, governor = thread_time(), self._of[seq.seq_id].governor
            governor.observe_draft(
                seq.seq_id,
                pending.method,
                pending.asked,
                len(pending.draft),
                pending.accepted,
                rejected=bool(pending.draft.children(pending.node)),
                shadow=True,
            )
            seconds = pending.seconds + self._believed(thread_time() - begun)
            governor.observe_shadow_seconds(pending.method, 1, seconds)
        if left:
            self._pending[seq.seq_id] = left

    # -- learning ------------------------------------------------------------------------------------------------------

    def observe(
        self, items: Seq[ScheduledSequence], drafts: Seq[StepDraft], accepted: Mapping[int, int], times: StepTimes
    ) -> None:
        """What became of a step.

        Args:
            items: What was scheduled.
            drafts: Of each.
            accepted: Draft tokens that entered the text, by place, where a token was due.
            times: Seconds of its phases.
        """
        if not self._of:
            return
        for place, (item, step) in enumerate(zip(items, drafts, strict=True)):
            decision = self.decisions.get(item.seq.seq_id)
            if decision is not None and decision.method is None and item.seq.seq_id not in self._pending:
                continue  # at once: this is every text of a batch that rests
            governed = self._of.get(item.seq.seq_id)
            if governed is None or place not in accepted:
                continue
            if not self.watches(item.seq):
                self._probs.pop(item.seq.seq_id, None)  # what comes next does not follow on it
            with self._contained(governed):
                self._observe_draft(governed, item, step, accepted[place])
                self._settle(item.seq)
        if all(item.num_rows == 1 and item.seq.seq_id in self._of for item in items):
            work = _work(items, drafts, self.decisions)
            believed = self._clock(work, times)
            owners = [self._of[item.seq.seq_id] for item in items]
            for governed in self._governed:
                if all(owner is governed for owner in owners):  # another one's drafts would be taken for its own
                    with self._contained(governed):
                        governed.governor.observe_step(work, believed)

    def _observe_draft(self, governed: _Governed, item: ScheduledSequence, step: StepDraft, accepted: int) -> None:
        """Count what the method drafted: behind what the structure forces, and so it was tried where all of that stands."""
        decision, accepted = self.decisions.get(item.seq.seq_id), accepted - step.num_forced
        if decision is None or decision.method is None or not item.turns or accepted < 0:
            return
        ended = item.seq.status is Status.FINISHED
        governed.governor.observe_draft(
            item.seq.seq_id,
            decision.method,
            item.budget,
            len(step.draft) - step.num_forced,
            accepted,
            rejected=accepted < step.draft.depth - step.num_forced and not ended,
        )


def _usable(seq: Sequence, method: Method) -> bool:
    """Whether a method's proposer can be had, and has not failed too often for this sequence."""
    drafter = seq.drafter(method)
    if drafter is None:
        return not any(same_method(method, refused) for refused in seq.refused)
    return drafter.num_faults < _MOST_FAULTS


def _work(items: Seq[ScheduledSequence], drafts: Seq[StepDraft], decisions: Mapping[int, Decision]) -> StepWork:
    by_method: dict[str, list[int]] = {}
    for item in items:
        decision = decisions.get(item.seq.seq_id)
        if decision is not None and decision.method is not None and item.turns:
            by_method.setdefault(decision.method, []).append(item.budget)
    work = tuple(DraftWork(name, len(budgets), max(budgets)) for name, budgets in sorted(by_method.items()))
    context = sum(len(item.seq.token_ids) for item in items)
    rows, forced = sum(step.draft.num_rows for step in drafts), sum(step.num_forced for step in drafts)
    return StepWork(len(items) + rows, len(items), context, work, forced)

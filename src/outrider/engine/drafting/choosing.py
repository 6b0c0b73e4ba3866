"""Connects the governor with the engine: reports sequences and rounds to it, and carries out its choices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from time import thread_time

from outrider.draft import Law
from outrider.engine.drafting.asking import Committed, DraftPart, StepDraft
from outrider.engine.drafting.choices import Calibrate, Candidates, ChoiceSet, ChoiceSets, Remember, ShadowScores
from outrider.engine.drafting.planning import MOST_FORCED, RowShares, as_requested
from outrider.engine.drafting.proposers import ProposerSet
from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.sequence import Drafter, Sequence, Status
from outrider.govern.costs import CostTable, DraftWork, StepTimes, StepWork
from outrider.govern.decision import Decision, MemberDraft, Running
from outrider.govern.governor import HOLDS
from outrider.govern.shadows import Shadow
from outrider.model.runner import ForwardOutput
from outrider.propose.settings import Method, SpeculationConfig, same_method
from outrider.verify.logits import largest_chances
from outrider.verify.noise import NoiseSource
from outrider.verify.verifier import Verdict

logger = logging.getLogger(__name__)

#: A method that has failed so often for a sequence is not chosen for it any more.
_MOST_FAULTS = 3

#: Rounds of a text in each of which it is looked at how sure the target is; later it is done in every so many. Shows in
#: benchmarks.governor_rivals, the overhead.
_LOOKS, _LOOKS_EVERY = 16, 4

#: Why nothing is drafted for a text that has not begun.
_FIRST = "plain, until the first token is written"

#: What a text does for which no governor could decide.
_FAULT = Decision(None, 0, "plain, since the governor failed", "fault")

#: Times of a step as the governor is to believe them, from what was done and what a clock measured.
Clock = Callable[[StepWork, StepTimes], StepTimes]


def measured(work: StepWork, times: StepTimes) -> StepTimes:
    """The default `Clock`: returns the measured times unchanged."""
    return times


class MethodChoice:
    """Lets governors decide for the requests that leave the choice to the engine.

    `invariant` says whether a row's bits do not depend on the other rows of its pass. Without it, a text that must not
    depend on a clock is decoded plainly.
    """

    def __init__(
        self,
        proposers: ProposerSet,
        calibrate: Calibrate,
        remember: Remember,
        shares: RowShares,
        *,
        invariant: bool,
        max_rows: int,
    ) -> None:
        self.decisions: dict[int, Decision] = {}  # for each sequence of the current step
        self._proposers = proposers
        self._invariant = invariant
        self._clock: Clock = measured
        self._sets = ChoiceSets(proposers, calibrate, remember, shares, max_rows)
        self._of: dict[int, ChoiceSet] = {}
        self._scores = ShadowScores()
        self._decoding: list[Sequence] = []

    # -- life ----------------------------------------------------------------------------------------------------------

    def admit(self, candidates: Candidates) -> None:
        """Build the methods of requests that will leave this choice, and measure costs, now and not in a step. It raises
        what ProposerSet.prepare does."""
        self._find(candidates)

    def _begin(self, seq: Sequence) -> None:
        """A sequence begins to decode."""
        if seq.seq_id not in self._of:
            found = self._find(seq.request.speculation.candidates)
            if not found.is_off:
                with self._contained(found):
                    self._of[seq.seq_id] = found
                    # What drafts are worth in calls and structures says little of a tenant's other texts.
                    kind = seq.request.params.structured_outputs is not None
                    found.governor.begin(seq.seq_id, (seq.request.options.namespace, kind))

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended."""
        found = self._of.get(seq.seq_id)
        self._drop(seq.seq_id)
        if found is not None:
            with self._contained(found):
                found.governor.finish(seq.seq_id, at_length=seq.finish_reason == "length")
                found.experience.keep(found.governor.acceptance)

    def _drop(self, seq_id: int) -> None:
        self._of.pop(seq_id, None)
        self.decisions.pop(seq_id, None)
        self._scores.drop(seq_id)

    @contextmanager
    def _contained(self, choice_set: ChoiceSet) -> Iterator[None]:
        """A block in which a governor costs the choice, and no request, if it raises. What it has learnt may be at fault,
        and so may the table of costs: another one begins with assumed costs, and knows its texts from the next step on."""
        try:
            yield
        except Exception:
            choice_set.num_faults += 1
            then = "its requests are decoded plainly from now on" if choice_set.is_off else "another one begins"
            logger.exception("the governor of %s failed; %s", ", ".join(choice_set.choices), then)
            choice_set.governor = self._sets.new_governor(choice_set.choices, choice_set.members, CostTable.assumed())
            for seq_id in [seq_id for seq_id, owner in self._of.items() if owner is choice_set]:
                self._drop(seq_id)

    def forget(self) -> None:
        """Forget everything that was learnt, and let the proposers go; while no such request is under way."""
        self._sets.alive.clear()
        self._forget_texts()

    def script(self, table: CostTable, clock: Clock, holds: int = HOLDS) -> None:
        """Take these costs and this clock instead of a calibration and the machine's, and forget what was learnt. In the
        proofs both must come again on the same path."""
        self._clock = clock
        self._sets.script(table, holds)
        self._forget_texts()

    def _forget_texts(self) -> None:
        self._of, self.decisions = {}, {}
        self._scores.clear()

    def _find(self, candidates: Candidates) -> ChoiceSet:
        return self._sets.find(candidates, self._of.values())

    # -- deciding ------------------------------------------------------------------------------------------------------

    def decide(self, decoding: list[Sequence]) -> None:
        """Decide for the coming step, in which these sequences decode that leave the choice to the engine."""
        self._decoding = decoding
        if self._all_rest():
            return
        self.decisions.clear()
        if not decoding:
            return
        for seq in decoding:
            self._begin(seq)
        for found in self._sets.alive:
            begun = thread_time()
            texts = [seq for seq in decoding if self._of.get(seq.seq_id) is found]
            own = [self._running(seq, found, seq.useful_depth) for seq in texts]
            if own:
                with self._contained(found):
                    self.decisions |= found.governor.decide(own)
                    found.governor.observe_own_seconds(self._believed(thread_time() - begun, texts=0))
        for seq in decoding:
            self.decisions.setdefault(seq.seq_id, _FAULT)

    def _all_rest(self) -> bool:
        """True if all that decode were decided for before, by one governor, and go on plainly as then."""
        if len(self._sets.alive) != 1 or self.decisions.keys() != {seq.seq_id for seq in self._decoding}:
            return False
        (choice_set,) = self._sets.alive
        with self._contained(choice_set):
            if choice_set.governor.rests([seq.seq_id for seq in self._decoding]):
                choice_set.governor.rest()
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
        """Why a sequence does what it does in this step; empty where its request asked for it. A method that was asked may
        have had no guess, and then nothing was `drafted`."""
        if not seq.request.speculation.engine_chooses:
            return ""
        decision = self.decisions.get(seq.seq_id)
        if decision is None:
            return _FIRST
        if drafted or decision.method is None:
            return decision.reason
        return f"{decision.method} was asked ({decision.reason}), and had no guess"

    def _running(self, seq: Sequence, found: ChoiceSet, depth: int) -> Running:
        why = ""
        if not self._invariant and seq.request.comes_again:
            why = "plain, since rows depend on their pass here, and this text must not depend on a clock"
        usable = {name for name, method in found.methods.items() if _usable(seq, method)}
        methods = tuple(name for name, each in found.governor.candidates.items() if usable.issuperset(each.members))
        lags = {name: self._lag(seq, found.methods[name]) for name in methods if name in found.models}
        forced = len(seq.view.processing.forced(min(depth, MOST_FORCED)))
        longest = 0 if why else depth - forced
        written = seq.num_output_tokens
        to_write = seq.request.params.max_tokens - written
        return Running(seq.seq_id, len(seq.token_ids), longest, methods, lags, why, forced, to_write, written)

    def _lag(self, seq: Sequence, method: Method) -> int:
        drafter = seq.drafter(method)
        proposer = self._proposers.get(method) if drafter is None else drafter.proposer
        return proposer.lag(seq.view)

    # -- scoring idle methods --------------------------------------------------------------------------------------------

    def shadows(self) -> list[tuple[Sequence, Method, Shadow]]:
        """Idle methods that are to be scored in this step."""
        found = []
        for choice_set in self._sets.alive if self._decoding else ():
            with self._contained(choice_set):
                if not choice_set.governor.scores_now:
                    continue
            begun, chosen = thread_time(), list[Shadow]()
            by_id = {seq.seq_id: seq for seq in self._decoding if self._of.get(seq.seq_id) is choice_set}
            with self._contained(choice_set):
                chosen = choice_set.governor.shadows([self._running(seq, choice_set, 1) for seq in by_id.values()])
                choice_set.governor.observe_own_seconds(self._believed(thread_time() - begun, texts=0))
            for shadow in chosen:
                if not self._scores.awaits(by_id[shadow.request], shadow.method):
                    method = choice_set.members[shadow.method].method
                    assert method is not None
                    found.append((by_id[shadow.request], method, shadow))
        return found

    def shadow(self, seq: Sequence, drafter: Drafter, shadow: Shadow, noise: NoiseSource) -> None:
        """Ask an idle lookup for a draft that nobody will verify, and remember it until the text has come past it. A model
        reads what it has yet to read, and what it would have drafted there is compared with what was written."""
        choice_set = self._of.get(seq.seq_id)
        if choice_set is None:
            return  # its governor failed meanwhile
        overlaps = self._scores.ask(seq, choice_set.governor, drafter, shadow, noise)
        if overlaps is not None:
            with self._contained(choice_set):
                choice_set.governor.observe_overlaps(seq.seq_id, shadow.method, overlaps)

    def spent(self, seq: Sequence, shadow: Shadow, seconds: float) -> None:
        """A shadow took so long."""
        choice_set = self._of.get(seq.seq_id)
        if choice_set is None:
            return  # its governor failed meanwhile
        seconds = self._believed(seconds)
        if not self._scores.charge(seq, shadow.method, seconds):
            with self._contained(choice_set):
                choice_set.governor.observe_shadow_seconds(shadow.method, 1, seconds)

    def _believed(self, seconds: float, texts: int = 1) -> float:
        """Seconds of something that was done for one text beside the step, or for none but the governor itself. What this
        thread did alone is measured by its own clock, so that pauses of the machine cost nothing."""
        return self._clock(StepWork(0, texts, 0), StepTimes(seconds, 0.0, 0.0)).propose

    # -- learning ------------------------------------------------------------------------------------------------------

    def observe(
        self, items: Seq[ScheduledSequence], drafts: Seq[StepDraft], committed: Seq[Committed], times: StepTimes
    ) -> None:
        """Learn from a step that has ended, with the seconds of its phases."""
        if not self._of:
            return
        for rows in committed:
            seq = rows.item.seq
            choice_set, decision = self._of.get(seq.seq_id), self.decisions.get(seq.seq_id)
            if rows.verdict is None or choice_set is None:
                continue
            plain = decision is not None and decision.method is None
            if not (plain and choice_set.models):
                self._scores.break_off(seq)
            elif rows.verdict.chances:  # an idle draft model is scored against the target's probabilities
                self._scores.note(seq, rows.verdict.chances)
            if plain and not self._scores.awaits(seq):
                continue  # at once: this is every text of a batch that rests
            with self._contained(choice_set):
                self._observe_draft(choice_set, rows.item, rows.step, rows.verdict, len(rows.accepted))
                self._scores.settle(seq, choice_set.governor, self._believed)
        if all(item.num_rows == 1 and item.seq.seq_id in self._of for item in items):
            work = self._work(items, drafts)
            believed = self._clock(work, times)
            owners = [self._of[item.seq.seq_id] for item in items]
            for choice_set in self._sets.alive:
                if all(owner is choice_set for owner in owners):  # another one's drafts would be taken for its own
                    with self._contained(choice_set):
                        choice_set.governor.observe_step(work, believed)

    def observe_target(self, committed: Seq[Committed], out: ForwardOutput) -> None:
        """Take note of how sure the target is of the texts, by its logits before any parameter, where draft models may be
        chosen: of lookups it says nothing. Later in a text it is done in some steps only, since each look takes time."""
        for rows in committed:
            choice_set, done = self._of.get(rows.item.seq.seq_id), rows.sequence.round
            if rows.verdict is None or choice_set is None or not choice_set.models:
                continue
            if done > _LOOKS and done % _LOOKS_EVERY:
                continue
            begun = thread_time()
            with self._contained(choice_set):
                root = out.logits_row(rows.place, rows.num_due - 1)
                seen = [root, *(root + 1 + node for node in rows.accepted)]
                first, last = seen[0], seen[-1] + 1
                logits = out.logits[first:last] if last - first == len(seen) else out.logits[seen]  # a chain is not copied
                choice_set.governor.observe_target(rows.item.seq.seq_id, largest_chances(logits))
                choice_set.governor.observe_own_seconds(self._believed(thread_time() - begun, texts=0))

    def _observe_draft(
        self, choice_set: ChoiceSet, item: ScheduledSequence, step: StepDraft, verdict: Verdict, entered: int
    ) -> None:
        """Count what was drafted: behind what the structure forces, and so it was tried where all of that stands."""
        decision, accepted = self.decisions.get(item.seq.seq_id), entered - step.num_forced
        if decision is None or decision.method is None or not item.turns or accepted < 0:
            return
        members = choice_set.governor.candidates[decision.method].members
        if members != (decision.method,):
            found = member_drafts(members, item, step, verdict, entered)
            choice_set.governor.observe_members(item.seq.seq_id, decision.method, found, accepted)
            return
        ended = item.seq.status is Status.FINISHED
        choice_set.governor.observe_draft(
            item.seq.seq_id,
            decision.method,
            item.budget,
            len(step.draft) - step.num_forced,
            accepted,
            rejected=accepted < step.draft.depth - step.num_forced and not ended,
        )

    def _work(self, items: Seq[ScheduledSequence], drafts: Seq[StepDraft]) -> StepWork:
        """The work of a step, by member. A member may have had rows that those before it left over."""
        found: dict[tuple[str, str], list[int]] = {}
        for item, step in zip(items, drafts, strict=True):
            decision, choice_set = self.decisions.get(item.seq.seq_id), self._of[item.seq.seq_id]
            if decision is not None and decision.method is not None and item.turns:
                members = choice_set.governor.candidates[decision.method].members
                drafted = {part.turn: len(part.draft) for part in step.parts if part.drafter is not None}
                for place, (name, turn) in enumerate(zip(members, item.turns, strict=True)):
                    levels = max(turn.budget, drafted.get(place, 0))
                    if levels:
                        found.setdefault((decision.method, name), []).append(levels)
        work = tuple(
            DraftWork(name, len(asked), max(asked), chosen="" if chosen == name else chosen)
            for (chosen, name), asked in sorted(found.items())
        )
        context = sum(len(item.seq.token_ids) for item in items)
        rows, forced = sum(step.draft.num_rows for step in drafts), sum(step.num_forced for step in drafts)
        return StepWork(len(items) + rows, len(items), context, work, forced)


def _usable(seq: Sequence, method: Method) -> bool:
    """True if a method's proposer can be had, and has not failed too often for this sequence."""
    drafter = seq.drafter(method)
    if drafter is None:
        return not any(same_method(method, refused) for refused in seq.refused)
    return drafter.num_faults < _MOST_FAULTS


# --- What became of the drafts of several members, each by itself, from one verified draft of all of them.


def member_drafts(
    members: Seq[str], item: ScheduledSequence, step: StepDraft, verdict: Verdict, entered: int
) -> list[MemberDraft]:
    """The outcome of each member's part, by the names of the members in the order of their turns. So many draft tokens
    `entered` the text."""
    parts = {part.turn: part for part in step.parts if part.drafter is not None}
    found = []
    for place, (name, turn) in enumerate(zip(members, item.turns, strict=True)):
        part = parts.get(place)
        if part is not None:
            scores = _scores(item, step, part, verdict, entered)
            found.append(MemberDraft(name, max(turn.budget, len(part.draft)), len(part.draft), scores))
        elif turn.budget:
            found.append(MemberDraft(name, turn.budget, 0, ()))
    return found


def _scores(item: ScheduledSequence, step: StepDraft, part: DraftPart, verdict: Verdict, entered: int) -> list[float]:
    """For each place where it proposed a token and to which the text came: whether one of its tokens stood."""
    path, ended = (-1, *verdict.path[:entered]), item.seq.status is Status.FINISHED
    tokens = [*(step.draft.token_ids[node] for node in path[1:]), verdict.token_id]
    tested = bool(verdict.chances) and item.rule not in ("walk", "coupled") and not item.coupled
    found: list[float] = []
    if part.root not in path:
        return found
    for place in range(path.index(part.root), len(path)):
        own = [node for node, parent in enumerate(part.draft.parents) if _behind(part, parent) == path[place]]
        if not own or (place == entered and ended):
            break  # nothing is known of the next one
        stood = place < entered and any(part.nodes[node] == path[place + 1] for node in own)
        contested = tested and _is_contested(step, part, path[place])
        found.append(_overlap(part, own[0], tokens[place], verdict.chances[place]) if contested else float(stood))
        if not stood:
            break
    return found


def _behind(part: DraftPart, parent: int) -> int:
    """The node of the whole draft behind which a node of a part stands, from its parent in the part."""
    return part.root if parent < 0 else part.nodes[parent]


def _is_contested(step: StepDraft, part: DraftPart, behind: int) -> bool:
    """True if a token that it drew behind a node was tested beside those that others drew there. Then it depends on which
    was tested first whether it stood. Guesses that nobody drew are compared behind all tests."""
    draft = step.draft
    draws = [draw for draw, node in enumerate(draft.nodes) if draft.parents[node] == behind]
    drawn = {part.draws[0] <= draw < part.draws[1] for draw in draws if draft.laws[draw] is Law.SAMPLED}
    return drawn == {True, False}


def _overlap(part: DraftPart, node: int, token: int, target: float) -> float:
    """The chance with which a drawn token would have stood alone, by the token that the target chose: the overlap of both
    laws is the mean of min(1, q / p) over tokens of the target, whose probability for one is p."""
    assert part.draft.draft_probs is not None, "a sampled draft carries its probabilities"
    return min(1.0, float(part.draft.draft_probs[part.draft.nodes.index(node), token]) / max(target, 1e-12))

"""Everything that the engine does about drafts, behind one door."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from time import perf_counter

from outrider.config import SchedulerConfig
from outrider.engine.drafting.asking import Committed, StepDraft, prefill_all, propose_all, show, teach
from outrider.engine.drafting.calibration import ExperienceFiles, calibrate
from outrider.engine.drafting.choosing import Clock, MethodChoice
from outrider.engine.drafting.planning import Planner, RowShares, plan_forced, plan_turns
from outrider.engine.drafting.proposers import AcceptanceCheck, Drafters, ProposerSet, TreeBuilders
from outrider.engine.scheduler import Schedule, Scheduler
from outrider.engine.sequence import Request, Sequence
from outrider.engine.stats import EngineStats
from outrider.govern.costs import CostTable, StepTimes
from outrider.govern.governor import HOLDS
from outrider.model.memory import measure_passes
from outrider.model.runner import ForwardOutput, ModelRunner
from outrider.propose.base import Proposer
from outrider.propose.compositions import parts_of
from outrider.propose.draft_model import DraftModelProposer
from outrider.propose.host import blaming
from outrider.propose.settings import Method, SpeculationConfig
from outrider.propose.trees.adaptive import Pace
from outrider.verify.noise import NoiseSource

logger = logging.getLogger(__name__)


class Drafting:
    """Plans who drafts in a step, has them propose, shows them the pass, and learns from what stands of their drafts.

    A request begins with its proposers, and a text finishes with them. What raises here costs drafts, and no text.
    """

    def __init__(self, runner: ModelRunner, config: SchedulerConfig, proposers: ProposerSet, stats: EngineStats) -> None:
        self.proposers = proposers
        self.builders = TreeBuilders(proposers, lambda: Pace(measure_passes(runner)), invariant=runner.invariant)
        self._stats = stats
        self._shares = RowShares()
        self._choice = MethodChoice(
            proposers,
            lambda drafts: calibrate(runner, _runners(drafts)),
            partial(ExperienceFiles.of, runner),
            self._shares,
            invariant=runner.invariant,
            max_rows=config.max_num_batched_tokens,
        )
        self.as_asked: Planner = self._choice.planner  # the request's settings, or the engine's choice where it has it
        self.planner: Planner = self.as_asked  # another one may be put here between two steps
        self._drafters = Drafters(proposers)
        self._check = AcceptanceCheck()

    # -- life ----------------------------------------------------------------------------------------------------------

    def load(self, speculation: SpeculationConfig) -> None:
        """Load what these settings draft with, and measure what it costs where the engine chooses; now and not in a step.
        It raises what ProposerSet.prepare does."""
        if speculation.engine_chooses:
            self._choice.admit(speculation.candidates)
        else:
            self.proposers.prepare(speculation)
        for each in speculation.candidates:
            for part in parts_of(each):
                self.builders.prepare(part)

    def begin(self, request: Request) -> None:
        """Have the proposers of a request work for it; it raises what `load` does."""
        speculation, first = request.speculation, request.sequences[0]
        self.load(speculation)
        if speculation.engine_chooses:
            for method in self._methods_with_layers(speculation):
                self._drafters.of(first, method)
            return
        for part in parts_of(speculation):
            if part.method is not None:
                self._drafters.of(first, part.method)

    def _methods_with_layers(self, speculation: SpeculationConfig) -> list[Method]:
        """Those among the candidates that must see a text from its first row on, should the engine choose them later: what
        their own layers would hold of earlier rows cannot be had any more."""
        parts = [part.method for each in speculation.candidates for part in parts_of(each)]
        needed = [(method, self.proposers.get(method).requires) for method in parts if method is not None]
        return [method for method, requires in needed if requires is not None and requires.added_layers is not None]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Another sample of a request goes on from here."""
        self._drafters.fork(parent, child)

    def finish(self, seq: Sequence) -> None:
        """A text has ended."""
        self._choice.finish(seq)
        self._drafters.finish(seq)

    def end_step(self, scheduler: Scheduler) -> None:
        """Switch off who brings nothing but faults."""
        for method in self.proposers.end_step():
            self._drafters.switch_off(method, [*scheduler.running, *scheduler.waiting])

    def dismiss(self) -> None:
        """Begin anew, with new proposers; all sequences are void."""
        self.proposers.dismiss_all()
        self._choice.forget()

    def script(self, table: CostTable, clock: Clock, holds: int = HOLDS) -> None:
        """Forget all that was learnt, and take these costs and this clock instead of a calibration and the machine's. In
        the proofs both must come again on the same path."""
        self.proposers.forget()
        self._shares.forget()
        self._choice.script(table, clock, holds)

    # -- a step --------------------------------------------------------------------------------------------------------

    def plan(self, plan: Schedule) -> None:
        """Decide who drafts for whom, with how many of the rows that are left. The engine chooses for texts that have
        begun: nothing is drafted before the first token, so that a draft model reads a prompt only when it is wanted."""
        decoding = plan_forced(plan)
        chosen_for = [item.seq for item in decoding if item.seq.request.speculation.engine_chooses]
        self._choice.decide([seq for seq in chosen_for if seq.num_output_tokens])
        plan_turns(plan, decoding, self.planner, self._shares)

    def propose(self, plan: Schedule, noise: NoiseSource) -> list[StepDraft]:
        """The draft of each item of the plan."""
        prefill_all(plan.items)
        if not any(item.turns for item in plan.items):
            # At once: beside a small model's pass, the ways of drafting take time.
            return [StepDraft.of_forced(item.forced) for item in plan.items]
        drafters = [[self._drafters.of(item.seq, turn.method) for turn in item.turns] for item in plan.items]
        return propose_all(plan.items, drafters, self.builders, noise)

    def score_idle(self, noise: NoiseSource) -> None:
        """Score idle methods, where the engine chooses who drafts; no row of the target is computed for it."""
        for seq, method, shadow in self._choice.shadows():
            start = perf_counter()
            drafter = self._drafters.of(seq, method)
            if drafter is not None:
                with drafter.blaming("its score"):
                    self._choice.shadow(seq, drafter, shadow, noise)
            self._choice.spent(seq, shadow, perf_counter() - start)

    def reason(self, seq: Sequence, *, drafted: bool) -> str:
        """Why a sequence does what it does in this step; empty where its request asked for it."""
        return self._choice.reason(seq, drafted=drafted)

    def observe(self, committed: list[Committed], out: ForwardOutput) -> None:
        """Tell those who shaped drafts what of them stands, and show proposers the rows of the pass."""
        for rows in committed:
            if rows.verdict is not None and rows.step.parts:
                drafted = rows.step.drafted
                with blaming([drafter for _, drafter in drafted], "its tree builder"):
                    teach(rows.step, rows.verdict.path, greedy=rows.item.seq.request.params.greedy)
                    for part, drafter in drafted:
                        outcome = part.outcome(rows.verdict.path)
                        self._shares.observe(drafter.method, *outcome)
                        self._check.observe(drafter.method, *outcome)
        show(committed, out)

    def learn(self, plan: Schedule, drafts: list[StepDraft], committed: list[Committed], out: ForwardOutput) -> None:
        """Learn from a step that has ended: how fast texts grow, and which methods pay."""
        try:
            self._observe_pace(plan, drafts, committed)
        except Exception:  # it concerns the speed of drafts, and no text
            logger.exception("the pace of a step could not be observed")
        for decision in self._choice.decisions.values():
            self._stats.chosen[decision.method or "none", decision.num_draft_tokens] += 1
            self._stats.reasons[decision.why] += 1
        seconds = self._stats.step_seconds
        host = seconds["schedule"] + seconds["verify"] + seconds["commit"]
        self._choice.observe(plan.items, drafts, committed, StepTimes(seconds["propose"], seconds["forward"], host))
        self._choice.observe_target(committed, out)

    def _observe_pace(self, plan: Schedule, drafts: list[StepDraft], committed: list[Committed]) -> None:
        """Let trees that adapt know how fast texts grow; a step with a prompt in it tells nothing of that."""
        if self.builders.measured and all(item.num_rows == 1 for item in plan.items):
            seconds = self._stats.step_seconds
            num_tokens = sum(len(rows.verdict.path) + 1 for rows in committed if rows.verdict is not None)
            adaptive = all(part.builder.learns for step in drafts for part, _ in step.drafted)
            num_levels = max(step.draft.depth - step.num_forced for step in drafts) if adaptive else 0
            self.builders.observe_step(num_tokens, sum(seconds.values()), num_levels, seconds["propose"])


def _runners(proposers: Mapping[str, Proposer]) -> dict[str, ModelRunner]:
    """The models of those that run one of their own."""
    return {name: each.runner for name, each in proposers.items() if isinstance(each, DraftModelProposer)}

"""The step: schedule, propose, forward, verify, commit."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from time import perf_counter
from typing import Any

from torch import Tensor, float64

from outrider.cache.lease import KVLease
from outrider.config import SchedulerConfig
from outrider.engine import observation, rounds
from outrider.engine.admission import bad_word_ids, check_request
from outrider.engine.calibration import calibrate
from outrider.engine.detokenizer import TextStream
from outrider.engine.drafter import Drafter
from outrider.engine.drafting import StepDraft, prefill_all, propose_all, teach
from outrider.engine.governing import Governing
from outrider.engine.observation import ComputedRows
from outrider.engine.outputs import piece
from outrider.engine.proposers import ProposerSet
from outrider.engine.scheduler import Schedule, ScheduledSequence, Scheduler
from outrider.engine.scoring import score, score_prompt
from outrider.engine.sequence import Request, Sequence, Status
from outrider.engine.stats import EngineStats
from outrider.engine.tree_builders import TreeBuilders
from outrider.errors import (
    EngineBusyError,
    EngineStalledError,
    ForwardError,
    NonFiniteLogitsError,
    NoTokenLeftError,
    OutriderError,
    ProcessingError,
    RequestError,
    StepAbortedError,
)
from outrider.govern.costs import StepTimes
from outrider.model.batch import Segment
from outrider.model.factory import INVARIANT
from outrider.model.resumed import TargetPass
from outrider.model.row_costs import measure_passes
from outrider.model.runner import ForwardOutput, ModelRunner
from outrider.params import SamplingParams, TokenOrigin
from outrider.propose.auto import Auto
from outrider.propose.base import Proposer
from outrider.propose.draft_model import DraftModelProposer
from outrider.propose.method import Method, same_method
from outrider.propose.pace import Pace
from outrider.propose.speculation import SpeculationConfig
from outrider.stats import RequestStats
from outrider.trace import CoinToss
from outrider.verify.grammar import GrammarCompiler, GrammarError, GrammarState
from outrider.verify.logits import target_probs
from outrider.verify.noise import KeyedNoise, NoiseSource
from outrider.verify.verifier import Candidate, CandidateKeys, Verdict, Verifier, rule_for

logger = logging.getLogger(__name__)

#: Proposers that one sequence keeps, unless one step asks for more.
MAX_DRAFTERS = 8


@dataclass(frozen=True)
class _Judged:
    """A sequence whose next tokens are decided.

    Attributes:
        candidate: What was verified.
        verdict: What stands.
        logits: [num_logits, vocab_size] of the whole step, as the parameters left them.
    """

    candidate: Candidate
    verdict: Verdict
    logits: Tensor


class Engine:
    """Drives requests to their end, a step at a time. Single-threaded.

    Args:
        runner: The target.
        config: Limits of a step.
        proposers: Who may draft.

    Attributes:
        grammars: Compiles structures, in any thread.
    """

    def __init__(self, runner: ModelRunner, config: SchedulerConfig, proposers: ProposerSet) -> None:
        self.runner = runner
        self.proposers = proposers
        self.scheduler = Scheduler(config, runner.blocks, runner.loaded.max_model_len)
        self.stats = EngineStats()
        self.builders = TreeBuilders(proposers, lambda: Pace(measure_passes(runner)))
        self.governing = Governing(
            proposers,
            lambda drafts: calibrate(runner, _runners(drafts)),
            invariant=runner.backend.name in INVARIANT or runner.loaded.dtype is float64,
            max_rows=config.max_num_batched_tokens,
        )
        self.scheduler.planner = self.governing.planner
        self.noise: NoiseSource
        self.use_noise(KeyedNoise())
        self._target_pass = TargetPass(runner)
        loaded = runner.loaded
        self.grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
        self._decode = lru_cache(65_536)(partial(_decode_token, loaded.tokenizer))  # a method would keep the engine alive
        self._ids = count()
        self._seq_ids = count()
        self._stepping = False
        self._cancelled: list[Request] = []  # during the step that is under way

    def use_noise(self, source: NoiseSource) -> None:
        """Replace the source of all chance; between requests only. The proofs enumerate with it."""
        self.noise = source
        self._verifier = Verifier(source)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def prepare(
        self,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        speculation: SpeculationConfig,
        *,
        prompt: str | None = None,
        streaming: bool = False,
        namespace: str | None = None,
        prediction: tuple[int, ...] = (),
        priority: int = 0,
        traced: bool = False,
    ) -> Request:
        """Check a request, and do what takes time and does not need the engine at rest: its structure is compiled, and the
        mask of its first token computed, here.

        Any thread may call this, at any time.

        Raises:
            InvalidPromptError: Empty, too long, or with tokens outside the vocabulary.
            InvalidParameterError, ContradictionError, UnsupportedParameterError: Parameters that this engine, this model or
                this installation cannot serve.
        """
        loaded = self.runner.loaded
        check_request(prompt_token_ids, params, speculation, loaded, self.runner.blocks, self.scheduler.config)
        request = Request(
            next(self._ids),
            prompt,
            prompt_token_ids,
            params,
            speculation,
            secrets.randbits(63) if params.seed is None else params.seed,
            loaded.eos_token_ids,
            bad_word_ids(params, loaded.tokenizer),
            namespace,
            prediction=prediction,
            priority=priority,
            traced=traced,
        )
        request.outbox = [] if streaming else None
        structure = params.structured_outputs
        grammar = None if structure is None else self.grammars.start(structure)
        request.sequences = [self._sequence(request, index, grammar) for index in range(params.n)]
        return request

    def admit(self, request: Request) -> None:
        """Queue a request that was prepared; its method's proposer is built if it is not alive yet.

        Raises:
            InputError, ModelError, ProposerError: The method that it names cannot be used.
        """
        method, first = request.speculation.method, request.sequences[0]
        if isinstance(method, Auto):
            self.governing.admit(method)
        elif method is not None:
            self.proposers.get(method)  # one that cannot be built is refused now, not in some later step
            self.builders.prepare(request.speculation.tree)
            self._drafter(first, method)
        self.scheduler.add(first)

    def add_request(
        self, prompt_token_ids: tuple[int, ...], params: SamplingParams, speculation: SpeculationConfig, **options: Any
    ) -> Request:
        """Prepare and admit in one; for those who drive the engine themselves. Arguments and errors are those of both."""
        request = self.prepare(prompt_token_ids, params, speculation, **options)
        self.admit(request)
        return request

    def _sequence(self, request: Request, index: int, start: GrammarState | None) -> Sequence:
        loaded = self.runner.loaded
        grammar = start if start is None or index == 0 else start.copy()
        text = TextStream(loaded.tokenizer, request.params.stop)
        kv = KVLease(self.runner.blocks, request.namespace, loaded.long_rope_after)
        return Sequence(
            next(self._seq_ids), request, index, text, loaded.max_model_len, kv, grammar, loaded.long_rope_after
        )

    def cancel(self, request: Request) -> None:
        """Stop a request; what it has written stays, finish_reason is "cancelled".

        During a step, when a garbage collection drops a stream, it is stopped at the end of the step: the pass under way
        counts on its rows.
        """
        if self._stepping:
            self._cancelled.append(request)
            return
        for seq in request.sequences:
            if seq.status is not Status.FINISHED:
                seq.finish("cancelled")
            self._retire(seq)

    def step(self) -> None:
        """Advance every scheduled sequence: by a chunk of its prompt, or by one token and what stands of its draft.

        Whatever breaks the step off ends the requests that it served with a StepAbortedError, and is raised again.

        Raises:
            EngineStalledError: There is work and none of it can be scheduled.
            EngineBusyError: It was called inside a step, by a proposer or a logits processor.
        """
        if self._stepping:
            raise EngineBusyError
        self._stepping = True
        try:
            self._step()
        finally:
            self._stepping = False
            self._settle()

    def _step(self) -> None:
        try:
            with self.stats.timed("schedule"):
                self._fork_ready()
                self.governing.decide(self.scheduler.running, self.scheduler.useful_depth)
                plan = self.scheduler.schedule()
        except BaseException as error:
            self._abandon(self.scheduler.running, error)
            raise
        if not plan.items:
            self._explain_stall()
            return
        try:
            with self.stats.timed("propose"):
                self._copy_blocks(plan)  # first of all: a proposer may read the target's KV
                self.runner.begun.clear()
                drafts = self._propose(plan)
            self._score_idle()
            with self.stats.timed("forward"):
                out = self._forward(plan, drafts)
            if out is None:
                return
            with self.stats.timed("verify"):
                judged = self._verify(plan, drafts, out)
            with self.stats.timed("commit"):
                accepted = self._commit(plan, drafts, out, judged)
            self._observe_pace(plan, drafts, judged)
            self._observe_choice(plan, drafts, accepted)
        except BaseException as error:
            self._abandon([item.seq for item in plan.items], error)
            raise

    def _copy_blocks(self, plan: Schedule) -> None:
        """All together; where that raises, one by one, so that it is known whom it concerns. Who fails leaves the plan."""
        try:
            self.runner.copy_blocks(plan.copies)
        except Exception:
            for source, destination in plan.copies:
                for item in plan.items:
                    if destination in item.seq.kv.block_table:  # nobody else has a block that is written to
                        with self._contained(item.seq, "copying its blocks"):
                            self.runner.copy_blocks([(source, destination)])
            plan.items = [item for item in plan.items if item.seq.request.error is None]

    def _observe_pace(self, plan: Schedule, drafts: list[StepDraft], judged: dict[int, _Judged]) -> None:
        """Let trees that adapt know how fast texts grow; a step with a prompt in it tells nothing of that."""
        try:
            self._tell_pace(plan, drafts, judged)
        except Exception:  # it concerns the speed of drafts, and no text
            logger.exception("the pace of a step could not be observed")

    def _tell_pace(self, plan: Schedule, drafts: list[StepDraft], judged: dict[int, _Judged]) -> None:
        if self.builders.measured and all(item.num_rows == 1 for item in plan.items):
            seconds = self.stats.step_seconds
            num_tokens = sum(len(each.verdict.path) + 1 for each in judged.values())
            adaptive = all(part.builder.learns for step in drafts for part in step.parts)
            num_levels = max(step.draft.depth for step in drafts) if adaptive else 0
            self.builders.observe_step(num_tokens, sum(seconds.values()), num_levels, seconds["propose"])

    def _score_idle(self) -> None:
        """Score idle methods, where the engine chooses who drafts; no row of the target is computed for it."""
        for seq, method, shadow in self.governing.shadows():
            start = perf_counter()
            drafter = self._drafter(seq, method)
            if drafter is not None:
                try:
                    self.governing.shadow(seq, drafter.proposer, drafter.index, shadow, self.noise)
                except Exception as error:
                    drafter.report_fault(seq.request.request_id, repr(error))
                    seq.stats.num_proposer_faults += 1
            self.governing.spent(seq, shadow, perf_counter() - start)

    def _observe_choice(self, plan: Schedule, drafts: list[StepDraft], accepted: dict[int, int]) -> None:
        """Let the engine's choice of methods know what became of it."""
        for decision in self.governing.decisions.values():
            self.stats.chosen[decision.method or "none", decision.num_draft_tokens] += 1
        seconds = self.stats.step_seconds
        host = seconds["schedule"] + seconds["verify"] + seconds["commit"]
        self.governing.observe(plan.items, drafts, accepted, StepTimes(seconds["propose"], seconds["forward"], host))

    def _abandon(self, sequences: Iterable[Sequence], error: BaseException) -> None:
        """End the requests of a step that broke off: nobody knows how much of it is in their books."""
        for request in {seq.request.request_id: seq.request for seq in sequences}.values():
            if request.error is None and not request.finished:
                self._fail(request, StepAbortedError, f"its step was broken off by {type(error).__name__}", cause=error)

    def _settle(self) -> None:
        """After a step: take out who has finished, and stop who was cancelled meanwhile."""
        for seq in [seq for seq in self.scheduler.running if seq.status is Status.FINISHED]:
            self._retire(seq)
        cancelled, self._cancelled = self._cancelled, []
        for request in cancelled:
            self.cancel(request)
        for method in self.proposers.end_step():
            self._switch_off(method)

    def _explain_stall(self) -> None:
        """Raise where waiting on would never end."""
        if not self.has_work or self._cancelled or any(map(_may_fork, self.scheduler.running)):
            return  # whose prompt was all in the cache forks in the next step
        blocks, scheduler = self.runner.blocks, self.scheduler
        raise EngineStalledError(
            f"{len(scheduler.waiting)} sequences wait and none can run: {len(scheduler.running)} of "
            f"{scheduler.config.max_num_seqs} seats are taken, {blocks.num_free} of {blocks.num_blocks} blocks are free. "
            "This is a defect of Outrider; please report it."
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where the books disagree; for tests, between two steps."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert all(seq.status is Status.RUNNING for seq in running), "a finished sequence still runs"
        assert all(seq.status is Status.WAITING for seq in waiting), "a finished sequence still waits"
        assert not any(seq.kv.block_table for seq in waiting), "a waiting sequence holds blocks"
        self.runner.blocks.check_integrity([seq.kv.block_table for seq in running])
        for proposer in self.proposers:
            proposer.check_integrity()

    def check_rest(self) -> None:
        """Raise AssertionError where an engine without work still holds something of a text that has ended."""
        self.check_integrity()
        blocks, num_users = self.runner.blocks, sum(self.proposers.num_users.values())
        assert not self.has_work, "texts are still written or wait"
        assert blocks.num_free == blocks.num_blocks, f"{blocks.num_blocks - blocks.num_free} blocks are still held"
        assert not num_users, f"proposers are still in use by {num_users} texts"
        for proposer in self.proposers:
            proposer.check_rest()

    def rebuild(self, requests: Iterable[Request], error: BaseException) -> None:
        """Begin anew where a fault has left the books wrong: over the same weights, with an empty memory and new proposers.

        Args:
            requests: All that are under way. They end with a StepAbortedError.
            error: What happened.
        """
        self._stepping, self._cancelled = False, []
        old = self.scheduler
        self.scheduler = Scheduler(old.config, self.runner.blocks, old.max_model_len, old.tenants)
        self.scheduler.planner = old.planner
        self.runner.blocks.reset()
        self.runner.begun.clear()
        self.proposers.dismiss_all()
        self.governing.forget()
        for request in requests:
            if not request.finished:
                problem = f"the engine had to begin anew after {type(error).__name__}"
                request.error = StepAbortedError(request.request_id, problem, _REMEDIES[StepAbortedError])
                request.error.__cause__ = error
            for seq in request.sequences:
                seq.retired = True  # what it held is void
                seq.kv.block_table.clear()
                self.noise.forget(seq.seq_id)

    # -- schedule ------------------------------------------------------------------------------------------------------

    def _fork_ready(self) -> None:
        """Give the other samples of a request their turn once its prompt is computed but for the last token."""
        for parent in list(self.scheduler.running):
            if _may_fork(parent):
                parent.forked = True
                with self._contained(parent, "forking its samples"):
                    for child in parent.request.sequences[1:]:
                        if child.status is not Status.FINISHED:
                            self._fork(parent, child)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        self.scheduler.start_fork(parent, child)
        child.reads_every_row, child.refused = parent.reads_every_row, list(parent.refused)
        child.num_drafters = parent.num_drafters
        for drafter in parent.drafters:
            self.proposers.acquire(drafter.method)
            child.drafters.append(replace(drafter, num_faults=0))
            self._tell(child, child.drafters[-1], "fork", parent.view, child.view)

    # -- propose -------------------------------------------------------------------------------------------------------

    def _propose(self, plan: Schedule) -> list[StepDraft]:
        prefill_all(plan.items)
        if not any(item.turns for item in plan.items):
            return [StepDraft() for _ in plan.items]  # at once: beside a small model's pass, the ways of drafting take time
        drafters = [[self._drafter(item.seq, turn.method) for turn in item.turns] for item in plan.items]
        return propose_all(plan.items, drafters, self.builders, self.noise, self.runner.loaded.vocab_size)

    def _drafter(self, seq: Sequence, method: Method) -> Drafter | None:
        """The proposer with these settings at work for a sequence, begun on first use; None where it cannot be had."""
        if self.proposers.is_off(method):
            return None
        found = seq.drafter(method)
        if found is not None:
            found.last_round = seq.view.round
        if found is not None or any(same_method(method, refused) for refused in seq.refused):
            return found
        try:
            proposer = self.proposers.acquire(method)
        except OutriderError as error:
            logger.warning("method %s, request %d: %s", method.name, seq.request.request_id, error)
            seq.stats.num_proposer_faults += 1
            seq.refused.append(method)
            return None
        conduct = self.proposers.conduct_of(proposer)
        found = Drafter(seq.num_drafters, method, proposer, proposer.requires, conduct, last_round=seq.view.round)
        seq.num_drafters += 1
        seq.drafters.append(found)
        seq.reads_every_row |= found.requires is not None and found.requires.every_row
        self._tell(seq, found, "begin", seq.view)
        self._dismiss_unused(seq)
        return found

    def _dismiss_unused(self, seq: Sequence) -> None:
        """Part with the proposers that a sequence has not used for longest, where a planner has named very many."""
        idle = sorted((d for d in seq.drafters if d.last_round < seq.view.round), key=lambda d: d.last_round)
        for drafter in idle[: max(0, len(seq.drafters) - MAX_DRAFTERS)]:
            self._part(seq, drafter)

    def _part(self, seq: Sequence, drafter: Drafter) -> None:
        """A sequence goes on without one of its proposers."""
        seq.drafters.remove(drafter)
        self._tell(seq, drafter, "finish", seq.view)
        self.proposers.release(drafter.method)

    def _switch_off(self, method: Method) -> None:
        """A proposer brings nothing but faults: all sequences go on without it, and it is asked again after a while."""
        logger.warning("method %s is switched off for %d steps", method.name, self.proposers.switched_off[method.name])
        for seq in [*self.scheduler.running, *self.scheduler.waiting]:
            drafter = seq.drafter(method)
            if drafter is not None:
                self._part(seq, drafter)

    def _tell(self, seq: Sequence, drafter: Drafter, verb: str, *args: object) -> None:
        """Call a proposer's life-cycle method; what it raises is its own fault and no one else's."""
        try:
            getattr(drafter.proposer, verb)(*args)
        except Exception as error:
            drafter.report_fault(seq.request.request_id, f"{verb} raised {error!r}")
            seq.stats.num_proposer_faults += 1

    # -- forward -------------------------------------------------------------------------------------------------------

    def _segments(self, plan: Schedule, drafts: list[StepDraft]) -> list[Segment]:
        """The rows of all whose rows can be laid out. The others fail, and leave the plan and the drafts."""
        found: dict[int, Segment] = {}
        for place, (item, step) in enumerate(zip(plan.items, drafts, strict=True)):
            with self._contained(item.seq, "laying out its rows"):
                found[place] = _segment(item, step)
        kept = [place for place in found if plan.items[place].seq.request.error is None]
        if len(kept) < len(drafts):
            plan.items = [plan.items[place] for place in kept]
            drafts[:] = [drafts[place] for place in kept]
        return [found[place] for place in kept]

    def _forward(self, plan: Schedule, drafts: list[StepDraft]) -> ForwardOutput | None:
        """The one target pass of the step; None where it raised, and then the scheduled requests have failed."""
        segments = self._segments(plan, drafts)
        if not segments:
            return None
        try:
            kvs = [item.seq.view.kv for item in plan.items]
            out = self._target_pass.forward(segments, kvs, observation.aux_layers(plan.items))
        except Exception as error:
            logger.exception("the target's forward pass failed")
            for request in {item.seq.request.request_id: item.seq.request for item in plan.items}.values():
                self._fail(request, ForwardError, f"the target's forward pass raised {error!r}", cause=error)
            return None
        self.stats.num_steps += 1
        self.stats.num_rows += sum(segment.num_rows for segment in segments)
        self.stats.num_resumed_rows += out.num_resumed_rows
        return out

    # -- verify --------------------------------------------------------------------------------------------------------

    def _verify(self, plan: Schedule, drafts: list[StepDraft], out: ForwardOutput) -> dict[int, _Judged]:
        """By place in the plan, for the sequences whose next token is due and can be chosen."""
        candidates = self._candidates(plan, drafts, out)
        logits, stuck = self._processed(plan, candidates, out.logits)
        alive = {p: c for p, c in candidates.items() if plan.items[p].seq.request.error is None}
        judged = {}
        for place, verdict in self._verdicts(plan, alive, logits).items():
            seq = plan.items[place].seq
            if place in stuck and any(stuck[place][node + 1] for node in (-1, *verdict.path)):
                problem = f"after {len(seq.token_ids)} tokens its parameters together forbid every token"
                self._fail(seq.request, NoTokenLeftError, problem)
                continue
            with self._contained(seq, "its log probabilities"):
                score(seq, alive[place], verdict, out.logits, logits, self._decode)
                judged[place] = _Judged(alive[place], verdict, logits)
                if self.governing.watches(seq):
                    self.governing.note(seq, _probability(alive[place], verdict, logits))
        return judged

    def _verdicts(self, plan: Schedule, candidates: dict[int, Candidate], logits: Tensor) -> dict[int, Verdict]:
        """Of all together; where that raises, of one after another with the same coins, so that it is known whose fault it
        is."""
        self.noise.mark()
        try:
            return dict(zip(candidates, self._verifier.verify(list(candidates.values()), logits), strict=True))
        except Exception:
            self.noise.rewind()
        verdicts = {}
        for place, candidate in candidates.items():
            if candidate.coins is not None:
                candidate.coins.clear()
            with self._contained(plan.items[place].seq, "its verification"):
                (verdicts[place],) = self._verifier.verify([candidate], logits)
        return verdicts

    def _candidates(self, plan: Schedule, drafts: list[StepDraft], out: ForwardOutput) -> dict[int, Candidate]:
        """By place in the plan; requests with unsound logits fail here."""
        finite: list[bool] = out.logits.amax(-1).isfinite().tolist() if len(out.logits) else []
        candidates = {}
        for place, (item, step) in enumerate(zip(plan.items, drafts, strict=True)):
            if not item.completes or item.seq.request.error is not None:
                continue
            first = out.logits_spans[place][0] + item.num_rows - 1 - out.logits_first_rows[place]
            rows = (first, first + 1 + len(step.draft))
            if all(finite[slice(*rows)]):
                with self._contained(item.seq, "its draft"):
                    candidates[place] = _candidate(item, step, rows)
            else:
                problem = f"the target wrote NaN or infinity after {len(item.seq.token_ids)} tokens"
                self._fail(item.seq.request, NonFiniteLogitsError, problem)
        return candidates

    def _processed(
        self, plan: Schedule, candidates: dict[int, Candidate], logits: Tensor
    ) -> tuple[Tensor, dict[int, list[bool]]]:
        """Logits as each request's parameters leave them along its draft, and which of a request's rows have no token left.

        A logits processor or a grammar that raises fails its own request and nobody else's.
        """
        stuck: dict[int, list[bool]] = {}
        processed = logits
        for place, candidate in candidates.items():
            seq = plan.items[place].seq
            if not seq.view.processing.active or seq.request.error is not None:
                continue
            rows = slice(*candidate.rows)
            try:
                changed, stuck[place] = seq.view.processing.apply(logits[rows], [(), *candidate.draft.paths])
                processed = logits.clone() if processed is logits else processed  # the raw ones are still reported
                processed[rows] = changed
            except GrammarError as error:
                self._fail(seq.request, ProcessingError, str(error), cause=error)
            except Exception as error:
                self._fail(seq.request, ProcessingError, f"processing its logits raised {error!r}", cause=error)
        return processed, stuck

    # -- commit --------------------------------------------------------------------------------------------------------

    def _commit(
        self, plan: Schedule, drafts: list[StepDraft], out: ForwardOutput, judged: dict[int, _Judged]
    ) -> dict[int, int]:
        """Returns how many draft tokens entered each text, by place in the plan, where a token was due."""
        computed: list[ComputedRows] = []
        entered: dict[int, int] = {}
        for place, (item, step) in enumerate(zip(plan.items, drafts, strict=True)):
            if item.seq.request.error is not None:
                continue
            with self._contained(item.seq, "its commit"):
                found = self._commit_one(place, item, step, out, judged.get(place))
                if found is None:
                    continue
                if place in judged:
                    entered[place] = len(found.accepted)
                if item.seq.drafters:
                    computed.append(found)
        if computed:
            observation.show(computed, out)
        return entered

    def _commit_one(
        self, place: int, item: ScheduledSequence, step: StepDraft, out: ForwardOutput, judged: _Judged | None
    ) -> ComputedRows | None:
        """Write down what a sequence has gained; returns what its proposers may see, or None if it failed."""
        seq, accepted = item.seq, tuple[int, ...]()
        start = seq.kv.num_computed
        seq.kv.num_computed += item.num_rows
        score_prompt(seq, start, item.num_rows, out.logits[slice(*out.logits_spans[place])], self._decode)
        if judged is not None:
            try:
                accepted = self._extend(seq, step, judged)
            except GrammarError as error:
                self._fail(seq.request, ProcessingError, str(error), cause=error)
                return None
        seq.kv.publish(seq.token_ids)
        return ComputedRows(item, step, place, start, accepted)

    def _extend(self, seq: Sequence, step: StepDraft, judged: _Judged) -> tuple[int, ...]:
        """Append what stands; returns the draft tokens that entered the text."""
        draft, verdict = step.draft, judged.verdict
        start, before = len(seq.token_ids) - 1, seq.num_output_tokens
        found = None
        if seq.request.traced:
            found = rounds.trace(
                seq, step, judged.candidate, verdict, judged.logits, self.governing.reason(seq), self._decode
            )
        for node in verdict.path:
            if seq.status is Status.RUNNING:
                seq.append(draft.token_ids[node], TokenOrigin.ACCEPTED)
        num_accepted = seq.num_output_tokens - before
        if seq.status is Status.RUNNING:
            seq.append(verdict.token_id, verdict.origin)
        num_written = seq.num_output_tokens - before
        del seq.logprobs[seq.num_output_tokens :]  # of tokens behind an end inside the draft
        self.runner.compact(seq.kv.block_table, start, [0, *(node + 1 for node in verdict.path)])
        seq.kv.num_computed += num_accepted
        seq.kv.enter_regime(len(seq.token_ids))
        if found is not None:
            wrote = num_written > num_accepted
            seconds, begun = self.stats.step_seconds, seq.request.begun
            seq.rounds.append(rounds.close(found, num_accepted, seconds, begun, wrote_token=wrote))
        seq.stats.num_target_passes += 1
        self.stats.num_committed_tokens += num_written
        self.scheduler.tenants.charge(seq, num_written)
        seq.view.round += 1  # also where a drawn draft was lost: its keys are spent
        self._teach(seq, step, verdict)
        if len(draft):
            rejected = num_written > num_accepted and verdict.origin is TokenOrigin.RECOVERED
            seq.stats.observe_draft(len(draft), draft.depth, num_accepted, rejected=rejected)
            seq.stats.observe_ranks(draft.parents, verdict.path[:num_accepted])
        if seq.request.outbox is not None:
            seq.request.outbox.append(piece(seq, before))
        return verdict.path[:num_accepted]

    def _teach(self, seq: Sequence, step: StepDraft, verdict: Verdict) -> None:
        """Tell those who shaped a draft what of it stands; what raises there costs drafts and no text."""
        try:
            teach(step, verdict.path, greedy=seq.request.params.greedy)
        except Exception as error:
            seq.stats.num_proposer_faults += 1
            for part in step.parts:
                part.drafter.report_fault(seq.request.request_id, f"its tree builder raised {error!r}")

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _retire(self, seq: Sequence) -> None:
        """Give back everything a finished sequence holds; once."""
        if seq.retired:
            return
        seq.retired = True
        self.governing.finish(seq)
        self.scheduler.remove(seq)
        self.noise.forget(seq.seq_id)
        for drafter in seq.drafters:
            self._tell(seq, drafter, "finish", seq.view)
            self.proposers.release(drafter.method)
        self.stats.finished.add(seq.stats)
        self.stats.by_method.setdefault(seq.request.speculation.name, RequestStats()).add(seq.stats)

    @contextmanager
    def _contained(self, seq: Sequence, doing: str) -> Iterator[None]:
        """What raises in this block ends the request of one sequence, and no other."""
        try:
            yield
        except Exception as error:
            logger.exception("%s raised, request %d", doing, seq.request.request_id)
            self.stats.num_faults += 1
            self._fail(seq.request, StepAbortedError, f"{doing} raised {error!r}", cause=error)

    def _fail(
        self, request: Request, kind: type[RequestError], problem: str, *, cause: BaseException | None = None
    ) -> None:
        """End a request with an error of `kind`; what it held is given back."""
        error = kind(request.request_id, problem, _REMEDIES[kind])
        error.__cause__ = cause
        request.error = error
        self.cancel(request)


def _runners(proposers: Mapping[str, Proposer]) -> dict[str, ModelRunner]:
    """The models of those that run one of their own."""
    return {name: each.runner for name, each in proposers.items() if isinstance(each, DraftModelProposer)}


def _probability(candidate: Candidate, verdict: Verdict, logits: Tensor) -> float:
    """With which the target wrote the token behind a text without a draft."""
    if candidate.sampling.greedy:
        return 1.0
    first = candidate.rows[0]
    return float(target_probs(logits[first : first + 1], [candidate.sampling])[0, verdict.token_id])


def _decode_token(tokenizer: Any | None, token_id: int) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode([token_id]))


_REMEDIES: dict[type[RequestError], str] = {
    ForwardError: "See its cause.",
    NonFiniteLogitsError: "Use a wider dtype, or check the weights.",
    NoTokenLeftError: "Allow more tokens, or ask for fewer min_tokens.",
    ProcessingError: "See its cause.",
    StepAbortedError: "Send it again.",
}


def _may_fork(seq: Sequence) -> bool:
    """Whether the other samples of its request can start from it."""
    return not seq.forked and seq.num_missing == 1


def _candidate(item: ScheduledSequence, step: StepDraft, rows: tuple[int, int]) -> Candidate:
    """A sequence's draft as the Verifier sees it."""
    view = item.seq.view
    keys = CandidateKeys(view.seq_id, view.seed, view.sample, view.round, len(view.token_ids))
    rule = rule_for(step.draft, item.rule, coupled=item.coupled)
    coins: list[CoinToss] | None = [] if item.seq.request.traced else None
    return Candidate(step.draft, rows, view.sampling, keys, rule, coins)


def _segment(item: ScheduledSequence, step: StepDraft) -> Segment:
    """Rows of one sequence: committed tokens, then the draft behind the last of them, then scratch rows."""
    seq, draft = item.seq, step.draft
    start, stop = seq.kv.num_computed, seq.kv.num_computed + item.num_rows
    parents = None
    if not draft.rows_are_chain:  # row 0 is the last committed token, node i is row i + 1
        parents = (-1, *(parent + 1 for parent in draft.row_parents))
    needed = observation.requirements(item)
    first_logit = item.num_rows - 1 if item.completes else item.num_rows
    if any(n.target_top_k and n.every_row for n in needed) or (
        seq.index == 0 and seq.request.params.prompt_logprobs is not None
    ):
        first_logit = 0
    last_logit = None if any(n.target_top_k for n in needed) else item.num_rows + len(draft)
    rows = (*seq.token_ids[start:stop], *draft.row_token_ids)
    return Segment(rows, start, seq.kv.block_table, parents, first_logit, last_logit, seq.kv.long_rope)

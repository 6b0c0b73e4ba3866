"""The step: schedule, propose, forward, verify, commit."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from functools import lru_cache, partial
from itertools import count
from typing import Any

from outrider.config import NO_OPTIONS, RequestOptions, SchedulerConfig
from outrider.engine.admission import bad_word_ids, check_request
from outrider.engine.committing import Committing
from outrider.engine.drafting.asking import StepDraft, aux_layers, requirements
from outrider.engine.drafting.drafting import Drafting
from outrider.engine.drafting.proposers import ProposerSet
from outrider.engine.failures import REMEDIES, Failures
from outrider.engine.scheduler import Schedule, ScheduledSequence, Scheduler
from outrider.engine.sequence import Request, Sequence, Status
from outrider.engine.stats import EngineStats
from outrider.engine.text import TextStream
from outrider.engine.verification import Verification
from outrider.errors import EngineBusyError, EngineStalledError, ForwardError, StepAbortedError
from outrider.model.batch import Segment
from outrider.model.resumed_forward import TargetPass
from outrider.model.runner import ForwardOutput, ModelRunner
from outrider.params import SamplingParams, TokenOrigin
from outrider.propose.settings import SpeculationConfig
from outrider.results import RequestStats
from outrider.structured.grammar import GrammarCompiler, GrammarState
from outrider.verify.noise import KeyedNoise, NoiseSource

logger = logging.getLogger(__name__)


class Engine:
    """Drives requests to their end, a step at a time. Single-threaded."""

    def __init__(self, runner: ModelRunner, config: SchedulerConfig, proposers: ProposerSet) -> None:
        self.runner = runner
        self.proposers = proposers
        self.scheduler = Scheduler(config)
        self.stats = EngineStats()
        self.drafting = Drafting(runner, config, proposers, self.stats)
        self._target_pass = TargetPass(runner)
        loaded = runner.loaded
        self.grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)  # for any thread
        decode = lru_cache(65_536)(partial(_decode_token, loaded.tokenizer))  # a method would keep the engine alive
        self._failures = Failures(self.stats)
        self.noise: NoiseSource = KeyedNoise()
        self._verification = Verification(self.noise, self._failures)
        self._committing = Committing(self.stats, self.scheduler.tenants, self._failures, self.drafting.reason, decode)
        self._ids = count()
        self._seq_ids = count()
        self._stepping = False

    def use_noise(self, source: NoiseSource) -> None:
        """Replace the source of all chance; between requests only. The proofs enumerate with it."""
        self.noise = source
        self._verification.use_noise(source)

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
        options: RequestOptions = NO_OPTIONS,
    ) -> Request:
        """Check a request, and do what takes time and does not need the engine at rest: its structure is compiled, and the
        mask of its first token computed, here.

        Any thread may call this, at any time.
        """
        loaded = self.runner.loaded
        check_request(prompt_token_ids, params, speculation, loaded, self.runner.blocks, self.scheduler.config, options)
        encoder = loaded.encoder
        request = Request(
            next(self._ids),
            prompt,
            prompt_token_ids if encoder is None else encoder.begin(options.decoder_prompt),
            params,
            speculation,
            secrets.randbits(63) if params.seed is None else params.seed,
            loaded.eos_token_ids,
            bad_word_ids(params, loaded.tokenizer),
            options,
            None if encoder is None else prompt_token_ids,
        )
        structure = params.structured_outputs
        grammar = None if structure is None else self.grammars.start(structure)
        request.sequences = [self._sequence(request, index, grammar) for index in range(params.n)]
        return request

    def admit(self, request: Request) -> None:
        """Queue a request that was prepared; its method's proposer is built if it is not alive yet. It raises what
        `load_method` does."""
        self.drafting.begin(request)
        self.scheduler.add(request.sequences[0])

    def load_method(self, speculation: SpeculationConfig) -> None:
        """Load what these settings draft with, and measure what it costs where the engine chooses; now and not in a
        step."""
        self.drafting.load(speculation)

    def add_request(
        self,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        speculation: SpeculationConfig,
        options: RequestOptions = NO_OPTIONS,
    ) -> Request:
        """Prepare and admit in one; for those who drive the engine themselves. Arguments and errors are those of both."""
        request = self.prepare(prompt_token_ids, params, speculation, options=options)
        self.admit(request)
        return request

    def _sequence(self, request: Request, index: int, start: GrammarState | None) -> Sequence:
        loaded = self.runner.loaded
        grammar = start if start is None or index == 0 else start.copy()
        text = TextStream[tuple[TokenOrigin, str | None]](
            loaded.tokenizer, request.params.stop, request.options.shown_tokens
        )
        state = self.runner.memory.state(request.options.namespace, request.source_token_ids)
        return Sequence(next(self._seq_ids), request, index, text, loaded.max_model_len, state, grammar)

    def cancel(self, request: Request) -> None:
        """Stop a request; what it has written stays, finish_reason is "cancelled".

        During a step, when a garbage collection drops a stream, it is stopped at the end of the step: the pass under way
        counts on its rows.
        """
        if self._stepping:
            self._failures.ended.append(request)
            return
        for seq in request.sequences:
            if seq.status is not Status.FINISHED:
                seq.finish("cancelled")
            self._retire(seq)

    def step(self) -> None:
        """Advance every scheduled sequence: by a chunk of its prompt, or by one token and what stands of its draft.

        Whatever breaks the step off ends the requests that it served with a StepAbortedError, and is raised again.
        """
        if self._stepping:
            raise EngineBusyError
        self._stepping = True
        try:
            self._step()
        finally:
            self._stepping = False
            self._verification.forget()
            self._settle()

    def _step(self) -> None:
        try:
            with self.stats.timed("schedule"):
                self._fork_ready()
                plan = self.scheduler.schedule()
                self.drafting.plan(plan)
        except BaseException as error:
            self._failures.abandon(self.scheduler.running, error)
            raise
        if not plan.items:
            self._explain_stall()
            return
        try:
            with self.stats.timed("propose"):
                self._make_copies(plan)  # first of all: a proposer may read the target's KV
                self.runner.partial_rows.clear()
                drafts = self.drafting.propose(plan, self.noise)
            self.drafting.score_idle(self.noise)
            with self.stats.timed("forward"):
                out = self._forward(plan, drafts)
            if out is None:
                return
            with self.stats.timed("verify"):
                judged = self._verification.verify(plan, drafts, out)
            with self.stats.timed("commit"):
                committed = self._committing.commit(plan, drafts, out, judged)
                self.drafting.observe(committed, out)
            self.drafting.learn(plan, drafts, committed, out)
            self.scheduler.observe(plan, self.stats.step_seconds["propose"] + self.stats.step_seconds["forward"])
        except BaseException as error:
            self._failures.abandon([item.seq for item in plan.items], error)
            raise

    def _make_copies(self, plan: Schedule) -> None:
        """All together; where that raises, one by one, so that it is known whom it concerns. Who fails leaves the plan."""
        memory = self.runner.memory
        try:
            memory.make_copies([item.seq.state for item in plan.items])
        except Exception:
            for item in plan.items:
                with self._failures.contained(item.seq, "copying its blocks"):
                    memory.make_copies([item.seq.state])
            plan.items = [item for item in plan.items if item.seq.request.error is None]

    def _settle(self) -> None:
        """After a step: take out who has finished, and stop who was cancelled meanwhile."""
        for seq in [seq for seq in self.scheduler.running if seq.status is Status.FINISHED]:
            self._retire(seq)
        ended, self._failures.ended = self._failures.ended, []
        for request in ended:
            self.cancel(request)
        self.drafting.end_step(self.scheduler)

    def _explain_stall(self) -> None:
        """Raise where waiting on would never end."""
        if not self.has_work or self._failures.ended or any(map(_may_fork, self.scheduler.running)):
            return  # whose prompt was all in the cache forks in the next step
        blocks, scheduler = self.runner.blocks, self.scheduler
        raise EngineStalledError(
            f"{len(scheduler.waiting)} sequences wait and none can run: {len(scheduler.running)} of "
            f"{scheduler.config.max_num_seqs} seats are taken, {blocks.num_free} of {blocks.num_blocks} blocks are free. "
            "This is a defect of Outrider; please report it."
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where the books disagree; between two steps."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert all(seq.status is Status.RUNNING for seq in running), "a finished sequence still runs"
        assert all(seq.status is Status.WAITING for seq in waiting), "a finished sequence still waits"
        assert not any(seq.state.block_table for seq in waiting), "a waiting sequence holds blocks"
        self.runner.memory.check_integrity([seq.state for seq in running])
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
        All requests that are under way end with a StepAbortedError."""
        self._stepping, self._failures.ended = False, []
        self.scheduler = Scheduler(self.scheduler.config, self.scheduler.tenants)
        self.runner.blocks.reset()
        self.runner.partial_rows.clear()
        self.drafting.dismiss()
        for request in requests:
            if not request.finished:
                problem = f"the engine had to begin anew after {type(error).__name__}"
                request.error = StepAbortedError(request.request_id, problem, REMEDIES[StepAbortedError])
                request.error.__cause__ = error
            for seq in request.sequences:
                seq.retired = True  # what it held is void
                seq.state.void()
                self.noise.forget(seq.seq_id)

    # -- schedule ------------------------------------------------------------------------------------------------------

    def _fork_ready(self) -> None:
        """Give the other samples of a request their turn once its prompt is computed but for the last token."""
        for parent in list(self.scheduler.running):
            if _may_fork(parent):
                parent.forked = True
                with self._failures.contained(parent, "forking its samples"):
                    for child in parent.request.sequences[1:]:
                        if child.status is not Status.FINISHED:
                            self._fork(parent, child)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        self.scheduler.start_fork(parent, child)
        self.drafting.fork(parent, child)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _segments(self, plan: Schedule, drafts: list[StepDraft]) -> list[Segment]:
        """The rows of all whose rows can be laid out. The others fail, and leave the plan and the drafts."""
        found: dict[int, Segment] = {}
        for place, (item, step) in enumerate(zip(plan.items, drafts, strict=True)):
            with self._failures.contained(item.seq, "laying out its rows"):
                found[place] = segment_of(item, step)
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
            out = self._target_pass.forward(segments, kvs, aux_layers(plan.items))
        except Exception as error:
            logger.exception("the target's forward pass failed")
            for request in {item.seq.request.request_id: item.seq.request for item in plan.items}.values():
                self._failures.fail(request, ForwardError, f"the target's forward pass raised {error!r}", cause=error)
            return None
        self.stats.num_steps += 1
        self.stats.num_rows += sum(segment.num_rows for segment in segments)
        self.stats.num_resumed_rows += out.num_resumed_rows
        return out

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _retire(self, seq: Sequence) -> None:
        """Give back everything a finished sequence holds; once."""
        if seq.retired:
            return
        seq.retired = True
        self.scheduler.remove(seq)
        self.noise.forget(seq.seq_id)
        self.drafting.finish(seq)
        self.stats.finished.add(seq.stats)
        self.stats.by_method.setdefault(seq.request.speculation.name, RequestStats()).add(seq.stats)


def _decode_token(tokenizer: Any | None, token_id: int) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode([token_id]))


def _may_fork(seq: Sequence) -> bool:
    """True if the other samples of its request can start from it."""
    return not seq.forked and seq.num_missing == 1


# --- Maps sequences to their rows in a pass.


def segment_of(item: ScheduledSequence, step: StepDraft) -> Segment:
    """Rows of one sequence: committed tokens, then the draft behind the last of them, then scratch rows."""
    seq, draft = item.seq, step.draft
    start = seq.state.num_computed
    stop = start + item.num_rows
    parents = None
    if not draft.rows_are_chain:  # row 0 is the last committed token, node i is row i + 1
        parents = (-1, *(parent + 1 for parent in draft.row_parents))
    needed = requirements(item)
    first_logit = item.num_rows - 1 if item.completes else item.num_rows
    if any(n.target_top_k and n.needs_uncached_prompt for n in needed) or (
        seq.index == 0 and seq.request.params.prompt_logprobs is not None
    ):
        first_logit = 0
    last_logit = None if any(n.target_top_k for n in needed) else item.num_rows + len(draft)
    rows = (*seq.token_ids[start:stop], *draft.row_token_ids)
    return Segment.of(seq.state, rows, start, parents, first_logit, last_logit, certain=stop)

"""The step: schedule, propose, forward, verify, commit."""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from outrider.config import SchedulerConfig, SpeculationConfig
from outrider.engine.admission import bad_word_ids, check_request
from outrider.engine.detokenizer import TextStream
from outrider.engine.drafting import propose_all, report_fault
from outrider.engine.interrupts import uninterrupted
from outrider.engine.scheduler import Schedule, ScheduledSequence, Scheduler
from outrider.engine.sequence import Request, Sequence, Status
from outrider.engine.stats import EngineStats
from outrider.engine.verifier import Candidate, Verdict, Verifier
from outrider.errors import (
    EngineStalledError,
    ForwardError,
    NonFiniteLogitsError,
    NoTokenLeftError,
    ProcessingError,
    RequestError,
    StepAbortedError,
)
from outrider.model.batch import Segment
from outrider.model.runner import ForwardOutput, ModelRunner
from outrider.params import CompletionOutput, PositionLogprobs, SamplingParams, StreamPiece, TokenOrigin
from outrider.propose.base import CommittedRows, Proposer, Requirements
from outrider.propose.draft import Draft
from outrider.verify.grammar import GrammarCompiler, GrammarError
from outrider.verify.logprobs import positions, processed_logprobs, raw_logprobs
from outrider.verify.noise import KeyedNoise, NoiseSource

logger = logging.getLogger(__name__)


class Engine:
    """Drives requests to their end, a step at a time. Single-threaded.

    Args:
        runner: The target.
        config: Limits of a step.
    """

    def __init__(self, runner: ModelRunner, config: SchedulerConfig) -> None:
        self.runner = runner
        self.scheduler = Scheduler(config, runner.blocks, runner.loaded.max_model_len)
        self.stats = EngineStats()
        self.noise: NoiseSource
        self.use_noise(KeyedNoise())
        loaded = runner.loaded
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
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

    def add_request(
        self,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        speculation: SpeculationConfig,
        proposer: Proposer | None,
        *,
        prompt: str | None = None,
        streaming: bool = False,
        namespace: str | None = None,
    ) -> Request:
        """Queue a prompt.

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
            proposer,
            secrets.randbits(63) if params.seed is None else params.seed,
            loaded.eos_token_ids,
            bad_word_ids(params, loaded.tokenizer),
            namespace,
        )
        request.outbox = [] if streaming else None
        request.sequences = [self._sequence(request, index) for index in range(params.n)]
        for seq in request.sequences:
            self._tell(seq, "begin", seq.view)
        self.scheduler.add(request.sequences[0])
        return request

    def _sequence(self, request: Request, index: int) -> Sequence:
        loaded, params = self.runner.loaded, request.params
        structure = params.structured_outputs
        grammar = None if structure is None else self._grammars.start(structure)
        text = TextStream(loaded.tokenizer, params.stop)
        limits = (loaded.max_model_len, grammar, loaded.long_rope_after)
        return Sequence(next(self._seq_ids), request, index, text, *limits)

    def cancel(self, request: Request) -> None:
        """Stop a request; what it has written stays, finish_reason is "cancelled".

        During a step, when a garbage collection drops a stream, it is stopped at the end of the step: the pass under way
        counts on its rows.
        """
        with uninterrupted():
            if self._stepping:
                self._cancelled.append(request)
                return
            for seq in request.sequences:
                if seq.status is not Status.FINISHED:
                    seq.finish("cancelled")
                self._retire(seq)

    def step(self) -> None:
        """Advance every scheduled sequence: by a chunk of its prompt, or by one token and what stands of its draft.

        An interrupt waits for the end of the step. Whatever else breaks the step off ends the requests that it served with
        a StepAbortedError, and is raised again.

        Raises:
            EngineStalledError: There is work and none of it can be scheduled.
        """
        with uninterrupted():
            self._stepping = True
            try:
                self._step()
            finally:
                self._stepping = False
                self._settle()

    def _step(self) -> None:
        with self.stats.timed("schedule"):
            self._fork_ready()
            plan = self.scheduler.schedule()
        if not plan.items:
            self._explain_stall()
            return
        try:
            with self.stats.timed("propose"):
                drafts = propose_all(plan.items, self.noise, self.runner.loaded.vocab_size)
            with self.stats.timed("forward"):
                out = self._forward(plan, drafts)
            if out is None:
                return
            with self.stats.timed("verify"):
                verdicts = self._verify(plan, drafts, out)
            with self.stats.timed("commit"):
                self._commit(plan, drafts, out, verdicts)
        except BaseException as error:
            self._abandon(plan, error)
            raise

    def _abandon(self, plan: Schedule, error: BaseException) -> None:
        """End the requests of a step that broke off: nobody knows how much of it is in their books."""
        for request in {item.seq.request.request_id: item.seq.request for item in plan.items}.values():
            if request.error is None and not request.finished:
                self._fail(request, StepAbortedError, f"its step was broken off by {type(error).__name__}", cause=error)

    def _settle(self) -> None:
        """After a step: take out who has finished, and stop who was cancelled meanwhile."""
        for seq in [seq for seq in self.scheduler.running if seq.status is Status.FINISHED]:
            self._retire(seq)
        cancelled, self._cancelled = self._cancelled, []
        for request in cancelled:
            self.cancel(request)

    def _explain_stall(self) -> None:
        """Raise where waiting on would never end."""
        if not self.has_work or self._cancelled:
            return
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
        assert not any(seq.block_table for seq in waiting), "a waiting sequence holds blocks"
        self.runner.blocks.check_integrity([seq.block_table for seq in running])

    # -- schedule ------------------------------------------------------------------------------------------------------

    def _fork_ready(self) -> None:
        """Give the other samples of a request their turn once its prompt is computed but for the last token."""
        for parent in list(self.scheduler.running):
            if not parent.forked and parent.num_missing == 1:
                parent.forked = True
                for child in parent.request.sequences[1:]:
                    if child.status is not Status.FINISHED:
                        self.scheduler.start_fork(parent, child)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _forward(self, plan: Schedule, drafts: list[Draft]) -> ForwardOutput | None:
        """The one target pass of the step; None where it raised, and then the scheduled requests have failed."""
        aux = sorted({layer for item in plan.items for layer in _requires(item).aux_layers})
        try:
            self.runner.copy_blocks(plan.copies)
            out = self.runner.forward([_segment(i, d) for i, d in zip(plan.items, drafts, strict=True)], aux)
        except Exception as error:
            logger.exception("the target's forward pass failed")
            for request in {item.seq.request.request_id: item.seq.request for item in plan.items}.values():
                self._fail(request, ForwardError, f"the target's forward pass raised {error!r}", cause=error)
            return None
        self.stats.num_steps += 1
        self.stats.num_rows += sum(i.num_rows + len(d) for i, d in zip(plan.items, drafts, strict=True))
        return out

    # -- verify --------------------------------------------------------------------------------------------------------

    def _verify(self, plan: Schedule, drafts: list[Draft], out: ForwardOutput) -> dict[int, Verdict]:
        """Verdicts by place in the plan, for the sequences whose next token is due and can be chosen."""
        candidates = self._candidates(plan, drafts, out)
        logits, stuck = self._processed(candidates, out.logits)
        alive = {p: c for p, c in candidates.items() if c.seq.request.error is None}
        verdicts = dict(zip(alive, self._verifier.verify(list(alive.values()), logits), strict=True))
        for place, verdict in list(verdicts.items()):
            if place in stuck and any(stuck[place][node + 1] for node in (-1, *verdict.path)):
                del verdicts[place]
                seq = candidates[place].seq
                problem = f"after {len(seq.token_ids)} tokens its parameters together forbid every token"
                self._fail(seq.request, NoTokenLeftError, problem)
        self._score(alive, verdicts, out.logits, logits)
        return verdicts

    def _candidates(self, plan: Schedule, drafts: list[Draft], out: ForwardOutput) -> dict[int, Candidate]:
        """By place in the plan; requests with unsound logits fail here."""
        finite: list[bool] = out.logits.amax(-1).isfinite().tolist() if len(out.logits) else []
        candidates = {}
        for place, (item, draft) in enumerate(zip(plan.items, drafts, strict=True)):
            if not item.completes or item.seq.request.error is not None:
                continue
            end = out.logits_spans[place][1]
            rows = (end - 1 - len(draft), end)
            if all(finite[slice(*rows)]):
                candidates[place] = Candidate(item.seq, draft, rows)
            else:
                self._fail(
                    item.seq.request,
                    NonFiniteLogitsError,
                    f"the target wrote NaN or infinity after {len(item.seq.token_ids)} tokens",
                )
        return candidates

    def _processed(self, candidates: dict[int, Candidate], logits: Tensor) -> tuple[Tensor, dict[int, list[bool]]]:
        """Logits as each request's parameters leave them along its draft, and which of a request's rows have no token left.

        A logits processor or a grammar that raises fails its own request and nobody else's.
        """
        stuck: dict[int, list[bool]] = {}
        processed = logits
        for place, candidate in candidates.items():
            request, processing = candidate.seq.request, candidate.seq.view.processing
            if not processing.active or request.error is not None:
                continue
            rows = slice(*candidate.rows)
            try:
                changed, stuck[place] = processing.apply(logits[rows], [(), *candidate.draft.paths])
            except Exception as error:
                self._fail(request, ProcessingError, f"processing its logits raised {error!r}", cause=error)
                continue
            processed = logits.clone() if processed is logits else processed  # the raw ones are still reported
            processed[rows] = changed
        return processed, stuck

    def _score(
        self, candidates: dict[int, Candidate], verdicts: dict[int, Verdict], raw: Tensor, processed: Tensor
    ) -> None:
        """Record the logprobs of the tokens that are about to be committed, for those who asked."""
        for place, verdict in verdicts.items():
            seq, params = candidates[place].seq, candidates[place].seq.request.params
            if params.logprobs is None:
                continue
            tokens = [*(candidates[place].draft.token_ids[node] for node in verdict.path), verdict.token_id]
            rows = torch.tensor([node + 1 for node in (-1, *verdict.path)], device=raw.device) + candidates[place].rows[0]
            law = raw_logprobs(raw[rows]) if params.logprobs_mode == "raw" else processed_logprobs(processed[rows], params)
            seq.logprobs += positions(law, tokens, params.logprobs, self._decode)

    def _score_prompt(self, seq: Sequence, start: int, num_rows: int, logits: Tensor) -> None:
        """Record the logprobs of the prompt's tokens, from raw logits [num_rows, vocab_size] at `start`; a prompt that is
        computed again after a preemption has them already."""
        scores, prompt = seq.request.prompt_logprobs, seq.request.prompt_token_ids
        skip = len(scores) - 1 - start
        tokens = prompt[start + 1 : start + 1 + num_rows]
        count = seq.request.params.prompt_logprobs
        if count is not None and 0 <= skip < len(tokens):
            scores += positions(raw_logprobs(logits[skip : len(tokens)]), tokens[skip:], count, self._decode)

    # -- commit --------------------------------------------------------------------------------------------------------

    def _commit(self, plan: Schedule, drafts: list[Draft], out: ForwardOutput, verdicts: dict[int, Verdict]) -> None:
        observed: defaultdict[int, list[tuple[Sequence, CommittedRows]]] = defaultdict(list)
        for place, (item, draft) in enumerate(zip(plan.items, drafts, strict=True)):
            seq = item.seq
            if seq.request.error is not None:
                continue
            start = seq.num_computed
            seq.num_computed += item.num_rows
            rows = list(range(item.num_rows))
            if seq.request.params.prompt_logprobs is not None and seq.index == 0:
                self._score_prompt(seq, start, item.num_rows, out.logits[slice(*out.logits_spans[place])])
            if place in verdicts:
                try:
                    rows += self._extend(seq, draft, verdicts[place])
                except GrammarError as error:
                    self._fail(seq.request, ProcessingError, str(error), cause=error)
                    continue
            if seq.request.proposer is not None:
                observed[id(seq.request.proposer)].append((seq, _committed_rows(seq, start, rows, out, place)))
            self._publish(seq)
        for pairs in observed.values():
            self._observe(pairs)

    def _extend(self, seq: Sequence, draft: Draft, verdict: Verdict) -> list[int]:
        """Append what stands; returns the pass's rows of accepted tokens whose KV is now part of the text."""
        start, before, was_long = len(seq.token_ids) - 1, seq.num_output_tokens, seq.long_rope
        for node in verdict.path:
            if seq.status is Status.RUNNING:
                seq.append(draft.token_ids[node], TokenOrigin.ACCEPTED)
        kept = seq.num_output_tokens - before
        if seq.status is Status.RUNNING:
            seq.append(verdict.token_id, verdict.origin)
        del seq.logprobs[seq.num_output_tokens :]  # of tokens behind an end inside the draft
        self.runner.compact(seq.block_table, start, [0, *(node + 1 for node in verdict.path)])
        seq.num_computed += kept
        if seq.long_rope != was_long and seq.status is Status.RUNNING:
            self.scheduler.recompute(seq)
        seq.stats.num_target_passes += 1
        self.stats.num_committed_tokens += seq.num_output_tokens - before
        seq.view.round += 1  # also where a drawn draft was lost: its keys are spent
        if len(draft):
            seq.stats.observe_draft(len(draft), draft.depth, kept)
        if seq.request.outbox is not None:
            seq.request.outbox.append(self._piece(seq, before))
        return [node + 1 for node in verdict.path[:kept]]

    def _publish(self, seq: Sequence) -> None:
        if seq.num_computed // self.runner.blocks.block_size > seq.num_published:
            seq.num_published = self.runner.blocks.publish(
                seq.token_ids[: seq.num_computed], seq.block_table, seq.num_published, seq.cache_space
            )

    def _observe(self, pairs: list[tuple[Sequence, CommittedRows]]) -> None:
        proposer = pairs[0][0].request.proposer
        assert proposer is not None
        try:
            proposer.observe([rows for _, rows in pairs])
        except Exception as error:
            for seq, _ in pairs:
                report_fault(seq, proposer, f"observe raised {error!r}")

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _retire(self, seq: Sequence) -> None:
        """Give back everything a finished sequence holds; once."""
        if seq.retired:
            return
        seq.retired = True
        self.scheduler.remove(seq)
        self.noise.forget(seq.seq_id)
        self._tell(seq, "finish", seq.view)
        self.stats.finished.add(seq.stats)

    def _fail(
        self, request: Request, kind: type[RequestError], problem: str, *, cause: BaseException | None = None
    ) -> None:
        """End a request with an error of `kind`; what it held is given back."""
        error = kind(request.request_id, problem, _REMEDIES[kind])
        error.__cause__ = cause
        request.error = error
        self.cancel(request)

    def _tell(self, seq: Sequence, verb: str, *args: object) -> None:
        """Call a proposer's life-cycle method; what it raises is its own fault and no one else's."""
        proposer = seq.request.proposer
        if proposer is None:
            return
        try:
            getattr(proposer, verb)(*args)
        except Exception as error:
            report_fault(seq, proposer, f"{verb} raised {error!r}")

    def _piece(self, seq: Sequence, before: int) -> StreamPiece:
        spans = tuple(seq.text.release())
        return StreamPiece(
            index=seq.index,
            text="".join(text for text, _ in spans),
            spans=spans,
            token_ids=tuple(seq.output_token_ids[before:]),
            origins=tuple(seq.origins[before:]),
            output=completion(seq) if seq.status is Status.FINISHED else None,
            logprobs=_logprobs(seq, before),
        )


_REMEDIES: dict[type[RequestError], str] = {
    ForwardError: "See its cause.",
    NonFiniteLogitsError: "Use a wider dtype, or check the weights.",
    NoTokenLeftError: "Allow more tokens, or ask for fewer min_tokens.",
    ProcessingError: "See its cause.",
    StepAbortedError: "Send it again.",
}


def _decode_token(tokenizer: Any | None, token_id: int) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode([token_id]))


def completion(seq: Sequence) -> CompletionOutput:
    """What a finished sequence came to."""
    assert seq.finish_reason is not None
    return CompletionOutput(
        index=seq.index,
        text=seq.text.text,
        token_ids=tuple(seq.output_token_ids),
        origins=tuple(seq.origins),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        stats=seq.stats.freeze(),
        logprobs=_logprobs(seq, 0),
    )


def _logprobs(seq: Sequence, start: int) -> tuple[PositionLogprobs, ...] | None:
    """Of the output tokens from `start` on; None where nobody asked."""
    return None if seq.request.params.logprobs is None else tuple(seq.logprobs[start:])


def _requires(item: ScheduledSequence) -> Requirements:
    proposer = item.seq.request.proposer
    return Requirements() if proposer is None else proposer.requires


def _segment(item: ScheduledSequence, draft: Draft) -> Segment:
    """Rows of one sequence: committed tokens, then the draft behind the last of them."""
    seq = item.seq
    start, stop = seq.num_computed, seq.num_computed + item.num_rows
    parents = None
    if not draft.is_chain:  # row 0 is the last committed token, node i is row i + 1
        parents = (-1, *(parent + 1 for parent in draft.parents))
    first_logit = item.num_rows - 1 if item.completes else item.num_rows
    if _requires(item).target_top_k or (seq.index == 0 and seq.request.params.prompt_logprobs is not None):
        first_logit = 0
    rows = (*seq.token_ids[start:stop], *draft.token_ids)
    return Segment(rows, start, seq.block_table, parents, first_logit, seq.long_rope)


def _committed_rows(seq: Sequence, start: int, rows: list[int], out: ForwardOutput, place: int) -> CommittedRows:
    """What a proposer is told of the rows (indices within the segment) that became part of the text."""
    proposer = seq.request.proposer
    assert proposer is not None
    positions = tuple(range(start, start + len(rows)))
    tokens = tuple(seq.token_ids[start : start + len(rows)])
    if not proposer.requires.any:
        return CommittedRows(seq.view, positions, tokens)
    index = torch.tensor(rows, device=out.logits.device)
    first_row, first_logit = out.row_spans[place][0], out.logits_spans[place][0]
    aux = {layer: out.aux_hidden_states[layer][first_row + index] for layer in proposer.requires.aux_layers}
    top: tuple[Tensor, Tensor] | None = None
    if proposer.requires.target_top_k:
        values, tokens_k = out.logits[first_logit + index].topk(proposer.requires.target_top_k, -1)
        top = (tokens_k, values)
    return CommittedRows(seq.view, positions, tokens, aux, top)

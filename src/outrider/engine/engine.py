"""The step: schedule, propose, forward, verify, commit."""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from itertools import count

import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.config import SchedulerConfig, SpeculationConfig
from outrider.engine.detokenizer import TextStream
from outrider.engine.drafting import propose_all, report_fault
from outrider.engine.scheduler import Schedule, ScheduledSequence, Scheduler
from outrider.engine.sequence import Request, Sequence, Status
from outrider.engine.stats import EngineStats
from outrider.engine.verifier import Candidate, Verdict, Verifier
from outrider.errors import (
    ContradictionError,
    ForwardError,
    InvalidParameterError,
    InvalidPromptError,
    NonFiniteLogitsError,
    OutriderError,
)
from outrider.model.batch import Segment
from outrider.model.runner import ForwardOutput, ModelRunner
from outrider.params import CompletionOutput, SamplingParams, StreamPiece, TokenOrigin
from outrider.propose.base import CommittedRows, Proposer, Requirements
from outrider.propose.draft import Draft
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
        self._ids = count()
        self._seq_ids = count()

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
    ) -> Request:
        """Queue a prompt.

        Raises:
            InvalidPromptError: Empty, too long, or with tokens outside the vocabulary.
            InvalidParameterError, ContradictionError: Parameters this engine or this model cannot serve.
        """
        self._check(prompt_token_ids, params, speculation)
        loaded = self.runner.loaded
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(
            next(self._ids), prompt, prompt_token_ids, params, speculation, proposer, seed, loaded.eos_token_ids
        )
        request.outbox = [] if streaming else None
        for index in range(params.n):
            request.sequences.append(
                Sequence(
                    next(self._seq_ids), request, index, TextStream(loaded.tokenizer, params.stop), loaded.max_model_len
                )
            )
        for seq in request.sequences:
            self._tell(seq, "begin", seq.view)
        self.scheduler.add(request.sequences[0])
        return request

    def cancel(self, request: Request) -> None:
        """Stop a request now; what it has written stays, finish_reason is "cancelled"."""
        for seq in request.sequences:
            if seq.status is not Status.FINISHED:
                seq.finish("cancelled")
                self._retire(seq)

    def step(self) -> None:
        """Advance every scheduled sequence: by a chunk of its prompt, or by one token and what stands of its draft."""
        with self.stats.timed("schedule"):
            self._fork_ready()
            plan = self.scheduler.schedule()
        if not plan.items:
            return
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
                failure = ForwardError(request.request_id, f"the target's forward pass raised {error!r}", "See its cause.")
                failure.__cause__ = error
                self._fail(request, failure)
            return None
        self.stats.num_steps += 1
        self.stats.num_rows += sum(i.num_rows + len(d) for i, d in zip(plan.items, drafts, strict=True))
        return out

    # -- verify --------------------------------------------------------------------------------------------------------

    def _verify(self, plan: Schedule, drafts: list[Draft], out: ForwardOutput) -> dict[int, Verdict]:
        """Verdicts by place in the plan, for the sequences whose next token is due and whose logits are sound."""
        finite: list[bool] = out.logits.amax(-1).isfinite().tolist() if len(out.logits) else []
        places, candidates = [], []
        for place, (item, draft) in enumerate(zip(plan.items, drafts, strict=True)):
            if not item.completes or item.seq.request.error is not None:
                continue
            end = out.logits_spans[place][1]
            rows = (end - 1 - len(draft), end)
            if all(finite[slice(*rows)]):
                places.append(place)
                candidates.append(Candidate(item.seq, draft, rows))
            else:
                self._fail(
                    item.seq.request,
                    NonFiniteLogitsError(
                        item.seq.request.request_id,
                        f"the target wrote NaN or infinity after {len(item.seq.token_ids)} tokens",
                        "Use a wider dtype, or check the weights.",
                    ),
                )
        return dict(zip(places, self._verifier.verify(candidates, out.logits), strict=True))

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
            if place in verdicts:
                rows += self._extend(seq, draft, verdicts[place])
            if seq.request.proposer is not None:
                observed[id(seq.request.proposer)].append((seq, _committed_rows(seq, start, rows, out, place)))
            self._publish(seq)
        for pairs in observed.values():
            self._observe(pairs)
        for item in plan.items:
            if item.seq.status is Status.FINISHED and item.seq.request.error is None:
                self._retire(item.seq)

    def _extend(self, seq: Sequence, draft: Draft, verdict: Verdict) -> list[int]:
        """Append what stands; returns the pass's rows of accepted tokens whose KV is now part of the text."""
        start, before = len(seq.token_ids) - 1, seq.num_output_tokens
        for node in verdict.path:
            if seq.status is Status.RUNNING:
                seq.append(draft.token_ids[node], TokenOrigin.ACCEPTED)
        kept = seq.num_output_tokens - before
        if seq.status is Status.RUNNING:
            seq.append(verdict.token_id, verdict.origin)
        self.runner.compact(seq.block_table, start, [0, *(node + 1 for node in verdict.path)])
        seq.num_computed += kept
        seq.stats.num_target_passes += 1
        self.stats.num_committed_tokens += seq.num_output_tokens - before
        seq.view.round += 1  # also where a drawn draft was lost: its keys are spent
        if len(draft):
            seq.stats.observe_draft(len(draft), draft.depth, len(verdict.path))
        if seq.request.outbox is not None:
            seq.request.outbox.append(self._piece(seq, before))
        return [node + 1 for node in verdict.path[:kept]]

    def _publish(self, seq: Sequence) -> None:
        if seq.num_computed // self.runner.blocks.block_size > seq.num_published:
            seq.num_published = self.runner.blocks.publish(
                seq.token_ids[: seq.num_computed], seq.block_table, seq.num_published, seq.view.namespace
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
        """Give back everything a finished sequence holds."""
        self.scheduler.remove(seq)
        self.noise.forget(seq.seq_id)
        self._tell(seq, "finish", seq.view)
        self.stats.finished.add(seq.stats)

    def _fail(self, request: Request, error: OutriderError) -> None:
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
        )

    # -- input ---------------------------------------------------------------------------------------------------------

    def _check(self, tokens: tuple[int, ...], params: SamplingParams, speculation: SpeculationConfig) -> None:
        loaded, blocks = self.runner.loaded, self.runner.blocks
        if not tokens:
            raise InvalidPromptError("prompt", list(tokens), "it has no tokens", "Give at least one.")
        for token in tokens:
            if not 0 <= token < loaded.vocab_size:
                raise InvalidPromptError(
                    "prompt", token, "token id outside the vocabulary", f"Use ids from 0 to {loaded.vocab_size - 1}."
                )
        if len(tokens) >= loaded.max_model_len:
            raise InvalidPromptError(
                "prompt",
                f"{len(tokens)} tokens",
                f"no room in the context of {loaded.max_model_len}",
                f"Shorten it to {loaded.max_model_len - 1} tokens or fewer.",
            )
        if params.n > self.scheduler.config.max_num_seqs:
            raise InvalidParameterError(
                "n", params.n, f"more samples than max_num_seqs={self.scheduler.config.max_num_seqs}", "Lower it."
            )
        if params.seed is not None and speculation.rule in ("token", "block"):
            raise ContradictionError(
                "seed",
                params.seed,
                f"rule={speculation.rule!r} makes the text depend on the drafts, and a seed promises that it does not",
                "Use rule='auto', or leave the seed out.",
            )
        self._check_ends(params)
        _check_memory(len(tokens), params, loaded.max_model_len, blocks)

    def _check_ends(self, params: SamplingParams) -> None:
        vocab_size = self.runner.loaded.vocab_size
        for token in params.stop_token_ids:
            if token >= vocab_size:
                raise InvalidParameterError(
                    "stop_token_ids", token, "outside the vocabulary", f"Use ids from 0 to {vocab_size - 1}."
                )
        if params.min_tokens and len(set(params.stop_token_ids)) == vocab_size:
            raise ContradictionError("min_tokens", params.min_tokens, "every token is a stop token", "Leave one out.")
        if params.stop and self.runner.loaded.tokenizer is None:
            raise ContradictionError("stop", params.stop, "the model has no tokenizer", "Use stop_token_ids.")


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
    )


def _check_memory(prompt_len: int, params: SamplingParams, max_model_len: int, blocks: BlockManager) -> None:
    """A text must fit into the memory alone, or preemption could never make room for it."""
    longest = min(prompt_len + params.max_tokens, max_model_len)
    capacity = blocks.num_blocks * blocks.block_size
    if blocks.blocks_for(longest) > blocks.num_blocks:
        raise InvalidPromptError(
            "prompt",
            f"{prompt_len} tokens",
            f"with max_tokens={params.max_tokens} it may need {longest} tokens of KV memory, and there are {capacity}",
            "Shorten it, lower max_tokens, or raise kv_cache_tokens.",
        )


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
    if _requires(item).target_top_k:
        first_logit = 0
    return Segment((*seq.token_ids[start:stop], *draft.token_ids), start, seq.block_table, parents, first_logit)


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

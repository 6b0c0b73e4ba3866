"""Commits a step: appends tokens, keeps the KV of accepted rows, and informs proposers and observers."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.engine.drafting.asking import Committed, StepDraft
from outrider.engine.failures import Failures
from outrider.engine.scheduler import Schedule
from outrider.engine.sequence import Sequence, Status, piece
from outrider.engine.stats import EngineStats
from outrider.engine.tenants import Tenants
from outrider.engine.verification import Judged, Written, score, score_prompt
from outrider.model.runner import ForwardOutput
from outrider.params import TokenOrigin
from outrider.results import DraftedBy, DrawTrace, Likely, RoundTrace, RowTrace
from outrider.structured.grammar import GrammarError
from outrider.verify.logits import Decode, target_probs
from outrider.verify.verifier import DraftCandidate


class Committing:
    """Writes down what stands.

    `reason` knows why a sequence drafted as it did, and `decode` the text of a token.
    """

    def __init__(
        self, stats: EngineStats, tenants: Tenants, failures: Failures, reason: Callable[..., str], decode: Decode
    ) -> None:
        self._stats = stats
        self._tenants = tenants
        self._failures = failures
        self._reason = reason
        self._decode = decode

    def commit(
        self, plan: Schedule, drafts: list[StepDraft], out: ForwardOutput, judged: dict[int, Judged]
    ) -> list[Committed]:
        """Write down what each sequence has gained; returns its rows, but for those that failed."""
        committed = []
        for place, (item, step) in enumerate(zip(plan.items, drafts, strict=True)):
            if item.seq.request.error is not None:
                continue
            with self._failures.contained(item.seq, "its commit"):
                found = self._commit_one(place, plan, step, out, judged.get(place))
                if found is not None:
                    committed.append(found)
        return committed

    def _commit_one(
        self, place: int, plan: Schedule, step: StepDraft, out: ForwardOutput, judged: Judged | None
    ) -> Committed | None:
        """Write down what a sequence has gained; None if it failed."""
        item = plan.items[place]
        seq, accepted = item.seq, tuple[int, ...]()
        start = seq.state.num_computed
        score_prompt(seq, start, item.num_rows, out.logits[slice(*out.logits_spans[place])], self._decode)
        if judged is not None:
            try:
                accepted = self._extend(seq, step, out, judged, len(plan.items))
            except GrammarError as error:
                self._failures.fail_at_row(seq, error)
            if seq.request.error is not None:
                return None
        seq.state.commit(start, [*range(item.num_rows), *(item.num_rows + node for node in accepted)])
        seq.state.enter_regime(len(seq.token_ids))
        seq.state.publish(seq.token_ids)
        verdict = None if judged is None else judged.verdict
        return Committed(seq.view, start, item.num_rows, step.draft, accepted, place, item, step, verdict)

    def _extend(
        self, seq: Sequence, step: StepDraft, out: ForwardOutput, judged: Judged, num_sequences: int
    ) -> tuple[int, ...]:
        """Append what stands; returns the draft tokens that entered the text."""
        draft, verdict = step.draft, judged.verdict
        before = seq.num_output_tokens
        written, fault = _append(seq, step, judged)
        score(seq, judged.candidate, written, out.logits, judged.logits, self._decode)
        num_written = len(written)
        num_accepted = min(num_written, len(verdict.path))
        if seq.request.options.trace:
            reason, seconds = self._reason(seq, drafted=len(draft) > 0), self._stats.step_seconds
            seq.rounds.append(trace(seq, step, judged, num_written, num_sequences, reason, seconds, self._decode))
        seq.stats.num_target_passes += 1
        self._stats.num_committed_tokens += num_written
        self._tenants.charge(seq, num_written)
        seq.view.round += 1  # also where nothing was drafted: the keys of a round may be spent
        if len(draft):
            rejected = num_written > num_accepted and verdict.origin is TokenOrigin.RECOVERED
            seq.stats.observe_draft(len(draft), draft.depth, num_accepted, rejected=rejected)
            seq.stats.observe_ranks(draft.parents, verdict.path[:num_accepted])
            for part in step.parts:
                stood = len(part.accepted(verdict.path[:num_accepted]))
                seq.stats.observe_method(part.member, len(part.nodes), stood)
        if seq.request.outbox is not None:
            seq.request.outbox.append(piece(seq, before))
        if fault is not None:
            self._failures.fail_at_row(seq, fault)
        return verdict.path[:num_accepted]


def _append(seq: Sequence, step: StepDraft, judged: Judged) -> tuple[Written, BaseException | None]:
    """Append what stands up to the first end of the text; returns the tokens, each with the node that it follows, and why
    the text cannot go on, where it came to a row with a fault."""
    verdict, draft, written = judged.verdict, step.draft, list[tuple[int, int]]()
    for place, node in enumerate((-1, *verdict.path)):
        if seq.status is not Status.RUNNING:
            break
        if node + 1 in judged.faults:
            return written, judged.faults[node + 1]
        if place == len(verdict.path):
            token = verdict.token_id
            seq.append(token, verdict.origin)
        else:
            drafted = verdict.path[place]
            token = draft.token_ids[drafted]
            seq.append(token, TokenOrigin.ACCEPTED, step.member(drafted))
        written.append((node, token))
    return written, None


# --- Records traces of rounds for requests that asked for them.


#: Likeliest tokens of either model that a trace names at each row.
_LIKELIEST = 5


def trace(
    seq: Sequence,
    step: StepDraft,
    judged: Judged,
    num_written: int,
    num_sequences: int,
    reason: str,
    seconds: dict[str, float],
    decode: Decode,
) -> RoundTrace:
    """The trace of a round in which so many tokens entered the text; `seconds` are those of the step by phase."""
    draft, size, candidate, verdict = step.draft, len(step.draft), judged.candidate, judged.verdict
    wanted = target_probs(judged.logits[slice(*candidate.rows)], [candidate.sampling] * (size + 1))
    written = {verdict.path[-1] if verdict.path else -1: verdict.token_id}
    draws = _draws(draft)
    first = {draw.node: draw for draw in reversed(draws)}
    return RoundTrace(
        round=seq.view.round,
        position=len(seq.token_ids) - num_written,
        token_ids=draft.token_ids,
        parents=draft.parents,
        laws=tuple(first[node].law for node in range(size)),
        drafted_by=tuple(DraftedBy(part.member, *part.draws) for part in step.parts),
        draft_probs=tuple(first[node].draft_prob for node in range(size)),
        target_probs=tuple(float(wanted[draft.parents[node] + 1, draft.token_ids[node]]) for node in range(size)),
        num_scratch_rows=len(draft.scratch),
        num_sequences=num_sequences,
        rule=candidate.rule.name.lower() if size else None,
        coins=tuple(candidate.coins or ()),
        accepted=verdict.path[:num_written],
        token_id=verdict.token_id if num_written > len(verdict.path) else None,
        reason=reason,
        seconds={phase: seconds[phase] for phase in ("schedule", "propose", "forward", "verify")},
        texts=tuple(decode(token) for token in draft.token_ids),
        rows=tuple(_row(candidate, node, wanted[node + 1], written.get(node), decode) for node in range(-1, size)),
        at=perf_counter() - seq.request.begun,
        draws=draws,
    )


def _row(candidate: DraftCandidate, node: int, wanted: Tensor, written: int | None, decode: Decode) -> RowTrace:
    """The tokens that could have come after `node`, with `wanted` [vocab_size] the target's probabilities there."""
    draft, residual = candidate.draft, candidate.residuals.get(node)
    children = draft.children(node)
    drawn = next(
        (draw for draw in range(draft.num_draws) if draft.nodes[draw] in children and _is_drawn(draft, draw)), None
    )
    proposal = None if drawn is None or draft.draft_probs is None else draft.draft_probs[drawn].to(wanted)
    named = {draft.token_ids[child] for child in children} | ({written} if written is not None else set())
    for probs in (wanted, proposal, residual):
        if probs is not None:
            values, tokens = probs.topk(min(_LIKELIEST, len(probs)))
            named.update(tokens[values > 0].tolist())
    chances = [(float(wanted[token]), token) for token in sorted(named)]
    likely = (
        Likely(token, decode(token), chance, *(None if p is None else float(p[token]) for p in (proposal, residual)))
        for chance, token in sorted(chances, key=lambda pair: -pair[0])
    )
    return RowTrace(node, tuple(likely), None if proposal is None else float(torch.minimum(wanted, proposal).sum()))


def _draws(draft: Draft) -> tuple[DrawTrace, ...]:
    return tuple(
        DrawTrace(node, member, str(law), _drawn_with(draft, draw))
        for draw, (node, member, law) in enumerate(zip(draft.nodes, draft.members, draft.laws, strict=True))
    )


def _is_drawn(draft: Draft, draw: int) -> bool:
    return draft.draft_probs is not None and draft.laws[draw] in ("sampled", "coupled")


def _drawn_with(draft: Draft, draw: int) -> float | None:
    """Probability that a draw was made with, its member's elder siblings taken out; None where it was not drawn."""
    if draft.draft_probs is None or not _is_drawn(draft, draw):
        return None
    probs, own = draft.draft_probs[draw], (draft.members[draw], draft.laws[draw], draft.parents[draft.nodes[draw]])
    elders = [
        elder
        for elder in range(draw)
        if (draft.members[elder], draft.laws[elder], draft.parents[draft.nodes[elder]]) == own
    ]
    left = float(probs.sum()) - sum(float(probs[draft.token_ids[draft.nodes[elder]]]) for elder in elders)
    return float(probs[draft.token_ids[draft.nodes[draw]]]) / left if left > 0 else 0.0

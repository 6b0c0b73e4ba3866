"""Records traces of rounds for requests that asked for them."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.engine.proposing.drafting import StepDraft
from outrider.engine.sequence import Sequence
from outrider.trace import DraftedBy, DrawTrace, Likely, RoundTrace, RowTrace
from outrider.verify.logits import target_probs
from outrider.verify.logprobs import Decode
from outrider.verify.verifier import Candidate, Verdict

#: Likeliest tokens of either model that a trace names at each row.
_LIKELIEST = 5


def trace(
    seq: Sequence,
    step: StepDraft,
    candidate: Candidate,
    verdict: Verdict,
    logits: Tensor,
    reason: str,
    num_sequences: int,
    decode: Decode,
) -> RoundTrace:
    """What was drafted and decided; what entered the text is filled in by `close`.

    Args:
        seq: Whose.
        step: Its draft, and who drafted it.
        candidate: As it was verified.
        verdict: What stands.
        logits: [num_logits, vocab_size] as the parameters left them.
        reason: Why this was drafted, or nothing.
        num_sequences: Of the step.
        decode: How tokens read.
    """
    draft, size = step.draft, len(step.draft)
    wanted = target_probs(logits[slice(*candidate.rows)], [candidate.sampling] * (size + 1))
    end = verdict.path[-1] if verdict.path else -1
    written = {end: verdict.token_id}
    draws = _draws(draft)
    first = {draw.node: draw for draw in reversed(draws)}
    return RoundTrace(
        round=seq.view.round,
        position=len(seq.token_ids),
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
        accepted=verdict.path,
        token_id=verdict.token_id,
        reason=reason,
        seconds={},
        texts=tuple(decode(token) for token in draft.token_ids),
        rows=tuple(_row(candidate, node, wanted[node + 1], written.get(node), decode) for node in range(-1, size)),
        at=0.0,
        draws=draws,
    )


def close(
    found: RoundTrace, num_accepted: int, seconds: dict[str, float], begun: float, *, wrote_token: bool
) -> RoundTrace:
    """The trace with what entered the text, since an accepted token may have ended it, and the times of the phases that
    came before the commit.

    Args:
        found: What `trace` returned.
        num_accepted: Draft tokens that entered the text.
        seconds: Of the step, by phase.
        begun: When the request was made, on the clock of time.perf_counter.
        wrote_token: Whether the token behind them entered the text.
    """
    token = found.token_id if wrote_token else None
    times = {phase: seconds[phase] for phase in ("schedule", "propose", "forward", "verify")}
    return replace(found, accepted=found.accepted[:num_accepted], token_id=token, seconds=times, at=perf_counter() - begun)


def _row(candidate: Candidate, node: int, wanted: Tensor, written: int | None, decode: Decode) -> RowTrace:
    """What could have come after `node`, with `wanted` [vocab_size] the target's probabilities there."""
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

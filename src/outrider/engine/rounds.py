"""Traces of rounds, for requests that asked for them; others cost nothing."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from outrider.engine.drafting import StepDraft
from outrider.engine.sequence import Sequence
from outrider.trace import DraftedBy, RoundTrace
from outrider.verify.logits import target_probs
from outrider.verify.verifier import Candidate, Verdict


def trace(
    seq: Sequence, step: StepDraft, candidate: Candidate, verdict: Verdict, logits: Tensor, reason: str
) -> RoundTrace:
    """What was drafted and decided; what entered the text is filled in by `close`.

    Args:
        seq: Whose.
        step: Its draft, and who drafted it.
        candidate: As it was verified.
        verdict: What stands.
        logits: [num_logits, vocab_size] as the parameters left them.
        reason: Why this was drafted, or nothing.
    """
    draft, size = step.draft, len(step.draft)
    rows = logits[slice(*candidate.rows)]
    wanted = [target_probs(rows[parent + 1][None], [candidate.sampling])[0] for parent in draft.parents]
    return RoundTrace(
        round=seq.view.round,
        position=len(seq.token_ids),
        token_ids=draft.token_ids,
        parents=draft.parents,
        laws=tuple(str(law) for law in draft.laws),
        drafted_by=tuple(DraftedBy(part.drafter.method.name, *part.nodes) for part in step.parts),
        draft_probs=tuple(_drawn_with(step, node) for node in range(size)),
        target_probs=tuple(float(probs[token]) for probs, token in zip(wanted, draft.token_ids, strict=True)),
        num_scratch_rows=len(draft.scratch),
        rule=candidate.rule.name.lower() if size else None,
        coins=tuple(candidate.coins or ()),
        accepted=verdict.path,
        token_id=verdict.token_id,
        reason=reason,
        seconds={},
    )


def close(found: RoundTrace, num_accepted: int, seconds: dict[str, float], *, wrote_token: bool) -> RoundTrace:
    """The trace with what entered the text, since an accepted token may have ended it, and the times of the phases that
    came before the commit."""
    token = found.token_id if wrote_token else None
    times = {phase: seconds[phase] for phase in ("schedule", "propose", "forward", "verify")}
    return replace(found, accepted=found.accepted[:num_accepted], token_id=token, seconds=times)


def _drawn_with(step: StepDraft, node: int) -> float | None:
    """Probability that a node was drawn with, those of its elder siblings taken out; None where it was not drawn."""
    draft = step.draft
    if draft.draft_probs is None or draft.laws[node] not in ("sampled", "coupled"):
        return None
    probs = draft.draft_probs[node]
    elders = [e for e in draft.children(draft.parents[node]) if e < node and draft.laws[e] == draft.laws[node]]
    left = float(probs.sum()) - sum(float(probs[draft.token_ids[elder]]) for elder in elders)
    return float(probs[draft.token_ids[node]]) / left if left > 0 else 0.0

"""Commits a step: appends tokens, keeps the KV of accepted rows, and informs proposers and observers."""

from __future__ import annotations

from outrider.engine import rounds
from outrider.engine.failures import Failures
from outrider.engine.outputs import piece
from outrider.engine.proposing import observation
from outrider.engine.proposing.acceptance_alarm import AcceptanceAlarm
from outrider.engine.proposing.drafting import StepDraft, teach
from outrider.engine.proposing.governing import Governing
from outrider.engine.proposing.observation import ComputedRows
from outrider.engine.scheduling.row_shares import RowShares
from outrider.engine.scheduling.scheduler import Schedule
from outrider.engine.scheduling.tenants import Tenants
from outrider.engine.scoring import Written, score, score_prompt
from outrider.engine.sequence import Sequence, Status
from outrider.engine.stats import EngineStats
from outrider.engine.verification import Judged
from outrider.model.runner import ForwardOutput
from outrider.params import TokenOrigin
from outrider.structured.grammar import GrammarError
from outrider.verify.logprobs import Decode
from outrider.verify.verifier import Verdict


class Committing:
    """Writes down what stands.

    Args:
        stats: Where tokens are counted.
        tenants: Who has had how much.
        failures: Ends requests that cannot go on.
        governing: Knows why a sequence drafted as it did.
        shares: How the members of compositions share rows.
        decode: Text of a token.
    """

    def __init__(
        self,
        stats: EngineStats,
        tenants: Tenants,
        failures: Failures,
        governing: Governing,
        shares: RowShares,
        decode: Decode,
    ) -> None:
        self._stats = stats
        self._tenants = tenants
        self._failures = failures
        self._governing = governing
        self._shares = shares
        self._decode = decode
        self._alarm = AcceptanceAlarm()

    def commit(
        self, plan: Schedule, drafts: list[StepDraft], out: ForwardOutput, judged: dict[int, Judged]
    ) -> dict[int, int]:
        """Returns how many draft tokens entered each text, by place in the plan, where a token was due."""
        computed: list[ComputedRows] = []
        entered: dict[int, int] = {}
        for place, (item, step) in enumerate(zip(plan.items, drafts, strict=True)):
            if item.seq.request.error is not None:
                continue
            with self._failures.contained(item.seq, "its commit"):
                found = self._commit_one(place, plan, step, out, judged.get(place))
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
        self, place: int, plan: Schedule, step: StepDraft, out: ForwardOutput, judged: Judged | None
    ) -> ComputedRows | None:
        """Write down what a sequence has gained; returns what its proposers may see, or None if it failed."""
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
        return ComputedRows(item, step, place, start, accepted)

    def _extend(
        self, seq: Sequence, step: StepDraft, out: ForwardOutput, judged: Judged, num_sequences: int
    ) -> tuple[int, ...]:
        """Append what stands; returns the draft tokens that entered the text."""
        draft, verdict = step.draft, judged.verdict
        before = seq.num_output_tokens
        found = None
        if seq.request.options.trace:
            reason = self._governing.reason(seq, drafted=len(draft) > 0)
            candidate, logits = judged.candidate, judged.logits
            found = rounds.trace(seq, step, candidate, verdict, logits, reason, num_sequences, self._decode)
        written, fault = _append(seq, step, judged)
        score(seq, judged.candidate, written, out.logits, judged.logits, self._decode)
        num_written = len(written)
        num_accepted = min(num_written, len(verdict.path))
        if found is not None:
            wrote = num_written > num_accepted
            seconds, begun = self._stats.step_seconds, seq.request.begun
            seq.rounds.append(rounds.close(found, num_accepted, seconds, begun, wrote_token=wrote))
        seq.stats.num_target_passes += 1
        self._stats.num_committed_tokens += num_written
        self._tenants.charge(seq, num_written)
        seq.view.round += 1  # also where nothing was drafted: the keys of a round may be spent
        self._teach(seq, step, verdict)
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

    def _teach(self, seq: Sequence, step: StepDraft, verdict: Verdict) -> None:
        """Tell those who shaped a draft what of it stands; what raises there costs drafts and no text."""
        try:
            teach(step, verdict.path, greedy=seq.request.params.greedy)
            for part, drafter in step.drafted:
                outcome = part.outcome(verdict.path)
                self._shares.observe(drafter.method, *outcome)
                self._alarm.observe(drafter.method, *outcome)
        except Exception as error:
            seq.stats.num_proposer_faults += 1
            for _, drafter in step.drafted:
                drafter.report_fault(seq.request.request_id, f"its tree builder raised {error!r}")


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

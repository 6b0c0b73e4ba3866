"""Verifies the drafts of a step, and computes the logprobs of what it commits."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.drafting.asking import StepDraft
from outrider.engine.failures import Failures, NotFiniteError
from outrider.engine.scheduler import Schedule, ScheduledSequence
from outrider.engine.sequence import Sequence
from outrider.model.runner import ForwardOutput
from outrider.results import CoinToss
from outrider.verify.logits import Decode, finite_argmax, positions, processed_logprobs, raw_logprobs
from outrider.verify.noise import NoiseSource
from outrider.verify.verifier import CandidateKeys, DraftCandidate, Verdict, Verifier, rule_for

# --- Verifies the drafts of a step: processes logits row by row, and applies the rules.


@dataclass(frozen=True)
class Judged:
    """A sequence whose next tokens are decided."""

    candidate: DraftCandidate  # what was verified
    verdict: Verdict  # the accepted draft nodes and the token drawn after them
    logits: Tensor  # [num_logits, vocab_size] of the whole step, as the parameters left them
    #: Rows of the candidate from which no token can be chosen (0 is behind the committed text), and why. Drafts have rows
    #: that no text comes to: such a fault counts when the text comes to its row, and has not ended before.
    faults: Mapping[int, BaseException]


class Verification:
    """Decides what the sequences of a step write."""

    def __init__(self, noise: NoiseSource, failures: Failures) -> None:
        self._failures = failures
        self._faults: dict[int, dict[int, BaseException]] = {}
        self.use_noise(noise)

    def use_noise(self, noise: NoiseSource) -> None:
        """Replace the source of all chance."""
        self._noise = noise
        self._verifier = Verifier(noise)

    def verify(self, plan: Schedule, drafts: list[StepDraft], out: ForwardOutput) -> dict[int, Judged]:
        """By place in the plan, for the sequences whose next token is due and can be chosen."""
        candidates = self._candidates(plan, drafts, out)
        logits, best, faults = self._processed(plan, candidates, out.logits)
        self._faults = faults
        for place, of_rows in faults.items():
            if 0 in of_rows:
                self._failures.fail_at_row(plan.items[place].seq, of_rows[0])
        alive = {p: c for p, c in candidates.items() if plan.items[p].seq.request.error is None}
        verdicts = self._verdicts(plan, alive, logits, best)
        return {place: Judged(alive[place], verdict, logits, faults[place]) for place, verdict in verdicts.items()}

    def forget(self) -> None:
        """The step is over. An error holds the frames of the step, which hold the faults, so the circle is opened here."""
        for of_rows in self._faults.values():
            of_rows.clear()

    def _verdicts(
        self, plan: Schedule, candidates: dict[int, DraftCandidate], logits: Tensor, best: list[int]
    ) -> dict[int, Verdict]:
        """The verdicts of all together; where that raises, of one after another with the same coins, so that it is known
        whose fault it is."""
        self._noise.mark()
        try:
            return dict(zip(candidates, self._verifier.verify(list(candidates.values()), logits, best), strict=True))
        except Exception:
            self._noise.rewind()
        verdicts = {}
        for place, candidate in candidates.items():
            if candidate.coins is not None:
                candidate.coins.clear()
                candidate.residuals.clear()
            with self._failures.contained(plan.items[place].seq, "its verification"):
                (verdicts[place],) = self._verifier.verify([candidate], logits, best)
        return verdicts

    def _candidates(self, plan: Schedule, drafts: list[StepDraft], out: ForwardOutput) -> dict[int, DraftCandidate]:
        """By place in the plan, of all whose next token is due."""
        candidates = {}
        for place, (item, step) in enumerate(zip(plan.items, drafts, strict=True)):
            if not item.completes or item.seq.request.error is not None:
                continue
            first = out.logits_row(place, item.num_rows - 1)
            with self._failures.contained(item.seq, "its draft"):
                candidates[place] = _candidate(item, step, (first, first + 1 + len(step.draft)))
        return candidates

    def _processed(
        self, plan: Schedule, candidates: dict[int, DraftCandidate], raw: Tensor
    ) -> tuple[Tensor, list[int], dict[int, dict[int, BaseException]]]:
        """Logits as each request's parameters leave them along its draft, the most likely token of each row, and by place
        the faults of its rows.

        A row with a fault gets equal logits, so that the others can be verified: whatever stands in a row, a rule is exact
        for texts that do not come there.
        """
        best = finite_argmax(raw)
        faults: dict[int, dict[int, BaseException]] = {}
        processed = raw
        for place, candidate in candidates.items():
            rows = range(*candidate.rows)
            sound = [node for node, row in enumerate(rows) if best[row] >= 0]
            found: dict[int, BaseException] = {n: NotFiniteError() for n, row in enumerate(rows) if best[row] < 0}
            processing = plan.items[place].seq.view.processing
            if sound and processing.active:
                paths = [(), *candidate.draft.paths]
                with self._failures.contained(plan.items[place].seq, "processing its logits"):
                    changed = processing.apply(raw[[rows[node] for node in sound]], [paths[node] for node in sound])
                    processed = raw.clone() if processed is raw else processed  # the raw ones are still reported
                    processed[[rows[node] for node in sound]] = changed.logits
                    found |= {sound[row]: error for row, error in changed.faults.items()}
                    changed.faults.clear()  # see `forget`
            if found:
                processed = raw.clone() if processed is raw else processed
                processed[[rows[node] for node in found]] = 0.0
            faults[place] = found
        return processed, best if processed is raw else finite_argmax(processed), faults


def _candidate(item: ScheduledSequence, step: StepDraft, rows: tuple[int, int]) -> DraftCandidate:
    """A sequence's draft as the Verifier sees it."""
    view = item.seq.view
    keys = CandidateKeys(view.seq_id, view.seed, view.sample, view.round, len(view.token_ids))
    rule = rule_for(step.draft, item.rule, coupled=item.coupled)
    coins: list[CoinToss] | None = [] if item.seq.request.options.trace else None
    return DraftCandidate(step.draft, rows, view.sampling, keys, rule, coins)


# --- Computes logprobs of the tokens that a step commits, for requests that asked for them.


Written = Seq[tuple[int, int]]


def score(
    seq: Sequence, candidate: DraftCandidate, written: Written, raw: Tensor, processed: Tensor, decode: Decode
) -> None:
    """Record the logprobs of tokens that were written, each given with the node of the draft that it follows (-1: the
    committed text), from [num_logits, vocab_size] logits: the target's raw ones, and as the parameters left them."""
    params = seq.request.params
    if params.logprobs is None or not written:
        return
    rows = torch.tensor([node + 1 for node, _ in written], device=raw.device) + candidate.rows[0]
    logprobs = raw_logprobs(raw[rows]) if params.logprobs_mode == "raw" else processed_logprobs(processed[rows], params)
    seq.logprobs += positions(logprobs, [token for _, token in written], params.logprobs, decode)


def score_prompt(seq: Sequence, start: int, num_rows: int, logits: Tensor, decode: Decode) -> None:
    """Record the logprobs of `num_rows` tokens of the prompt from position `start` on, for whom asked, from their raw
    logits [num_rows or more, vocab_size]. The first sample scores the prompt for all. A prompt that is computed again after
    a preemption has them already."""
    count = seq.request.params.prompt_logprobs
    if count is None or seq.index != 0:
        return
    scores, prompt = seq.request.prompt_logprobs, seq.request.prompt_token_ids
    skip = len(scores) - 1 - start
    tokens = prompt[start + 1 : start + 1 + num_rows]
    if 0 <= skip < len(tokens):
        scores += positions(raw_logprobs(logits[skip : len(tokens)]), tokens[skip:], count, decode)

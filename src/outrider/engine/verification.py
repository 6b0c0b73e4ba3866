"""Verification in the engine: which rows are whose, and what stands of each draft."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.engine.drafting import StepDraft
from outrider.engine.failures import Failures
from outrider.engine.governing import Governing
from outrider.engine.scheduler import Schedule, ScheduledSequence
from outrider.engine.scoring import Decode, score
from outrider.errors import NonFiniteLogitsError, NoTokenLeftError, ProcessingError
from outrider.model.runner import ForwardOutput
from outrider.trace import CoinToss
from outrider.verify.grammar import GrammarError
from outrider.verify.noise import NoiseSource
from outrider.verify.verifier import Candidate, CandidateKeys, Verdict, Verifier, rule_for


@dataclass(frozen=True)
class Judged:
    """A sequence whose next tokens are decided.

    Attributes:
        candidate: What was verified.
        verdict: What stands.
        logits: [num_logits, vocab_size] of the whole step, as the parameters left them.
    """

    candidate: Candidate
    verdict: Verdict
    logits: Tensor


class Verification:
    """Decides what the sequences of a step write.

    Args:
        noise: Source of all chance.
        failures: Ends requests that cannot go on.
        governing: Is told how probable texts without drafts are.
        decode: Text of a token.
    """

    def __init__(self, noise: NoiseSource, failures: Failures, governing: Governing, decode: Decode) -> None:
        self._failures = failures
        self._governing = governing
        self._decode = decode
        self.use_noise(noise)

    def use_noise(self, noise: NoiseSource) -> None:
        """Replace the source of all chance."""
        self._noise = noise
        self._verifier = Verifier(noise)

    def verify(self, plan: Schedule, drafts: list[StepDraft], out: ForwardOutput) -> dict[int, Judged]:
        """By place in the plan, for the sequences whose next token is due and can be chosen."""
        candidates = self._candidates(plan, drafts, out)
        logits, stuck = self._processed(plan, candidates, out.logits)
        alive = {p: c for p, c in candidates.items() if plan.items[p].seq.request.error is None}
        judged = {}
        for place, verdict in self._verdicts(plan, alive, logits).items():
            seq = plan.items[place].seq
            nodes = [-1, *verdict.path] if place in stuck else []
            ends = [seq.num_output_tokens + behind for behind, node in enumerate(nodes) if stuck[place][node + 1]]
            if ends:
                self._failures.fail(seq.request, NoTokenLeftError, _nothing_left(ends[0]))
                continue
            with self._failures.contained(seq, "its log probabilities"):
                score(seq, alive[place], verdict, out.logits, logits, self._decode)
                judged[place] = Judged(alive[place], verdict, logits)
                if verdict.chance is not None and self._governing.watches(seq):
                    self._governing.note(seq, verdict.chance)
        return judged

    def _verdicts(self, plan: Schedule, candidates: dict[int, Candidate], logits: Tensor) -> dict[int, Verdict]:
        """Of all together; where that raises, of one after another with the same coins, so that it is known whose fault it
        is."""
        self._noise.mark()
        try:
            return dict(zip(candidates, self._verifier.verify(list(candidates.values()), logits), strict=True))
        except Exception:
            self._noise.rewind()
        verdicts = {}
        for place, candidate in candidates.items():
            if candidate.coins is not None:
                candidate.coins.clear()
            with self._failures.contained(plan.items[place].seq, "its verification"):
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
                with self._failures.contained(item.seq, "its draft"):
                    candidates[place] = _candidate(item, step, rows)
            else:
                problem = f"the target wrote NaN or infinity after {len(item.seq.token_ids)} tokens"
                self._failures.fail(item.seq.request, NonFiniteLogitsError, problem)
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
                self._failures.fail(seq.request, ProcessingError, str(error), cause=error)
            except Exception as error:
                self._failures.fail(seq.request, ProcessingError, f"processing its logits raised {error!r}", cause=error)
        return processed, stuck


def _candidate(item: ScheduledSequence, step: StepDraft, rows: tuple[int, int]) -> Candidate:
    """A sequence's draft as the Verifier sees it."""
    view = item.seq.view
    keys = CandidateKeys(view.seq_id, view.seed, view.sample, view.round, len(view.token_ids))
    rule = rule_for(step.draft, item.rule, coupled=item.coupled)
    coins: list[CoinToss] | None = [] if item.seq.request.traced else None
    return Candidate(step.draft, rows, view.sampling, keys, rule, coins)


def _nothing_left(count: int) -> str:
    where = (
        f"after {count} {'token' if count == 1 else 'tokens'} of the text" if count else "at the first token of the text"
    )
    return f"{where}, its parameters together forbid every token"

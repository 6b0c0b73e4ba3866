"""Turns runs into figures: medians over rounds, and ratios within each round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from outrider.bench.results import ModelResult, WayResult
from outrider.measure import machine
from outrider.measure.contestants import Contestant
from outrider.measure.figures import (
    LOOPS_ABOVE,
    Spread,
    conditional_acceptance,
    expected_tokens,
    percentile,
    repeated_8grams,
    row_cost_ratio,
)
from outrider.measure.plausible import SLACK, believed_rounds
from outrider.measure.run import Run
from outrider.stats import RequestStats

PLAIN = "plain"


def summarise(
    contestants: Sequence[Contestant],
    runs: Mapping[str, list[Run]],
    batch: int,
    model: ModelResult,
    bandwidth: float | None,
    context: float,
) -> list[WayResult]:
    """The figures of every contestant. Speedups are over our plain decoding in the same round.

    Args:
        contestants: The contestants in the order of their turns.
        runs: The runs of each contestant by its name, round by round. Contestants without runs get no figures.
        batch: The number of texts at a time.
        model: The costs of the target.
        bandwidth: The bytes per second that the machine reads.
        context: The mean length of the texts while they are written.
    """
    found = [_summary(c, runs[c.name], runs[PLAIN], batch, model, bandwidth) for c in contestants if c.name in runs]
    for result in found:
        _add_limits(result, batch, model.seconds_near(context))
    return found


def _summary(
    contestant: Contestant, runs: list[Run], plain: list[Run], batch: int, model: ModelResult, bandwidth: float | None
) -> WayResult:
    speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
    result = WayResult(
        name=contestant.name,
        peer=contestant.peer,
        tokens_per_second=Spread.of(speeds),
        whole_tokens_per_second=_certain([run.whole_tokens_per_second for run in runs]),
        time_to_first_token=Spread.of([seconds for run in runs for seconds in run.first_token_seconds]),
        gap_p50=percentile([gap for run in runs for gap in run.gaps], 0.50),
        gap_p99=percentile([gap for run in runs for gap in run.gaps], 0.99),
        num_tokens=sum(run.num_tokens for run in runs),
        shares={phase: median(run.shares[phase] for run in runs) for phase in runs[0].shares},
        peak_resident=max((r.peak.resident for r in runs if r.peak and r.peak.resident is not None), default=None),
        peak_cuda=max((r.peak.cuda for r in runs if r.peak and r.peak.cuda is not None), default=None),
        repeated_8grams=(repeated := median(repeated_8grams(ids) for run in runs for ids in run.token_ids)),
        loops=repeated > LOOPS_ABOVE,
    )
    if not result.plain:
        pairs = list(zip(runs, plain, strict=True)) if contestant.peer else believed_rounds(runs, plain)
        result.disturbed = not pairs
        result.speedup = _ratios(pairs, lambda run: run.tokens_per_second)
        result.whole_speedup = _ratios(pairs, lambda run: run.whole_tokens_per_second)
    elif batch == 1 and bandwidth and model.weight_bytes and result.tokens_per_second is not None:
        share = result.tokens_per_second.median * model.weight_bytes / bandwidth
        result.bandwidth_share = share if share <= SLACK else None
    _add_drafts(result, runs)
    return result


def reads_too_fast(runs: Mapping[str, list[Run]], batch: int, model: ModelResult, bandwidth: float | None) -> bool:
    """Whether plain decoding of one text read weights faster than memory gives them, although they fit no cache."""
    speeds = [run.tokens_per_second for run in runs[PLAIN] if run.tokens_per_second is not None]
    if batch != 1 or not bandwidth or not model.weight_bytes or not speeds:
        return False
    return median(speeds) * model.weight_bytes > SLACK * bandwidth and not machine.fits_a_cache(model.weight_bytes)


def _certain(values: list[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None
    return spread


def _ratios(rounds: Sequence[tuple[Run, Run]], speed: Callable[[Run], float | None]) -> Spread | None:
    """The ratios of two speeds within each round. A round does not count where one of the two is not known."""
    pairs = [(speed(run), speed(base)) for run, base in rounds]
    return Spread.of([a / b for a, b in pairs if a is not None and b is not None])


def _add_drafts(result: WayResult, runs: list[Run]) -> None:
    """Add acceptance, and what it should be worth."""
    counts = RequestStats()
    for run in runs:
        counts.add(run.drafts or RequestStats())
    num_passes = sum(run.num_passes or 0 for run in runs)
    if num_passes:
        result.tokens_per_pass = result.num_tokens / num_passes
    if counts.num_drafts:
        result.tau = 1.0 + counts.num_accepted_tokens / counts.num_drafts
        result.rows = 1.0 + counts.num_draft_tokens / counts.num_drafts
        result.draft_length = sum(counts.drafted_per_position) / counts.num_drafts
        tried = counts.tried_per_position
        result.tries_by_position = list(tried)
        result.acceptance_by_position = conditional_acceptance(counts.accepted_per_position[: len(tried)], tried)
        if sum(tried):
            result.acceptance = sum(counts.accepted_per_position) / sum(tried)
            result.expected_tokens = expected_tokens(result.acceptance, result.draft_length)
    elif result.peer is not None and result.tokens_per_pass is not None and result.tokens_per_pass > 1.0:
        result.tau = result.tokens_per_pass
    if result.tau is not None and result.speedup is not None:
        result.eta = result.speedup.median / result.tau


def _add_limits(result: WayResult, batch: int, row_seconds: Mapping[int, float]) -> None:
    """Add what eta would be if only the target's pass cost time."""
    if result.rows is not None:
        cost = row_cost_ratio(row_seconds, batch * result.rows, batch)
        result.eta_limit = None if cost is None else 1.0 / cost

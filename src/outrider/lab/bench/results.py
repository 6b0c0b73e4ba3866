"""The results of a benchmark: medians over rounds, ratios within each round, and their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from outrider.lab.bench.plan import Cell
from outrider.lab.measure import machine
from outrider.lab.measure.decoding_config import Recipe, precision
from outrider.lab.measure.figures import (
    LOOPS_ABOVE,
    Spread,
    conditional_acceptance,
    expected_tokens,
    percentile,
    repeated_8grams,
    row_cost_ratio,
)
from outrider.lab.measure.writing import SLACK, Contestant, Run, believed_rounds
from outrider.results import RequestStats

#: The tokens before the rows of passes in results that were kept before other contexts were measured.
_EARLIER_CONTEXT = 128


class WayResult(BaseModel):
    """The figures of one way in one cell. A figure is None where it cannot be known."""

    model_config = ConfigDict(extra="forbid")

    name: str  # "draft_model k=3", or "PEER: mode" for a peer
    peer: str | None = None  # the peer to which the way belongs. None for a way of our own.
    tokens_per_second: Spread | None  # the speed of decoding: the tokens after the first step, over the time after it
    whole_tokens_per_second: Spread  # all tokens over the whole time, prompts included
    speedup: Spread | None = None  # the speed of decoding over that of our plain decoding in the same round
    whole_speedup: Spread | None = None  # the same ratio with prompts included
    time_to_first_token: Spread | None = None  # seconds until the first token
    gap_p50: float | None = None  # the median and the 99th percentile of the seconds between arrivals within a text
    gap_p99: float | None = None  # the median and the 99th percentile of the seconds between arrivals within a text
    num_tokens: int  # the tokens written in all rounds
    # The mean acceptance length, 1 + accepted / verified drafts. Where a peer does not count these, it is the number of
    # tokens per pass.
    tau: float | None = None
    tokens_per_pass: float | None = None  # the tokens over the passes of the target, including passes without a draft
    draft_length: float | None = None  # the mean number of positions of a draft
    rows: float | None = None  # the mean number of rows of a pass that verified a draft: the draft tokens and one more
    acceptance: float | None = None  # the conditional acceptance over all positions together
    # The conditional acceptance at each position. None where no draft reached the position.
    acceptance_by_position: list[float | None] = []
    tries_by_position: list[int] = []  # the number of drafts behind each of these
    expected_tokens: float | None = None  # (1 - a^(K+1)) / (1 - a) for that acceptance and draft length
    eta: float | None = None  # speedup / tau
    # 1 / C for those rows, behind the measured context that is nearest to the length of the texts. This is what eta would
    # be if only the pass of the target cost time.
    eta_limit: float | None = None
    shares: dict[str, float] = {}  # the shares of a step's time by phase: propose, forward, verify, host
    peak_resident: int | None = None  # peaks of memory in bytes
    peak_cuda: int | None = None  # peaks of memory in bytes
    # The bytes of weights read per second, over what the machine can read. Known for plain decoding in batch 1.
    bandwidth_share: float | None = None
    repeated_8grams: float  # the median over texts of the share of repeated 8-grams
    loops: bool  # whether that share is too large for a headline
    disturbed: bool = False  # whether other work disturbed it so that its speed cannot be true. Then its speedups are None.

    @property
    def plain(self) -> bool:
        """Tells whether this is our own plain decoding."""
        return self.peer is None and self.name == "plain"

    @property
    def drafted(self) -> bool:
        """Tells whether any draft was verified."""
        return self.tau is not None


class CellResult(BaseModel):
    """A cell, and its ways in the order of their turns."""

    model_config = ConfigDict(extra="forbid")

    cell: Cell  # the cell
    ways: list[WayResult]  # the figures of every way that wrote all texts
    dropouts: list[str] = []  # who failed, and why
    recipes: dict[str, Recipe] = {}  # how to use each of our own ways, by its name

    @property
    def disturbed(self) -> list[str]:
        """The names of the ways whose speed cannot be true. Where there are any, the cell is not kept."""
        return [way.name for way in self.ways if way.disturbed]

    def flatters(self, way: WayResult) -> bool:
        """Tells whether a way wrote greedy text that loops. Every proposer guesses it, so its figures must not be a
        headline."""
        return way.loops and self.cell.sampling == "greedy"

    @property
    def shown(self) -> list[WayResult]:
        """Our own ways, and for every peer its plain decoding and the best of its other modes."""
        return [way for way in self.ways if way.peer is None or way.name in self._chosen]

    @property
    def _chosen(self) -> set[str]:
        found = set()
        for peer in {way.peer for way in self.ways if way.peer is not None}:
            modes = [way for way in self.ways if way.peer == peer]
            plain = [way for way in modes if way.name.endswith(": plain")]
            others = [way for way in modes if way not in plain]
            best = max(others, key=lambda way: way.whole_tokens_per_second.median, default=None)
            found |= {way.name for way in (*plain, *([best] if best else ()))}
        return found


class PrefillResult(BaseModel):
    """One pass over a part of a prompt."""

    model_config = ConfigDict(extra="forbid")

    start: int  # the tokens before its rows
    rows: int  # its rows
    seconds: float  # its time
    # Its multiplications and additions: the products with weights, the output head for one row, and the attention of every
    # row to all that it sees. None where they depend on the tokens.
    operations: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def operations_per_second(self) -> float | None:
        return None if self.operations is None else self.operations / self.seconds


class ModelResult(BaseModel):
    """The costs of a model in one precision."""

    model_config = ConfigDict(extra="forbid")

    # The seconds of a pass by the number of tokens before its rows, and by its number of rows.
    pass_seconds: dict[int, dict[int, float]]
    prefill: list[PrefillResult] = []  # the passes over parts of a prompt
    # How many positions its rotary range was stretched to for these passes. None where it was not.
    positions: int | None = None
    weight_bytes: int | None  # the bytes of weights that decoding a token reads. None for mixtures of experts.
    num_parameters: int  # the number of parameters
    doubt: str | None = None  # why the times cannot be believed; None where they can. Those that cannot are not kept.

    @model_validator(mode="before")
    @classmethod
    def _before_there_were_contexts(cls, given: Any) -> Any:
        """Results that were kept earlier hold `row_seconds`, which were measured behind 128 tokens."""
        if isinstance(given, dict) and "row_seconds" in given:
            rest = {name: value for name, value in given.items() if name != "row_seconds"}
            return {"pass_seconds": {_EARLIER_CONTEXT: given["row_seconds"]}, **rest}
        return given

    def row_costs(self, context: int) -> dict[int, float]:
        """C(n) = T(n) / T(1) behind a context, for each number n of rows. Empty where T(1) is not known."""
        seconds = self.pass_seconds[context]
        base = seconds.get(1)
        return {} if base is None else {n: found / base for n, found in seconds.items()}

    def seconds_near(self, context: float) -> dict[int, float]:
        """The seconds of a pass by its rows, behind the measured context that is nearest. Empty where there is none."""
        nearest = min(self.pass_seconds, key=lambda known: abs(known - context), default=None)
        return {} if nearest is None else self.pass_seconds[nearest]


class Outcome(StrEnum):
    """Holds what an advice recommends."""

    PAYS = "pays"
    UNCLEAR = "unclear"
    PLAIN = "plain"
    LOOPS = "loops"
    ABSENT = "absent"
    DISTURBED = "disturbed"


class Advice(BaseModel):
    """Holds what pays in one precision, sampled one way, so many texts at a time."""

    model_config = ConfigDict(extra="forbid")

    group: str  # "model, dtype, sampling, batch n"
    # PAYS where a way was faster than plain decoding in each of several rounds; PLAIN where the best was slower in each, or
    # where none drafted; UNCLEAR where rounds disagree or there was only one; LOOPS where all text repeats itself and says
    # nothing; ABSENT where no way to draft took part.
    outcome: Outcome
    way: str | None  # the best way to draft. None where no way drafted text that counts.
    # The speed of its decoding over plain decoding: the median over workloads, and the range over all rounds.
    speedup: Spread | None
    never_drafted: list[str]  # the ways that never found anything to draft
    text: str  # all of this in sentences
    python: str | None  # a line of Python and a command line that use what is best. None where there is none.
    command: str | None  # a line of Python and a command line that use what is best. None where there is none.


class Results(BaseModel):
    """All results of one machine with one set of versions."""

    model_config = ConfigDict(extra="forbid")

    machine: dict[str, Any]  # hardware and versions
    bandwidth: float | None = None  # the bytes per second that the machine reads from memory
    # The operations per second of torch's product of two matrices, by the name of their type.
    products: dict[str, float] = {}
    models: dict[str, ModelResult] = {}  # the costs of models, by "model, dtype"
    cells: dict[str, CellResult] = {}  # the cells, by `Cell.key`
    advice: list[Advice] = []  # what pays, for each group of cells
    notes: list[str] = []  # what was left out, and why

    def product_peak(self, dtype: str) -> float | None:
        """The operations per second that torch's product reaches in a precision, or in float32 where that is more."""
        names = (precision(dtype)["dtype"], "float32")
        known = [self.products[name] for name in names if name in self.products]
        return max(known, default=None)

    @property
    def believed(self) -> Results:
        """Returns the same without what other work disturbed."""
        cells = {key: found for key, found in self.cells.items() if not found.disturbed}
        models = {name: model for name, model in self.models.items() if model.doubt is None}
        return self.model_copy(update={"cells": cells, "models": models})

    def note(self, text: str) -> None:
        """Add a note, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def remarks(self) -> list[str]:
        """The notes, who dropped out of a cell, and what other work disturbed, each once."""
        dropouts = [said for found in self.cells.values() for said in found.dropouts]
        doubts = [f"passes of {name} were disturbed: {model.doubt}" for name, model in self.models.items() if model.doubt]
        doubts += [
            f"{found.cell.load} was disturbed: {', '.join(found.disturbed)} seemed faster than can be. It is not kept: "
            "measure it again when the machine is at rest"
            for found in self.cells.values()
            if found.disturbed
        ]
        return list(dict.fromkeys([*self.notes, *dropouts, *doubts]))


# --- Turns runs into figures: medians over rounds, and ratios within each round.


PLAIN = "plain"


def summarise(
    contestants: Sequence[Contestant[Run]],
    runs: Mapping[str, list[Run]],
    batch: int,
    model: ModelResult | None = None,
    bandwidth: float | None = None,
    context: float = 0.0,
) -> list[WayResult]:
    """The figures of every contestant. Speedups are over our plain decoding in the same round, where it takes part. The
    costs of the target and the bytes per second that the machine reads are None where they are not known."""
    plain = runs.get(PLAIN, [])
    found = [_summary(c, runs[c.name], plain, batch, model, bandwidth) for c in contestants if c.name in runs]
    if model is not None:
        for result in found:
            if result.rows is not None:  # what eta would be if only the target's pass cost time
                cost = row_cost_ratio(model.seconds_near(context), batch * result.rows, batch)
                result.eta_limit = None if cost is None else 1.0 / cost
    return found


def _summary(
    contestant: Contestant[Run],
    runs: list[Run],
    plain: list[Run],
    batch: int,
    model: ModelResult | None,
    bandwidth: float | None,
) -> WayResult:
    speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
    whole = Spread.of([run.whole_tokens_per_second for run in runs])
    assert whole is not None
    result = WayResult(
        name=contestant.name,
        peer=contestant.peer,
        tokens_per_second=Spread.of(speeds),
        whole_tokens_per_second=whole,
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
    if not result.plain and plain:
        pairs = list(zip(runs, plain, strict=True)) if contestant.peer else believed_rounds(runs, plain)
        result.disturbed = not pairs
        result.speedup = _ratios(pairs, lambda run: run.tokens_per_second)
        result.whole_speedup = _ratios(pairs, lambda run: run.whole_tokens_per_second)
    elif batch == 1 and bandwidth and model is not None and model.weight_bytes and result.tokens_per_second is not None:
        share = result.tokens_per_second.median * model.weight_bytes / bandwidth
        result.bandwidth_share = share if share <= SLACK else None
    _add_drafts(result, runs)
    return result


def reads_too_fast(runs: Mapping[str, list[Run]], batch: int, model: ModelResult, bandwidth: float | None) -> bool:
    """Tells whether plain decoding of one text read weights faster than memory gives them, although they fit no cache."""
    speeds = [run.tokens_per_second for run in runs[PLAIN] if run.tokens_per_second is not None]
    if batch != 1 or not bandwidth or not model.weight_bytes or not speeds:
        return False
    return median(speeds) * model.weight_bytes > SLACK * bandwidth and not machine.fits_a_cache(model.weight_bytes)


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

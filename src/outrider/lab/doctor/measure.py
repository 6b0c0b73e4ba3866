"""Writes sample texts step by step, and counts time and drafts of the steps in which all texts decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outrider.config import RequestOptions
from outrider.engine.engine import Engine
from outrider.engine.sequence import Request, Status
from outrider.engine.stats import PHASES
from outrider.lab.measure.row_costs import row_costs
from outrider.lab.measure.writing import EncodedTask
from outrider.model.memory import PassTimer
from outrider.model.runner import ModelRunner
from outrider.params import SamplingParams
from outrider.propose.settings import SpeculationConfig
from outrider.results import RequestStats, RoundTrace

#: The numbers of rows whose passes are timed, and how often each is.
ROWS, _REPEATS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64), 5
#: How far from its place a first draft token is looked for in the text, before and behind.
SHIFTS = (-2, -1, 0, 1, 2)


def pass_seconds(runner: ModelRunner, context: int) -> tuple[dict[int, float], str | None]:
    """The median seconds of a pass by its number of rows, and why they cannot be believed; None where they can. All numbers
    are timed in turn, so that slow moments hit all. Where a pass was slower than one of more rows, something disturbed it,
    and the time of the other one is taken."""
    limit = runner.loaded.max_model_len
    context = max(1, min(context, limit - ROWS[-1]))
    timer = PassTimer(runner, min(limit, context + ROWS[-1]))
    found = row_costs(timer, [context], ROWS, limit, _REPEATS)
    return undisturbed(found.seconds[context]), found.doubt


def undisturbed(seconds: Mapping[int, float]) -> dict[int, float]:
    """Times of passes by rows, where no pass takes longer than one of more rows."""
    return {rows: min(time for more, time in seconds.items() if more >= rows) for rows in seconds}


@dataclass
class Writing:
    """Holds what writing came to, in steps in which texts decode and no prompt is read."""

    num_steps: int = 0  # those steps
    num_tokens: int = 0  # tokens that they committed
    num_texts: int = 0  # texts in them, added up over steps
    seconds: float = 0.0  # wall time of those steps
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # the same by phase of a step
    stats: RequestStats = field(default_factory=RequestStats)  # counts of the drafts of whole texts

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a text gains in a step."""
        return self.num_tokens / max(self.num_texts, 1)

    @property
    def texts_per_step(self) -> float:
        return self.num_texts / max(self.num_steps, 1)

    def step_seconds(self, *phases: str) -> float:
        """Mean seconds of some phases of a step."""
        return sum(self.phases[phase] for phase in phases) / max(self.num_steps, 1)

    @property
    def host_seconds(self) -> float:
        """Mean seconds of a step that are neither the proposer's nor the pass's."""
        return self.seconds / max(self.num_steps, 1) - self.step_seconds("propose", "forward")

    def add(self, other: Writing) -> None:
        """Fold another's counts into these."""
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.num_texts += other.num_texts
        self.seconds += other.seconds
        self.phases = {phase: seconds + other.phases[phase] for phase, seconds in self.phases.items()}
        self.stats.add(other.stats)


def write(engine: Engine, tasks: Sequence[EncodedTask], config: SpeculationConfig, temperature: float) -> Writing:
    """Write all tasks in one batch, each to its full length."""
    found = Writing()
    requests: list[Request] = []
    try:
        requests += [engine.add_request(task.prompt_ids, _params(task, temperature), config) for task in tasks]
        while not all(request.finished for request in requests):
            _step(engine, requests, found)
    finally:
        for request in requests:
            engine.cancel(request)
    for request in requests:
        if request.error is not None:
            raise request.error
        found.stats.add(request.sequences[0].stats)
    return found


def _step(engine: Engine, requests: Sequence[Request], found: Writing) -> None:
    live = [seq for request in requests for seq in request.sequences if seq.status is not Status.FINISHED]
    decoding = bool(live) and all(seq.num_output_tokens for seq in live)
    before = sum(seq.num_output_tokens for seq in live)
    start = perf_counter()
    engine.step()
    seconds = perf_counter() - start
    if decoding:
        found.num_steps += 1
        found.num_texts += len(live)
        found.num_tokens += sum(seq.num_output_tokens for seq in live) - before
        found.seconds += seconds
        for phase in PHASES:
            found.phases[phase] += engine.stats.step_seconds.get(phase, 0.0)


def _params(task: EncodedTask, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=task.max_tokens, ignore_eos=True)


def shifts(engine: Engine, tasks: Sequence[EncodedTask], config: SpeculationConfig) -> dict[int, float]:
    """Returns where in greedy text the first tokens of drafts are found: by distance from their place, the share that
    agrees. It is empty where nothing was drafted. The share at 0 is that of first draft tokens that stand. Where another
    one is much larger, the drafts are for another place than their own."""
    agreed, tried = Counter[int](), Counter[int]()
    for task in tasks:
        request = engine.add_request(task.prompt_ids, _params(task, 0.0), config, RequestOptions(trace=True))
        while not request.finished:
            engine.step()
        (sequence,) = request.sequences
        count_shifts(sequence.token_ids, sequence.rounds, agreed, tried)
    return {shift: agreed[shift] / tried[shift] for shift in SHIFTS if tried[shift]}


def count_shifts(text: Sequence[int], rounds: Sequence[RoundTrace], agreed: Counter[int], tried: Counter[int]) -> None:
    """Count for each distance how many drafts had a token there, and how often it was their first one."""
    for each in rounds:
        if not each.token_ids:
            continue
        for shift in SHIFTS:
            place = each.position + shift
            if 0 <= place < len(text):
                tried[shift] += 1
                agreed[shift] += text[place] == each.token_ids[0]

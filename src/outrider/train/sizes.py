"""Compares sizes of draft models: trains several for a while, and weighs acceptance against time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from outrider.embedded import default_model
from outrider.llm import LLM
from outrider.model.pass_timer import PassTimer
from outrider.propose.methods.draft_model import DraftModel, DraftModelProposer
from outrider.train.distill import DistillSettings
from outrider.train.models import Shape
from outrider.train.run import Job, finished_draft, train_draft
from outrider.train.trainee import chain_tau
from outrider.train.trainer import Watcher

#: Tokens before the rows of a pass that is timed, and rounds of such passes; the first one does not count.
_CONTEXT, _ROUNDS = 128, 15


@dataclass(frozen=True)
class Size:
    """What a size of draft is worth on this machine.

    Attributes:
        shape: Of the draft.
        parameters: Its parameters.
        acceptance: The chance that the token rule accepts, on held-out texts, after the short training.
        draft_seconds: Of a pass of the draft with one row.
        target_seconds: Of a pass of the target, by its rows.
        num_draft_tokens: The length that pays most.
        tau: Tokens of a target pass with drafts of this length.
        speedup: Over plain decoding: tau T(1) / (k t + T(k + 1)), with T of the target, t of the draft, and length k. The
            time between passes is not in it.
    """

    shape: Shape
    parameters: int
    acceptance: float
    draft_seconds: float
    target_seconds: dict[int, float]
    num_draft_tokens: int
    tau: float
    speedup: float


def compare_sizes(
    job: Job,
    learning: DistillSettings,
    shapes: Sequence[Shape],
    *,
    timed_target: str | None = None,
    watch: Callable[[Shape], Watcher | None] = lambda shape: None,
) -> list[Size]:
    """Train a draft of each shape with the same settings, and say what each is worth; the best one first.

    Called again after it was broken off, it goes on: trainings that have ended are not run again.

    Args:
        job: How each is trained. The drafts are written to folders of `out`, named after their shapes.
        learning: What they learn.
        shapes: The shapes.
        timed_target: The target whose passes are timed, where it is another of the same tokens; None times the target.
        watch: Who is told of the course of each training.

    Raises:
        OutriderError: As train_draft does.
    """
    quiet = job.settings.replace(engine_prompts=0)
    found = {}
    for shape in shapes:
        own = replace(job, out=_folder(job.out, shape), settings=quiet)
        figures = finished_draft(own, learning, shape)
        if figures is None:
            figures = train_draft(own, learning, shape=shape, watcher=watch(shape)).figures()
        found[shape] = (int(figures["parameters"]), float(figures["acceptance"][0]))
    target, drafts = _seconds(job, [_folder(job.out, shape) for shape in shapes], timed_target)
    sizes = [
        worth(shape, *found[shape], draft_seconds=seconds, target_seconds=target)
        for shape, seconds in zip(shapes, drafts, strict=True)
    ]
    return sorted(sizes, key=lambda size: -size.speedup)


def worth(
    shape: Shape, parameters: int, acceptance: float, *, draft_seconds: float, target_seconds: dict[int, float]
) -> Size:
    """What a draft is worth with the length that pays most, of those that the target was timed for."""

    def speedup(length: int) -> float:
        seconds = length * draft_seconds + target_seconds[length + 1]
        return chain_tau([acceptance] * length) * target_seconds[1] / seconds

    best = max((rows - 1 for rows in target_seconds if rows > 1), key=speedup)
    tau = chain_tau([acceptance] * best)
    return Size(shape, parameters, acceptance, draft_seconds, target_seconds, best, tau, speedup(best))


def _folder(out: Path, shape: Shape) -> Path:
    return out / str(shape).replace(":", "-")


def _seconds(job: Job, folders: Sequence[Path], timed_target: str | None) -> tuple[dict[int, float], list[float]]:
    """Median times of passes: of the target by rows, and of each draft. Rounds are interleaved, so that slow moments hit
    all of them."""
    longest = job.settings.num_draft_tokens
    name = timed_target or job.target or default_model("target")
    with LLM(name, speculation="none", dtype=job.dtype, activations=job.activations) as llm:
        runners = [llm.engine.runner]
        for folder in folders:
            proposer = llm.proposers.get(DraftModel(model=str(folder)))
            assert isinstance(proposer, DraftModelProposer)
            runners.append(proposer.runner)
        timers = [PassTimer(runner, _CONTEXT + longest + 1) for runner in runners]
        places = [(0, rows) for rows in range(1, longest + 2)] + [(place, 1) for place in range(1, len(timers))]
        times: dict[tuple[int, int], list[float]] = {place: [] for place in places}
        for turn in range(_ROUNDS + 1):
            for who, rows in places:
                timers[who].compute(_CONTEXT)
                seconds = timers[who].seconds(_CONTEXT, rows, logits=True)
                if turn:
                    times[who, rows].append(seconds)
    target = {rows: median(times[0, rows]) for rows in range(1, longest + 2)}
    return target, [median(times[place, 1]) for place in range(1, len(folders) + 1)]

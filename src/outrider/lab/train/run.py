"""A whole training, from a target and a folder of data to a folder that loads as a method, with its card."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

from outrider import __version__
from outrider.config import ActivationsName, DTypeName, default_model
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.files import write_text
from outrider.lab.economics import expected_tokens
from outrider.lab.train import trainer as curves
from outrider.lab.train.batches import load_data
from outrider.lab.train.blocks import DflashSettings, DsparkSettings
from outrider.lab.train.checkpoint import Measurement, Progress
from outrider.lab.train.distill import DistilledDraft, DistillSettings, Shape, draft_to_begin_with
from outrider.lab.train.features import Eagle1Settings, Eagle3Settings, MtpSettings
from outrider.lab.train.heads import HeadSettings
from outrider.lab.train.settings import HeadLearning, Trainee, TrainSettings
from outrider.lab.train.target import FrozenTarget, Teacher
from outrider.lab.train.trainer import Judge, Trainer, Watcher, by_position, main_process_first, own_device
from outrider.llm import LLM
from outrider.model.memory import PassTimer
from outrider.propose.draft_model import DraftModel, DraftModelProposer
from outrider.records import Manifest, read_manifest
from outrider.results import RequestStats

#: What a folder says of the training that it comes from.
TRAINING = "training.json"


@dataclass(frozen=True)
class Job:
    """Holds what is trained, from what, and where it goes."""

    data: Path  # a folder made by `collect`
    out: Path  # the folder of the result
    target: str | None = None  # folder or hub id; None for the one that the data name as their writer
    #: Of the target's weights, in training and in the engine. A training in float32 widens them where it is "auto".
    dtype: DTypeName = "auto"
    settings: TrainSettings = field(default_factory=TrainSettings)  # how the training runs
    activations: ActivationsName | None = None  # what enters products with the target's rounded weights, in both, too


def train_draft(
    job: Job,
    learning: DistillSettings,
    *,
    shape: Shape | None = None,
    prune: Sequence[int] | None = None,
    init: str | None = None,
    watcher: Watcher | None = None,
) -> Outcome:
    """Distil the target into a draft model."""
    learning.check(job.settings.teacher)

    def make(target: FrozenTarget, manifest: Manifest) -> Trainee:
        model = draft_to_begin_with(target, shape=shape, prune=prune, init=init, seed=job.settings.seed)
        teacher = Teacher(target, manifest, job.settings.teacher)
        temperature, length = manifest.settings.temperature, job.settings.num_draft_tokens
        return DistilledDraft(model, target.tokenizer, target, teacher, learning, temperature, length)

    return _train(job, _asked(learning, shape, prune, init), make, watcher)


def finished_draft(job: Job, learning: DistillSettings, shape: Shape) -> dict[str, Any] | None:
    """The figures of such a training that has ended; None where it has not, or has not begun."""
    if not (job.out / TRAINING).exists():
        return None
    found = _read(job.out / TRAINING)
    _check_same(job.out, found, _plan(job, _asked(learning, shape), read_manifest(job.data)))
    figures: dict[str, Any] | None = found.get("result")
    return figures


def _asked(
    learning: DistillSettings, shape: Shape | None, prune: Sequence[int] | None = None, init: str | None = None
) -> dict[str, Any]:
    beginning = {
        "shape": None if shape is None else str(shape),
        "prune": None if prune is None else list(prune),
        "init": init,
    }
    return {"method": "distill", **learning.model_dump(), **beginning}


def _plan(job: Job, asked: dict[str, Any], manifest: Manifest) -> dict[str, Any]:
    target = job.target if job.target is None or not Path(job.target).exists() else str(Path(job.target).resolve())
    return {
        "asked": asked,
        "target": {"target": target, "dtype": job.dtype, "activations": job.activations},
        "settings": job.settings.model_dump(mode="json"),
        "data": manifest.model_dump(mode="json"),
    }


def train_heads(job: Job, heads: HeadLearning, *, watcher: Watcher | None = None) -> Outcome:
    """Train heads on the frozen target."""

    def make(target: FrozenTarget, manifest: Manifest) -> Trainee:
        return heads.trainee(target, manifest, job.data, job.settings)

    return _train(job, heads.model_dump(mode="json"), make, watcher)


def _train(
    job: Job, asked: dict[str, Any], make: Callable[[FrozenTarget, Manifest], Trainee], watcher: Watcher | None
) -> Outcome:
    manifest = read_manifest(job.data)
    plan = _plan(job, asked, manifest)
    _check_folder(job.out, plan)
    widened = job.dtype == "auto" and job.settings.precision == "fp32"
    target = FrozenTarget(_target_of(job, manifest), job.dtype, own_device(), job.activations, widened=widened)
    target.check_fits(manifest, job.data)
    trainee = make(target, manifest)
    _check_length(job.settings.length, trainee)
    data = load_data(job.data, length=job.settings.length, rows=trainee.rows)
    with main_process_first():
        if not (job.out / TRAINING).exists():
            write_text(job.out / TRAINING, json.dumps(plan, indent=1) + "\n")
    how = {"dtype": job.dtype, "activations": job.activations}
    judge = Judge(target.name, how, trainee, data, job.settings) if job.settings.engine_prompts else None
    trainer = Trainer(trainee, data, job.settings, job.out, target.vocab_size, judge=judge, watcher=watcher)
    try:
        progress = trainer.run()
        outcome = Outcome(target.name, trainee.facts(), manifest, job.settings, progress, None)
        if trainer.is_main:
            outcome = _finish(job, plan, trainee, outcome, judge)
    finally:
        if judge is not None:
            judge.close()
    return outcome


def _target_of(job: Job, manifest: Manifest) -> str:
    """The target of a training: unless the job names one, the writer of its data. The embedded one has another folder on
    every machine."""
    own, name = default_model("target"), job.target or manifest.target.name
    return own if Path(name).parts[-3:] == Path(own).parts[-3:] else name


def _check_length(length: int, trainee: Trainee) -> None:
    if length <= trainee.reach:
        problem = f"the last draft token is {trainee.reach} tokens ahead of what it is made from"
        raise InvalidParameterError("length", length, problem, f"Use {trainee.reach + 1} or more; some hundred are usual.")


def _finish(job: Job, plan: dict[str, Any], trainee: Trainee, outcome: Outcome, judge: Judge | None) -> Outcome:
    """Write the result; what says that it is one comes last."""
    trainee.save(job.out)
    if judge is not None:
        outcome = replace(outcome, stats=judge(job.out))
    curves.draw(job.out, outcome.progress.measurements, f"{outcome.facts['kind']} for {outcome.target_title}")
    write_card(job.out, outcome, trainee.speculation(job.out))
    write_text(job.out / TRAINING, json.dumps({**plan, "result": outcome.figures()}, indent=1) + "\n")
    shutil.rmtree(job.out / "checkpoints")
    return outcome


def _check_folder(out: Path, plan: dict[str, Any]) -> None:
    """A training begins in an empty folder, or goes on in the one of the same training that was broken off."""
    file = out / TRAINING
    if not file.exists():
        if out.exists() and not out.is_dir():
            raise InvalidParameterError("out", str(out), "it is a file", "Give a folder, which may be a new one.")
        if out.exists() and any(out.iterdir()):
            problem = "the folder holds files, and no training that could go on"
            raise InvalidParameterError("out", str(out), problem, "Use a new folder.")
        return
    found = _read(file)
    if "result" in found:
        raise InvalidParameterError("out", str(out), "the training in this folder has ended", "Use a new folder.")
    _check_same(out, found, plan)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidParameterError("out", str(file), f"it cannot be read ({error})", "Use a new folder.") from None
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
        raise InvalidParameterError("out", str(file), "it describes no training", "Use a new folder.")
    return found


def _check_same(out: Path, found: dict[str, Any], plan: dict[str, Any]) -> None:
    for part, values in plan.items():
        for name, value in values.items():
            before = found.get(part, {}).get(name)
            if before != json.loads(json.dumps(value)):
                problem = f"the training in {out} was begun with {before!r}"
                raise ContradictionError(name, value, problem, "Use the same settings, or a new folder.")


# --- The heads that can be trained, by the name of their method.


_LEARNING: dict[str, Any] = {
    "medusa": HeadSettings,
    "blockwise": HeadSettings,
    "exit": HeadSettings,
    "eagle1": Eagle1Settings,
    "eagle3": Eagle3Settings,
    "dflash": DflashSettings,
    "dspark": DsparkSettings,
    "mtp": MtpSettings,
}


def head_learning(method: str, asked: dict[str, Any]) -> HeadLearning:
    """Which heads are trained, and what they learn."""
    found: HeadLearning = _LEARNING[method](method=method, **asked)
    return found


# --- Compares sizes of draft models: trains several for a while, and weighs acceptance against time.


#: Tokens before the rows of a pass that is timed, and rounds of such passes; the first one does not count.
_CONTEXT, _ROUNDS = 128, 15


@dataclass(frozen=True)
class Size:
    """Holds what a size of draft is worth on this machine."""

    shape: Shape  # of the draft
    parameters: int  # its parameters
    acceptance: float  # the share of tried draft tokens that stand, on held-out texts, after the short training
    draft_seconds: float  # of a pass of the draft with one row
    target_seconds: dict[int, float]  # of a pass of the target, by its rows
    num_draft_tokens: int  # the length that pays most
    tau: float  # tokens of a target pass with drafts of this length
    # Over plain decoding: tau T(1) / (k t + T(k + 1)), with T of the target, t of the draft, and length k. The time between
    # passes is not in it.
    speedup: float


def compare_sizes(
    job: Job,
    learning: DistillSettings,
    shapes: Sequence[Shape],
    *,
    timed_target: str | None = None,
    watch: Callable[[Shape], Watcher | None] = lambda shape: None,
) -> list[Size]:
    """Train a draft of each shape with the same settings, and say what each is worth; the best one first. Called again
    after it was broken off, it goes on: trainings that have ended are not run again. Passes may be timed of another target
    of the same tokens."""
    quiet = job.settings.replace(engine_prompts=0)
    found = {}
    for shape in shapes:
        own = replace(job, out=_folder(job.out, shape), settings=quiet)
        figures = finished_draft(own, learning, shape)
        if figures is None:
            figures = train_draft(own, learning, shape=shape, watcher=watch(shape)).figures()
        found[shape] = (int(figures["parameters"]), _rate(figures["acceptance"]))
    target, drafts = _seconds(job, [_folder(job.out, shape) for shape in shapes], timed_target)
    sizes = [
        worth(shape, *found[shape], draft_seconds=seconds, target_seconds=target)
        for shape, seconds in zip(shapes, drafts, strict=True)
    ]
    return sorted(sizes, key=lambda size: -size.speedup)


def _rate(acceptance: Sequence[float]) -> float:
    """The share of draft tokens that stand, of all that are tried behind ones that stand."""
    stood = list[float](accumulate(acceptance, mul))
    return sum(stood) / (1.0 + sum(stood[:-1]))


def worth(
    shape: Shape, parameters: int, acceptance: float, *, draft_seconds: float, target_seconds: dict[int, float]
) -> Size:
    """Returns what a draft is worth with the length that pays most, of those that the target was timed for."""

    def speedup(length: int) -> float:
        seconds = length * draft_seconds + target_seconds[length + 1]
        return expected_tokens([acceptance] * length) * target_seconds[1] / seconds

    best = max((rows - 1 for rows in target_seconds if rows > 1), key=speedup)
    tau = expected_tokens([acceptance] * best)
    return Size(shape, parameters, acceptance, draft_seconds, target_seconds, best, tau, speedup(best))


def _folder(out: Path, shape: Shape) -> Path:
    return out / str(shape).replace(":", "-")


def _seconds(job: Job, folders: Sequence[Path], timed_target: str | None) -> tuple[dict[int, float], list[float]]:
    """Median times of passes: of the target by rows, and of each draft. Rounds are interleaved, so that slow moments hit
    all of them."""
    longest = job.settings.num_draft_tokens
    name = timed_target or _target_of(job, read_manifest(job.data))
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


# --- The model card: what was trained, from what, and what was measured.


@dataclass(frozen=True)
class Outcome:
    """Holds what a training came to."""

    target: str  # folder or hub id of the target
    facts: dict[str, Any]  # what the trainee says of itself
    manifest: Manifest  # of the data
    settings: TrainSettings  # how it ran
    progress: Progress  # its course
    stats: RequestStats | None  # what the engine counted with the result; None where it did not run

    @property
    def before(self) -> Measurement:
        """Held-out texts before the first step."""
        return self.progress.measurements[0]

    @property
    def best(self) -> Measurement:
        """Returns the same with the weights that were kept."""
        return next(each for each in self.progress.measurements if each.step == self.progress.best)

    @property
    def target_title(self) -> str:
        """The target's name, without the folders above it."""
        return Path(self.target).name

    def figures(self) -> dict[str, Any]:
        """The numbers, for programs."""
        found: dict[str, Any] = {
            "parameters": self.facts["parameters"],
            "steps": self.progress.step,
            "tokens": self.progress.tokens,
            "seconds": self.progress.seconds,
            "best_step": self.progress.best,
            "acceptance_before": list(self.before.acceptance),
            "acceptance": list(self.best.acceptance),
            "tau_from_acceptance": self.best.tau,
        }
        if self.stats is not None:
            found |= {"engine_tau": self.stats.mean_acceptance_length, "engine_acceptance": list(by_position(self.stats))}
            found["engine_target_passes"] = self.stats.num_target_passes
        return found


def write_card(folder: Path, outcome: Outcome, speculation: dict[str, Any]) -> None:
    """Write README.md. Raises StorageError."""
    own = {"method": speculation["method"], "model": "THIS_FOLDER"}
    parts = [
        f"# {_title(outcome)}",
        "It drafts for its target in [Outrider](https://pypi.org/project/outrider), which checks every draft, so that the "
        "target's distribution stays as it is. It is of no use without this target.",
        f"```python\nLLM({_argument(outcome.target)}speculation={own})\n```",
        "## What it is",
        _table(outcome.facts | {"target": outcome.target_title, "made by": f"Outrider {__version__}"}),
        "## What it learnt from",
        _table(_data_facts(outcome)),
        "## What was measured",
        _measured(outcome),
        f"The course of the training is in `curves.csv` and `curves.png`. Machine: {platform.machine()}, "
        f"Python {platform.python_version()}.",
    ]
    write_text(folder / "README.md", "\n\n".join(parts) + "\n")


def _argument(target: str) -> str:
    """Returns how the target is written where it is loaded: nothing for the embedded one, and no folder of this machine."""
    if target == default_model("target"):
        return ""
    return '"FOLDER_OF_THE_TARGET", ' if Path(target).is_dir() else f"{json.dumps(target)}, "


def _title(outcome: Outcome) -> str:
    kind = str(outcome.facts["kind"])
    return f"{kind[0].upper()}{kind[1:]} for {outcome.target_title}"


def _data_facts(outcome: Outcome) -> dict[str, Any]:
    manifest, progress = outcome.manifest, outcome.progress
    asked = manifest.settings
    return {
        "texts": f"{manifest.num_records:,}, of which {manifest.num_held_out:,} were held out",
        "written by the target": f"up to {asked.max_tokens} tokens behind each prompt" if asked.max_tokens else "no",
        "temperature, top_k, top_p": f"{asked.temperature}, {asked.top_k}, {asked.top_p}",
        "steps": f"{progress.step:,}; the best weights are those of step {progress.best:,}",
        "tokens learnt from": f"{progress.tokens:,}",
        "minutes": f"{progress.seconds / 60:.1f}",
    }


def _measured(outcome: Outcome) -> str:
    texts = min(outcome.settings.held_out_texts, outcome.manifest.num_held_out)
    before, best = outcome.before, outcome.best
    lines = [
        f"On up to {texts} held-out texts, the chance that the token rule accepts a draft token (the sum of the smaller of "
        "the two probabilities), where those before it in its draft stood. As in the engine, a draft begins behind what "
        "the one before it brought:",
        "| | before | after |\n|---|---|---|\n"
        + "\n".join(
            f"| position {depth + 1} | {a:.3f} | {b:.3f} |"
            for depth, (a, b) in enumerate(zip(before.acceptance, best.acceptance, strict=True))
        )
        + f"\n| tokens of a target pass that follow | {before.tau:.2f} | {best.tau:.2f} |",
    ]
    if outcome.stats is not None:
        settings, stats = outcome.settings, outcome.stats
        by = ", ".join(f"{share:.2f}" for share in by_position(stats))
        began = "" if before.engine_tau is None else f" Before the training it yielded {before.engine_tau:.2f}."
        lines.append(
            f"In the engine itself, with {settings.num_draft_tokens} draft tokens a step on up to "
            f"{settings.engine_prompts} held-out prompts of {settings.engine_tokens} tokens each, in "
            f"{stats.num_target_passes:,} target passes, a draft yielded **{stats.mean_acceptance_length:.2f} tokens** of "
            f"a pass. Share of draft tokens that stood, by position, where those before them stood: {by}.{began}"
        )
    return "\n\n".join(lines)


def _table(rows: dict[str, Any]) -> str:
    shown = (f"| {name} | {f'{value:,}' if isinstance(value, int) else value} |" for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *shown])

"""A whole training: from a target and a folder of data to a folder that loads as a method."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.config import ActivationsName, DTypeName
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.files import write_text
from outrider.params import SamplingParams
from outrider.stats import RequestStats
from outrider.train import curves
from outrider.train.batches import TrainingData, load_data
from outrider.train.card import Outcome, write_card
from outrider.train.distill import DistilledDraft, DistillSettings
from outrider.train.judge import Judge
from outrider.train.manifest import Manifest, read_manifest
from outrider.train.models import Shape, draft_to_begin_with
from outrider.train.settings import TrainSettings
from outrider.train.target import FrozenTarget, Teacher
from outrider.train.trainee import HeadLearning, Trainee
from outrider.train.trainer import Trainer, Watcher, main_process_first, own_device

#: What a folder says of the training that it comes from.
TRAINING = "training.json"


@dataclass(frozen=True)
class Job:
    """What is trained, from what, and where it goes.

    Attributes:
        data: A folder made by `collect`.
        out: The folder of the result.
        target: Folder or hub id; None for the embedded one.
        dtype: Of the target's weights, in training and in the engine.
        settings: How the training runs.
        activations: What enters products with the target's rounded weights, in both, too.
    """

    data: Path
    out: Path
    target: str | None = None
    dtype: DTypeName = "auto"
    settings: TrainSettings = field(default_factory=TrainSettings)
    activations: ActivationsName | None = None


def train_draft(
    job: Job,
    learning: DistillSettings,
    *,
    shape: Shape | None = None,
    prune: Sequence[int] | None = None,
    init: str | None = None,
    watcher: Watcher | None = None,
) -> Outcome:
    """Distil the target into a draft model.

    Args:
        job: From what, and where to.
        learning: What is learnt.
        shape: Begins from scratch, in this shape.
        prune: Begins with these layers of the target.
        init: Begins with this model.
        watcher: Told of the course.

    Raises:
        InputError: The data, the folder or a setting cannot be used.
        ModelError: A model cannot be used.
        StorageError: A file cannot be written. The same call goes on from the last checkpoint.
        TrainingError: The loss became NaN or infinite.
    """
    learning.check(job.settings.teacher)

    def make(target: FrozenTarget, manifest: Manifest) -> Trainee:
        model = draft_to_begin_with(target, shape=shape, prune=prune, init=init, seed=job.settings.seed)
        teacher = Teacher(target, manifest, job.settings.teacher)
        return DistilledDraft(model, target.tokenizer, target, teacher, learning, manifest.settings.temperature)

    return _train(job, _asked(learning, shape, prune, init), make, watcher)


def finished_draft(job: Job, learning: DistillSettings, shape: Shape) -> dict[str, Any] | None:
    """The figures of such a training that has ended; None where it has not, or has not begun.

    Raises:
        ContradictionError: The folder holds a training with other settings.
        InputError: The data or the folder cannot be used.
    """
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
    """Train heads on the frozen target.

    Args:
        job: From what, and where to.
        heads: Which heads.
        watcher: Told of the course.

    Raises:
        InputError, ModelError, StorageError, TrainingError: As train_draft does.
    """

    def make(target: FrozenTarget, manifest: Manifest) -> Trainee:
        return heads.trainee(target, manifest, job.data, job.settings)

    return _train(job, heads.model_dump(mode="json"), make, watcher)


def _train(
    job: Job, asked: dict[str, Any], make: Callable[[FrozenTarget, Manifest], Trainee], watcher: Watcher | None
) -> Outcome:
    manifest = read_manifest(job.data)
    target = FrozenTarget(job.target, job.dtype, own_device(), job.activations)
    target.check_fits(manifest, job.data)
    trainee = make(target, manifest)
    _check_length(job.settings.length, trainee)
    data = load_data(job.data, length=job.settings.length, rows=trainee.rows)
    plan = _plan(job, asked, manifest)
    with main_process_first():
        _open(job.out, plan)
    verdict = _Engine(job, target, trainee, data) if job.settings.engine_prompts else None
    trainer = Trainer(trainee, data, job.settings, job.out, target.vocab_size, verdict=verdict, watcher=watcher)
    try:
        progress = trainer.run()
        outcome = Outcome(target.name, trainee.facts(), manifest, job.settings, progress, None)
        if trainer.is_main:
            outcome = _finish(job, plan, trainee, outcome, verdict)
    finally:
        if verdict is not None:
            verdict.close()
    return outcome


def _check_length(length: int, trainee: Trainee) -> None:
    if length <= trainee.reach:
        problem = f"the last draft token is {trainee.reach} tokens ahead of what it is made from"
        raise InvalidParameterError("length", length, problem, f"Use {trainee.reach + 1} or more; some hundred are usual.")


def _finish(job: Job, plan: dict[str, Any], trainee: Trainee, outcome: Outcome, verdict: _Engine | None) -> Outcome:
    """Write the result; what says that it is one comes last."""
    trainee.save(job.out)
    if verdict is not None:
        outcome = outcome.judged(verdict(job.out))
    curves.draw(job.out, outcome.progress.measurements, f"{outcome.facts['kind']} for {outcome.target_title}")
    write_card(job.out, outcome, trainee.speculation(job.out))
    write_text(job.out / TRAINING, json.dumps({**plan, "result": outcome.figures()}, indent=1) + "\n")
    shutil.rmtree(job.out / "checkpoints")
    return outcome


def _open(out: Path, plan: dict[str, Any]) -> None:
    """Begin in an empty folder, or go on where the same training was broken off.

    Raises:
        InvalidParameterError: The folder holds something else.
        ContradictionError: It holds a training with other settings.
        StorageError: It cannot be written.
    """
    file = out / TRAINING
    if not file.exists():
        if out.exists() and not out.is_dir():
            raise InvalidParameterError("out", str(out), "it is a file", "Give a folder, which may be a new one.")
        if out.exists() and any(out.iterdir()):
            problem = "the folder holds files, and no training that could go on"
            raise InvalidParameterError("out", str(out), problem, "Use a new folder.")
        write_text(file, json.dumps(plan, indent=1) + "\n")
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


class _Engine:
    """The engine beside the training, loaded when it is first asked."""

    def __init__(self, job: Job, target: FrozenTarget, trainee: Trainee, data: TrainingData) -> None:
        self._job = job
        self._target = target
        self._trainee = trainee
        self._data = data
        self._judge: Judge | None = None

    def __call__(self, folder: Path) -> RequestStats:
        if self._judge is None:
            self._judge = self._load()
        return self._judge.judge(self._trainee.speculation(folder))

    def close(self) -> None:
        if self._judge is not None:
            self._judge.close()

    def _load(self) -> Judge:
        settings, texts = self._job.settings, self._data.manifest.settings
        params = SamplingParams(
            max_tokens=settings.engine_tokens,
            temperature=texts.temperature,
            top_k=texts.top_k,
            top_p=texts.top_p,
            ignore_eos=True,
        )
        return Judge(
            self._target.name,
            self._job.dtype,
            self._job.activations,
            self._data.held_out,
            settings.engine_prompts,
            params,
            settings.num_draft_tokens,
        )

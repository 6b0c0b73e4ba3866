"""The training loop: optimisers, measurements, a judge, curves, checkpoints, and the end."""

from __future__ import annotations

import csv
import io
import math
import statistics
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import InvalidParameterError, TrainingError
from outrider.files import write_text, write_whole
from outrider.lab.economics import expected_tokens
from outrider.lab.train.batches import Batch, Batches, TrainingData, in_turn
from outrider.lab.train.checkpoint import Checkpoints, Measurement, Progress
from outrider.lab.train.settings import Precision, Tally, Trainee, TrainSettings
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.propose.settings import SpeculationConfig
from outrider.results import RequestStats

#: What another step's seed is: far from those of neighbouring trainings.
_SEED_STRIDE = 1_000_003
#: What helps where numbers grow beyond all bounds.
_LOWER = "Lower lr, and start in an empty folder."


def own_device() -> str:
    """The device of this process, as Accelerate deals them out."""
    from accelerate import PartialState

    return str(PartialState().device)


def main_process_first() -> AbstractContextManager[None]:
    """Within the block, the process that writes runs before the others."""
    from accelerate import PartialState

    first: AbstractContextManager[None] = PartialState().main_process_first()
    return first


class Watcher:
    """Is told of the course of a training; a display overrides what it shows."""

    def on_resume(self, step: int) -> None:
        """A training that was broken off goes on after this step."""

    def on_step(self, step: int, loss: float) -> None:
        """A step is done."""

    def on_measurement(self, measurement: Measurement) -> None:
        """Held-out texts have been looked at."""


class Trainer:
    """Trains, measures and keeps the best; a training that was broken off goes on from its last checkpoint. Every step
    depends on its number, the weights and the optimisers' state alone. So a training that was killed and goes on comes to
    the same weights as one that was not, to the bit, on the same machine and number of devices. The judge runs the real
    engine."""

    def __init__(
        self,
        trainee: Trainee,
        data: TrainingData,
        settings: TrainSettings,
        folder: Path,
        vocab_size: int,
        *,
        judge: Judge | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        from accelerate import Accelerator

        # Accelerate's own mixed precision would copy all logits to float32 and their gradients back; see `_mixed`.
        self._accelerator: Any = Accelerator(mixed_precision="no", gradient_accumulation_steps=settings.accumulation)
        self._trainee = trainee
        self._data = data
        self._settings = settings
        self._folder = folder
        self._judge = judge
        self._watcher = watcher if watcher is not None and self.is_main else Watcher()
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self._batches = Batches(data.train, settings.batch_size, settings.seed)
        sizes = {vocab_size, trainee.draft_vocab_size or vocab_size}
        optimisers = make_optimisers(trainee.module, settings, sizes)
        self._own_optimisers = optimisers
        self._module: nn.Module
        self._module, *self._optimisers = self._accelerator.prepare(trainee.module, *optimisers)

    @property
    def is_main(self) -> bool:
        """Tells whether this process writes and shows."""
        return bool(self._accelerator.is_main_process)

    def run(self) -> Progress:
        """Train to the end, or until held-out texts gain no more; the trainee then has its best weights."""
        settings = self._settings
        progress = self._checkpoints.restore(self._trainee.module, self._own_optimisers)
        if progress.step:
            self._watcher.on_resume(progress.step)
        board = Board(self._folder) if self.is_main else None
        if not progress.measurements:
            progress = self._measured(progress, board)
            self._save(progress)
        while progress.step < settings.steps and not 0 < settings.patience <= progress.waited:
            progress = self._stepped(progress)
            is_due = progress.step == settings.steps or progress.step % settings.evaluate_every == 0
            if is_due:
                progress = self._measured(progress, board)
            if is_due or progress.step % settings.save_every == 0:
                self._save(progress)
        self._accelerator.wait_for_everyone()  # the main process writes the best weights
        self._checkpoints.load_best(self._trainee.module)
        self._accelerator.wait_for_everyone()  # and removes them at the end
        if board is not None:
            board.close()
        return progress

    def _stepped(self, progress: Progress) -> Progress:
        """One step of the optimisers."""
        began, settings, step = perf_counter(), self._settings, progress.step
        torch.manual_seed(settings.seed * _SEED_STRIDE + step)  # what is drawn depends on the step alone
        self._module.train()
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = settings.rate(step)
        losses, tokens = [], 0
        for turn in range(settings.accumulation):
            batch = self._batch(step * settings.accumulation + turn)
            tokens += batch.num_tokens * self._accelerator.num_processes
            losses.append(self._backward(batch))
        loss = statistics.fmean(losses)
        if not math.isfinite(loss):
            raise TrainingError(step + 1, f"the loss is {loss}", _LOWER)
        self._watcher.on_step(step + 1, loss)
        done = {
            "step": step + 1,
            "tokens": progress.tokens + tokens,
            "seconds": progress.seconds + perf_counter() - began,
            "losses": (*progress.losses, loss),
        }
        return progress.model_copy(update=done)

    def _batch(self, number: int) -> Batch:
        """The batch of that number for this process: each takes another."""
        own = number * self._accelerator.num_processes + self._accelerator.process_index
        return self._batches[own].to(self._accelerator.device)

    def _backward(self, batch: Batch) -> float:
        """Add the gradient of a batch; with the last of a step the weights move."""
        accelerator = self._accelerator
        with accelerator.accumulate(self._module):
            with self._mixed():
                loss = self._trainee.loss(self._module, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self._module.parameters(), self._settings.clip)
            for optimiser in self._optimisers:
                optimiser.step()
                optimiser.zero_grad()
        return float(loss.detach())

    @contextmanager
    def _mixed(self) -> Iterator[None]:
        """Compute in the precision of the settings. Norms keep weights of float32, and torch would tell users of that."""
        own, mixed = self._accelerator.device.type, self._settings.precision == "bf16"
        with torch.autocast(own, torch.bfloat16, enabled=mixed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            yield

    @torch.no_grad()
    def _acceptance(self) -> tuple[float, ...]:
        """By place in a draft, on held-out texts. Every process computes the same."""
        self._module.eval()
        found = list[Tally]()
        for batch in in_turn(self._data.held_out[: self._settings.held_out_texts], 1):  # since all of its rows draft
            with self._mixed():
                found.append(self._trainee.tally(self._trainee.module, batch.to(self._accelerator.device)))
        stood, tried = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
        if not tried[0]:
            problem = f"no piece of a held-out text has {self._trainee.reach + 1} tokens that the target wrote"
            raise InvalidParameterError(
                "length", self._settings.length, problem, "Use longer pieces, or make longer texts."
            )
        return tuple((stood / tried.where(tried > 0, 1.0)).tolist())

    def _measured(self, progress: Progress, board: Board | None) -> Progress:
        """Look at held-out texts, and keep the weights if none were better."""
        acceptance = self._acceptance()
        if not all(map(math.isfinite, acceptance)):
            raise TrainingError(progress.step, f"the acceptance is {acceptance[0]}", _LOWER)
        tau = expected_tokens(acceptance)
        stats = self._judged(progress.step)
        measurement = Measurement(
            step=progress.step,
            tokens=progress.tokens,
            seconds=progress.seconds,
            loss=statistics.fmean(progress.losses) if progress.losses else 0.0,
            lr=self._settings.rate(max(0, progress.step - 1)),
            acceptance=acceptance,
            tau=tau,
            engine_tau=None if stats is None else stats.mean_acceptance_length,
            engine_acceptance=() if stats is None else by_position(stats),
        )
        is_best = not progress.measurements or tau > max(each.tau for each in progress.measurements)
        news = {
            "measurements": (*progress.measurements, measurement),
            "losses": (),
            "best": progress.step if is_best else progress.best,
            "waited": 0 if is_best else progress.waited + 1,
        }
        found = progress.model_copy(update=news)
        if self.is_main:
            if is_best:
                self._checkpoints.save_best(self._trainee.module)
            write_table(self._folder, found.measurements)
            assert board is not None
            board.add(measurement)
        self._watcher.on_measurement(measurement)
        return found

    def _judged(self, step: int) -> RequestStats | None:
        """Returns what the engine counts with the weights as they are, where it is due; in the main process alone."""
        every = self._settings.engine_every
        if self._judge is None or not self.is_main or (step and (not every or step % every)):
            return None
        folder = self._checkpoints.folder / f"engine-{step:08d}"
        self._trainee.save(folder)
        return self._judge(folder)

    def _save(self, progress: Progress) -> None:
        if self.is_main:
            self._checkpoints.save(progress, self._trainee.module, self._own_optimisers)


# --- The optimisers: Muon for matrices inside the layers, AdamW for all else, as the embedded pair was trained.


_BETAS, _MOMENTUM = (0.9, 0.95), 0.95


def make_optimisers(
    module: nn.Module, settings: TrainSettings, vocab_sizes: Collection[int]
) -> list[torch.optim.Optimizer]:
    """Optimisers for the parameters that learn. Muon makes the step of a matrix orthogonal, which suits maps between hidden
    states. A table with a row for each token is none of these, and so takes AdamW, as vectors do."""
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in learning if parameter.ndim == 2 and not set(parameter.shape) & set(vocab_sizes)]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in learning if id(parameter) not in chosen]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay, precision=settings.precision))
    if others:
        found.append(torch.optim.AdamW(others, lr=settings.lr, weight_decay=0.0, betas=_BETAS))
    return found


class Muon(torch.optim.Optimizer):
    """Makes the step of every matrix orthogonal (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural
    networks"), as large as AdamW's would be (Liu et al. 2025, arXiv 2502.16982).

    Its steps are those of `torch.optim.Muon`, which multiplies in bfloat16 wherever it runs. Where a processor has no such
    products, those are far slower than products in float32: a step of a model with 11 million parameters took 65
    seconds and not 1.3 on one core with AVX2.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float, precision: Precision) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step along the gradients."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                mean = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                mean.lerp_(matrix.grad, 1 - _MOMENTUM)
                step = _orthogonal(matrix.grad.lerp(mean, _MOMENTUM).to(self._dtype))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(step, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def _orthogonal(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors, whose singular values are near 1: five Newton-Schulz iterations."""
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), found, beta=3.4445)
    return found.T if tall else found


# --- The course of a training: a table in CSV, a drawing, and TensorBoard where it is installed.


TABLE, DRAWING = "curves.csv", "curves.png"


def write_table(folder: Path, measurements: Sequence[Measurement]) -> None:
    """Write every measurement as a line. Raises StorageError."""
    depths = max((len(each.acceptance) for each in measurements), default=0)
    positions = max((len(each.engine_acceptance) for each in measurements), default=0)
    names = ["step", "tokens", "seconds", "loss", "lr", "tau", "engine_tau"]
    names += [f"acceptance_{depth + 1}" for depth in range(depths)]
    names += [f"engine_acceptance_{position + 1}" for position in range(positions)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for each in measurements:
        line = {name: getattr(each, name) for name in names[:7]}
        line |= {f"acceptance_{depth + 1}": value for depth, value in enumerate(each.acceptance)}
        line |= {f"engine_acceptance_{place + 1}": value for place, value in enumerate(each.engine_acceptance)}
        writer.writerow(line)
    write_text(folder / TABLE, text.getvalue())


def draw(folder: Path, measurements: Sequence[Measurement], title: str) -> None:
    """Draw loss, acceptance and tau over the steps. Raises StorageError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    FigureCanvasAgg(figure)
    loss, acceptance, tau = figure.subplots(1, 3)
    steps = [each.step for each in measurements]
    loss.plot(steps[1:], [each.loss for each in measurements[1:]])  # nothing was learnt before the first step
    loss.set_title("loss on training texts")
    for depth in range(max(len(each.acceptance) for each in measurements)):
        acceptance.plot(steps, [each.acceptance[depth] for each in measurements], label=f"position {depth + 1}")
    acceptance.set_title("acceptance on held-out texts")
    acceptance.legend(fontsize="small")
    tau.plot(steps, [each.tau for each in measurements], label="from acceptance")
    ran = [each for each in measurements if each.engine_tau is not None]
    tau.plot([each.step for each in ran], [each.engine_tau for each in ran], "o", label="counted by the engine")
    tau.set_title("tokens of a target pass")
    tau.legend(fontsize="small")
    for axes in (loss, acceptance, tau):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    write_whole(folder / DRAWING, lambda path: figure.savefig(path, dpi=110, format="png"))


class Board:
    """Events for TensorBoard where the package is installed, and nothing elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def add(self, measurement: Measurement) -> None:
        """One measurement."""
        if self._writer is None:
            return
        values = {"loss": measurement.loss, "lr": measurement.lr, "tau": measurement.tau}
        values |= {f"acceptance/{depth + 1}": value for depth, value in enumerate(measurement.acceptance)}
        if measurement.engine_tau is not None:
            values["engine_tau"] = measurement.engine_tau
        for name, value in values.items():
            self._writer.add_scalar(name, value, measurement.step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


# --- The real engine as a judge: it writes held-out prompts with what is trained, and counts what its verifier accepts.


class Judge:
    """Runs the engine on held-out prompts. It is loaded when it is first asked. The chance that the token rule accepts,
    which is measured on texts, is exact for a single token and cheap. It does not see how drafts of several tokens are
    verified, what the engine's own kernels compute, or whether what was written loads at all. This does, with the target
    loaded as `how` says."""

    def __init__(
        self, target: str, how: Mapping[str, Any], trainee: Trainee, data: TrainingData, settings: TrainSettings
    ) -> None:
        self._target, self._how, self._trainee, self._settings = target, how, trainee, settings
        texts = data.manifest.settings
        law = {name: getattr(texts, name) for name in ("temperature", "top_k", "top_p")}
        self._params = SamplingParams(max_tokens=settings.engine_tokens, ignore_eos=True, **law)
        begun = [piece for piece in data.held_out if piece.num_prompt_tokens > 0][: settings.engine_prompts]
        self._prompts = [piece.token_ids[: piece.num_prompt_tokens].tolist() for piece in begun]

    @cached_property
    def _llm(self) -> LLM:
        return LLM(self._target, speculation="none", **self._how)

    def __call__(self, folder: Path) -> RequestStats:
        """Returns what the engine counts where that which a folder holds drafts."""
        asked = {**self._trainee.speculation(folder), "num_draft_tokens": self._settings.num_draft_tokens}
        found = RequestStats()
        outputs = self._llm.generate(self._prompts, self._params, speculation=SpeculationConfig.of(asked))
        for output in outputs:
            if output.error is None:
                found.add(output.stats)
        if not found.num_target_passes:
            assert outputs[0].error is not None
            raise outputs[0].error
        return found

    def close(self) -> None:
        """Free the engine."""
        if "_llm" in vars(self):
            self._llm.close()


def by_position(stats: RequestStats) -> tuple[float, ...]:
    """The share of draft tokens that stood at each position, of those whose earlier tokens stood."""
    pairs = zip(stats.accepted_per_position, stats.tried_per_position, strict=False)
    return tuple(stood / tried for stood, tried in pairs if tried)

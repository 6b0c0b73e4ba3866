"""Trainings that go on to the bit, learn what they should, end early, and leave what loads as a method."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import (
    ContradictionError,
    InputError,
    InvalidParameterError,
    StorageError,
    TrainingError,
    VocabularyMismatchError,
)
from outrider.files import write_tensors
from outrider.lab.economics import expected_tokens
from outrider.lab.train import checkpoint, trainer
from outrider.lab.train import distill as models
from outrider.lab.train.batches import Batch, Batches
from outrider.lab.train.checkpoint import Checkpoints, Progress
from outrider.lab.train.distill import DistillSettings, Shape, draft_to_begin_with, parse_shape, pruned, write_on
from outrider.lab.train.losses import LOSSES, Law, divergence, overlap
from outrider.lab.train.run import Job, _rate, compare_sizes, train_draft, worth
from outrider.lab.train.settings import TrainSettings, tally
from outrider.lab.train.target import FrozenTarget
from outrider.lab.train.trainer import Watcher
from tests.train.drafted_rows import followed
from tests.train.markov import VOCAB, WIDTH, save_data
from tests.waiting import wait_until

SHAPE = Shape(layers=1, width=32, feed_forward=32)
pytest.importorskip("accelerate")

SETTINGS = TrainSettings(
    steps=20, batch_size=8, lr=2e-2, precision="fp32", evaluate_every=5, save_every=5, engine_prompts=0, num_draft_tokens=3
)


@pytest.fixture
def job(target: str, data: Path, tmp_path: Path) -> Job:
    return Job(data, tmp_path / "out", target, "float32", SETTINGS)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Killed(BaseException):
    """As sudden as a signal: nothing of ours catches it."""


class KillAt(Watcher):
    """Ends the training in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int, loss: float) -> None:
        if step == self.step:
            raise Killed


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("learning", "change"),
    [
        pytest.param(DistillSettings(), {}, marks=pytest.mark.slow),  # the others are this one with more
        pytest.param(DistillSettings(on_policy=0.5), {"accumulation": 2}, marks=pytest.mark.core),
        (DistillSettings(loss="jsd"), {"save_every": 4, "evaluate_every": 3, "patience": 9}),
    ],
)
def test_a_training_goes_on_to_the_bit(job: Job, learning: DistillSettings, change: dict[str, Any]) -> None:
    job = replace(job, settings=job.settings.replace(**change))
    whole = replace(job, out=job.out.with_name("whole"))
    expected = train_draft(whole, learning, shape=SHAPE)
    for moment in (10, 17):  # killed twice: at a checkpoint, and between two of them
        with pytest.raises(Killed):
            train_draft(job, learning, shape=SHAPE, watcher=KillAt(moment))
    found = train_draft(job, learning, shape=SHAPE)
    assert_same(job.out, whole.out)
    same = {"seconds"}
    assert [m.model_dump(exclude=same) for m in found.progress.measurements] == [
        m.model_dump(exclude=same) for m in expected.progress.measurements
    ]


@pytest.mark.parametrize("moment", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_training_that_ends_before_its_first_step_is_kept_goes_on(job: Job, moment: int) -> None:
    whole = replace(job, out=job.out.with_name("whole"))
    with pytest.raises(Killed):
        train_draft(job, DistillSettings(), shape=SHAPE, watcher=KillAt(moment))
    assert kept(job) == ["step-00000000"]
    for each in (job, whole):
        train_draft(each, DistillSettings(), shape=SHAPE)
    assert_same(job.out, whole.out)


def test_what_is_measured_is_kept(job: Job) -> None:
    """A training of 60 steps would else be lost whole with the usual 100 steps between checkpoints."""
    job = replace(job, settings=job.settings.replace(save_every=100, evaluate_every=5))
    with pytest.raises(Killed):
        train_draft(job, DistillSettings(), shape=SHAPE, watcher=KillAt(12))
    assert kept(job) == ["step-00000005", "step-00000010"]


def kept(job: Job) -> list[str]:
    return [place.name for place in Checkpoints(job.out / "checkpoints")._whole()]


def test_another_seed_comes_to_other_weights(job: Job) -> None:
    """Else the test above could not fail."""
    other = replace(job, out=job.out.with_name("other"), settings=job.settings.replace(seed=1))
    for each in (job, other):
        train_draft(each, DistillSettings(), shape=SHAPE)
    with pytest.raises(AssertionError):
        assert_same(job.out, other.out)


def test_a_process_that_is_killed_by_a_signal_goes_on(job: Job) -> None:
    script = (
        "import sys, torch; torch.set_num_threads(1); from pathlib import Path\n"
        "from tests.train import test_training as t\n"
        "job = t.Job(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], 'float32', t.SETTINGS.replace(steps=60))\n"
        "t.train_draft(job, t.DistillSettings(), shape=t.SHAPE)\n"
    )
    command = [sys.executable, "-c", script, str(job.data), str(job.out), str(job.target)]
    process = subprocess.Popen(command)
    tenth = job.out / "checkpoints" / "step-00000010" / "state.json"
    wait_until(lambda: tenth.exists() or process.poll() is not None, "checkpoint of the tenth step")
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended by itself"
    assert not (job.out / "config.json").exists()
    job, whole = (
        replace(job, out=out, settings=job.settings.replace(steps=60)) for out in (job.out, job.out.with_name("whole"))
    )
    for each in (job, whole):
        train_draft(each, DistillSettings(), shape=SHAPE)
    assert_same(job.out, whole.out)


def test_a_checkpoint_that_is_not_whole_is_none(job: Job) -> None:
    with pytest.raises(Killed):
        train_draft(job, DistillSettings(), shape=SHAPE, watcher=KillAt(12))
    (job.out / "checkpoints" / "step-00000010" / "state.json").unlink()  # as a kill before its last file leaves it
    whole = replace(job, out=job.out.with_name("whole"))
    for each in (job, whole):
        train_draft(each, DistillSettings(), shape=SHAPE)
    assert_same(job.out, whole.out)


def test_a_damaged_checkpoint_is_refused(job: Job) -> None:
    with pytest.raises(Killed):
        train_draft(job, DistillSettings(), shape=SHAPE, watcher=KillAt(12))
    file = job.out / "checkpoints" / "step-00000010" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InvalidParameterError, match=r"cannot be read.*goes on from the one before"):
        train_draft(job, DistillSettings(), shape=SHAPE)
    shutil.rmtree(file.parent)
    train_draft(job, DistillSettings(), shape=SHAPE)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimisers.safetensors", "state.json"])
def test_the_remedy_for_the_only_checkpoint_names_none_before_it(job: Job, name: str) -> None:
    with pytest.raises(Killed):
        train_draft(job, DistillSettings(), shape=SHAPE, watcher=KillAt(3))
    place = job.out / "checkpoints" / "step-00000000"
    (place / name).write_bytes(b"{")
    with pytest.raises(InvalidParameterError, match=r"cannot be read.*there is none before it.*begins anew") as caught:
        train_draft(job, DistillSettings(), shape=SHAPE)
    assert "goes on from" not in str(caught.value)
    assert place.name in str(caught.value)
    shutil.rmtree(place)  # as it says
    train_draft(job, DistillSettings(), shape=SHAPE)


def test_best_weights_that_are_damaged_are_noticed_before_the_training_goes_on(job: Job) -> None:
    with pytest.raises(Killed):
        train_draft(job, DistillSettings(), shape=SHAPE, watcher=KillAt(12))
    file = job.out / "checkpoints" / "best.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InvalidParameterError, match=r"best\.safetensors.*They are lost: begin in a new folder") as caught:
        train_draft(job, DistillSettings(), shape=SHAPE, watcher=KillAt(13))
    assert "Remove this checkpoint" not in str(caught.value)


def test_checkpoints_hold_no_pickles(job: Job) -> None:
    with pytest.raises(Killed):
        train_draft(job, DistillSettings(), shape=SHAPE, watcher=KillAt(12))
    there = [file for file in job.out.rglob("*") if file.is_file()]
    assert {file.suffix for file in there if "tensorboard" not in file.parts} <= {".safetensors", ".json", ".csv"}


def test_a_full_disk_leaves_the_checkpoint_before(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replace(job, out=job.out.with_name("whole"))
    write = checkpoint.write_tensors

    def full(path: Path, *args: Any) -> None:
        if path.parent.name == "step-00000010" and path.name.startswith("optim"):
            raise StorageError(str(path), "No space left on device", "Free some space.")
        write(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full)
        with pytest.raises(StorageError, match="No space left"):
            train_draft(job, DistillSettings(), shape=SHAPE)
    assert kept(job) == ["step-00000000", "step-00000005"]
    for each in (job, whole):
        train_draft(each, DistillSettings(), shape=SHAPE)
    assert_same(job.out, whole.out)


@pytest.mark.slow
def test_a_full_disk_at_the_end_leaves_nothing_that_loads(job: Job) -> None:
    script = (
        "import resource, sys, torch; torch.set_num_threads(1); from pathlib import Path\n"
        "from tests.train import test_training as t; from outrider.lab.train import distill as models\n"
        "save = models.save_model\n"
        "def limited(*args):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); save(*args)\n"
        "import outrider.lab.train.distill as d; d.save_model = limited\n"
        "job = t.Job(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], 'float32', t.SETTINGS)\n"
        "try: t.train_draft(job, t.DistillSettings(), shape=t.SHAPE)\n"
        "except t.StorageError as error: print('refused:', error)\n"
    )
    command = [sys.executable, "-c", script, str(job.data), str(job.out), str(job.target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "refused:" in done.stdout, done.stderr
    assert not (job.out / "config.json").exists()
    whole = replace(job, out=job.out.with_name("whole"))
    for each in (job, whole):
        train_draft(each, DistillSettings(), shape=SHAPE)
    assert_same(job.out, whole.out)


def test_nothing_loads_before_the_weights_are_there(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, place: Path) -> None:
        if file.suffix == ".safetensors":
            raise OSError(28, "No space left on device")
        file.replace(place)

    monkeypatch.setattr(models, "_move", full)
    with pytest.raises(StorageError, match=r"model\.safetensors.*No space left"):
        models.save_model(FrozenTarget(target, "float32").model, None, tmp_path / "out", torch.float32)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_file_without_tensors_can_be_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_tensors(tmp_path / "none.safetensors", {})
    assert load_file(tmp_path / "none.safetensors") == {}


@pytest.mark.parametrize("fast", [True, False])
def test_products_are_in_bf16_where_the_processor_has_them(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": fast, "amx_bf16": False})
    settings = TrainSettings()
    assert settings.precision == ("bf16" if fast else "fp32")
    assert json.loads(settings.model_dump_json())["precision"] == settings.precision  # the folder keeps what was taken
    assert TrainSettings(precision="bf16").precision == "bf16"


def test_a_folder_takes_one_training(job: Job, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train_draft(job, DistillSettings(), shape=SHAPE, watcher=KillAt(7))
    with pytest.raises(ContradictionError, match=r"loss='jsd'.*begun with 'forward_kl'"):
        train_draft(job, DistillSettings(loss="jsd"), shape=SHAPE)
    with pytest.raises(ContradictionError, match="steps=30"):
        train_draft(replace(job, settings=job.settings.replace(steps=30)), DistillSettings(), shape=SHAPE)
    with pytest.raises(ContradictionError, match=r"dtype='bfloat16'.*begun with 'float32'"):
        train_draft(replace(job, dtype="bfloat16"), DistillSettings(), shape=SHAPE)
    train_draft(job, DistillSettings(), shape=SHAPE)
    with pytest.raises(InvalidParameterError, match="has ended"):
        train_draft(job, DistillSettings(), shape=SHAPE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InvalidParameterError, match="holds files"):  # which is told before the target is loaded
        train_draft(replace(job, out=tmp_path / "mine", target="no such model"), DistillSettings(), shape=SHAPE)
    with pytest.raises(InvalidParameterError, match=r"letter\.txt.*it is a file"):
        train_draft(replace(job, out=tmp_path / "mine" / "letter.txt"), DistillSettings(), shape=SHAPE)
    with pytest.raises(StorageError, match=r"letter\.txt"):
        train_draft(replace(job, out=tmp_path / "mine" / "letter.txt" / "below"), DistillSettings(), shape=SHAPE)
    (tmp_path / "mine" / "training.json").write_text("[]")
    with pytest.raises(InvalidParameterError, match="it describes no training"):
        train_draft(replace(job, out=tmp_path / "mine"), DistillSettings(), shape=SHAPE)
    (tmp_path / "mine" / "training.json").write_text("{}")
    with pytest.raises(ContradictionError, match="begun with None"):
        train_draft(replace(job, out=tmp_path / "mine"), DistillSettings(), shape=SHAPE)


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_teaches_what_the_target_writes(job: Job, loss: str) -> None:
    job = replace(job, settings=job.settings.replace(steps=60))
    found = train_draft(job, DistillSettings(loss=loss), shape=SHAPE)  # type: ignore[arg-type]
    assert found.before.acceptance[0] < 0.2
    assert found.best.acceptance[0] > (0.6 if loss == "total_variation" else 0.85)  # which is slow where all are alike


def test_every_batch_is_another_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = Batches.__getitem__

    def noted(self: Batches, number: int) -> Batch:
        taken.append(number)
        return take(self, number)

    monkeypatch.setattr(Batches, "__getitem__", noted)
    job = replace(job, settings=job.settings.replace(steps=4, accumulation=3))
    train_draft(job, DistillSettings(), shape=SHAPE)
    assert taken == list(range(12))


def test_a_draft_learns_from_texts_that_it_writes_itself(job: Job) -> None:
    job = replace(job, settings=job.settings.replace(steps=60))
    assert train_draft(job, DistillSettings(on_policy=1.0), shape=SHAPE).best.acceptance[0] > 0.85


def test_the_texts_that_a_draft_writes_follow_its_own_probabilities(target: str, data: Path) -> None:
    from outrider.lab.train.batches import collate, load_data

    pieces = load_data(data, length=64).train[:8]
    model = FrozenTarget(target, "float32").model  # its next token is all but certain
    written = write_on(model, collate(pieces), 1e-3)
    longest = max(len(piece.token_ids) for piece in pieces)
    assert written.token_ids.shape == (8, longest)
    for row, piece in zip(written.token_ids, pieces, strict=True):
        assert row[: len(piece.token_ids)].tolist() == piece.token_ids.tolist()


def test_a_training_without_gains_ends_and_keeps_the_best(job: Job) -> None:
    settings = job.settings.replace(steps=200, evaluate_every=2, save_every=50, patience=4, lr=3e-2, decay=0.0)
    found = train_draft(replace(job, settings=settings), DistillSettings(), shape=SHAPE)
    progress = found.progress
    assert progress.step < 200
    assert progress.step == progress.best + 4 * 2
    assert found.best.tau == max(each.tau for each in progress.measurements)
    llm = LLM(job.target, draft_model=str(job.out), dtype="float32")
    again = measured(job, job.out)
    llm.close()
    assert again == pytest.approx(found.best.acceptance[0], abs=1e-3)


def measured(job: Job, folder: Path) -> float:
    """The acceptance of the first draft token of what a folder holds, on held-out texts."""
    from transformers import AutoModelForCausalLM

    from outrider.lab.train.batches import in_turn, load_data

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target, total, depths = FrozenTarget(job.target, "float32"), torch.zeros(2), job.settings.num_draft_tokens
    for batch in in_turn(load_data(job.data, length=512).held_out, 1):
        with torch.no_grad():
            each = overlap(Law(target.logits(batch.token_ids)[0]), model(batch.token_ids).logits[0], 1.0).tolist()
        prompt, length = int(batch.num_prompt_tokens[0]), int(batch.lengths[0])
        places = [(row, depth) for row in range(prompt, length) for depth in range(depths) if row + depth + 1 < length]
        stood, tried = followed({(row, depth): each[row + depth] for row, depth in places}, prompt, depths)
        total += torch.stack([stood[0], tried[0]])
    return float(total[0] / total[1])


def test_a_loss_that_is_none_ends_the_training(job: Job) -> None:
    from outrider.lab.train import distill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "divergence", lambda name, target, draft, *_: torch.nan * draft.sum(-1))
        with pytest.raises(TrainingError, match=r"step 1: the loss is nan. Lower lr"):
            train_draft(job, DistillSettings(), shape=SHAPE)


def test_an_acceptance_that_is_none_ends_the_training(job: Job) -> None:
    from outrider.lab.train import distill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "overlap", lambda target, *_: torch.full((len(target.logits),), torch.nan))
        with pytest.raises(TrainingError, match=r"step 0: the acceptance is nan. Lower lr"):
            train_draft(job, DistillSettings(), shape=SHAPE)
    assert not (job.out / "model.safetensors").exists()


def test_pieces_in_which_the_target_wrote_nothing_measure_nothing(job: Job, target: str, tmp_path: Path) -> None:
    """Texts of 19 to 23 tokens behind 4 of the prompt, in pieces of 4: the first piece of each is prompt alone."""
    short = replace(job, settings=job.settings.replace(length=4, held_out_texts=1))
    outcome = train_draft(short, DistillSettings(), shape=SHAPE)
    assert outcome.progress.measurements[-1].acceptance[0] > 0.5
    nothing = replace(job, data=save_data(tmp_path / "data", target, num_prompt_tokens=30), out=tmp_path / "other")
    with pytest.raises(InvalidParameterError, match="none of its 8 pieces of held-out texts has two tokens"):
        train_draft(nothing, DistillSettings(), shape=SHAPE)


@pytest.mark.parametrize("source", ["hidden_states", "top_k"])
def test_what_the_data_hold_teaches_as_the_target_does(target: str, tmp_path: Path, job: Job, source: str) -> None:
    from outrider.lab.train.collect import Source, collect
    from outrider.records import DataSettings

    sources = [Source(f"{i}", "prompt", [i, (i * 5) % VOCAB]) for i in range(VOCAB)]
    asked = DataSettings(max_tokens=12, held_out=0.3, hidden_states=(4,), target_top_k=VOCAB)
    collect(sources, tmp_path / "rich", asked, target=target, dtype="float32")
    found = {}
    for teacher in ("forward", source):
        here = replace(
            job, data=tmp_path / "rich", out=tmp_path / teacher, settings=job.settings.replace(teacher=teacher, steps=10)
        )
        found[teacher] = train_draft(here, DistillSettings(), shape=SHAPE).progress.measurements
    for one, other in zip(*found.values(), strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-3)
        assert one.acceptance == pytest.approx(other.acceptance, abs=1e-3)


def test_a_source_that_the_data_lack_is_refused(job: Job) -> None:
    for teacher in ("hidden_states", "top_k"):
        with pytest.raises(InvalidParameterError, match="do not hold it"):
            train_draft(replace(job, settings=job.settings.replace(teacher=teacher)), DistillSettings(), shape=SHAPE)
    kept = replace(job, settings=job.settings.replace(teacher="top_k"))
    with pytest.raises(ContradictionError, match="all tokens"):
        train_draft(kept, DistillSettings(loss="reverse_kl"), shape=SHAPE)
    with pytest.raises(ContradictionError, match="on_policy"):
        train_draft(kept, DistillSettings(on_policy=0.1), shape=SHAPE)
    assert not job.out.exists()


# -- the losses --------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_losses_are_what_they_are_called(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(5, 7, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    tokens = torch.tensor([0, 3, 6, 2, 2])
    p, q = (torch.softmax(logits / temperature, -1) for logits in (target, draft))
    m = (p + q) / 2
    expected = {
        "forward_kl": (p * (p / q).log()).sum(-1),
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "jsd": 0.5 * (p * (p / m).log()).sum(-1) + 0.5 * (q * (q / m).log()).sum(-1),
        "total_variation": 1 - torch.minimum(p, q).sum(-1),
        "cross_entropy": -q[torch.arange(5), tokens].log(),
    }
    assert expected.keys() == set(LOSSES)
    for name, values in expected.items():
        found = divergence(name, Law(target), draft, tokens, temperature)
        torch.testing.assert_close(found, values.float(), atol=1e-5, rtol=1e-4)
    accepted = overlap(Law(target), draft, temperature)
    torch.testing.assert_close(accepted, torch.minimum(p, q).sum(-1).float(), atol=1e-5, rtol=1e-4)
    assert overlap(Law(target), target, 0.0).tolist() == [1.0] * 5


def test_tokens_that_the_target_never_writes_leave_losses_finite() -> None:
    target = torch.tensor([[0.0, 1.0, -torch.inf]])
    draft = torch.zeros(1, 3, requires_grad=True)
    for name in ("forward_kl", "jsd", "total_variation"):
        loss = divergence(name, Law(target), draft, torch.tensor([0]), 1.0).sum()
        gradient = torch.autograd.grad(loss, draft)[0]
        assert loss.isfinite()
        assert gradient.isfinite().all()


# -- draft models to begin with ----------------------------------------------------------------------------------------


def test_a_shape_has_a_text_form() -> None:
    assert parse_shape("2x192") == Shape(layers=2, width=192, feed_forward=512)
    assert str(parse_shape("3x64:100")) == "3x64:100"
    assert (parse_shape("2x384").num_heads, parse_shape("2x384").num_kv_heads) == (6, 2)
    for text in ("2", "2x", "x192", "2x100", "0x64", "two"):
        with pytest.raises(InputError):
            parse_shape(text)


def test_a_pruned_target_runs_these_layers_alone(tmp_path: Path) -> None:
    from outrider.model.hf import some_layers
    from tests.model import checkpoints

    target = FrozenTarget(checkpoints.save("llama", tmp_path, seed=3), "float32")
    layers = (0, target.num_layers - 1)
    tokens = torch.randint(0, target.vocab_size, (1, 12), generator=torch.Generator().manual_seed(1))
    with some_layers(target.model, layers, None):
        expected = target.logits(tokens)
    model = pruned(target, layers)
    assert model.config.num_hidden_layers == 2
    torch.testing.assert_close(model(tokens).logits, expected)
    step = model(tokens[:, :-1], use_cache=True)  # layers find their own keys and values
    torch.testing.assert_close(model(tokens[:, -1:], past_key_values=step.past_key_values).logits[0, 0], expected[0, -1])
    assert target.model.config.num_hidden_layers == target.num_layers


def test_a_pruned_draft_is_trained_and_loads(job: Job) -> None:
    job = replace(job, settings=job.settings.replace(steps=5))
    found = train_draft(job, DistillSettings(), prune=(1, 2))
    assert found.before.acceptance[0] > 0.9  # the layers of this target add almost nothing
    assert json.loads((job.out / "config.json").read_text())["num_hidden_layers"] == 2
    assert LLM(job.target, draft_model=str(job.out), dtype="float32").generate([[1, 2]])[0].error is None


@pytest.mark.parametrize("layers", [(), (2, 1), (0, 9), (0, 1, 2, 3)])
def test_layers_that_cannot_be_kept_are_refused(target: str, layers: tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameterError, match="prune="):
        pruned(FrozenTarget(target, "float32"), layers)


def test_a_draft_goes_on_from_an_earlier_one(job: Job) -> None:
    first = train_draft(job, DistillSettings(), shape=SHAPE)
    then = replace(job, out=job.out.with_name("then"), settings=job.settings.replace(lr=1e-3))
    second = train_draft(then, DistillSettings(), init=str(job.out))
    assert second.before.acceptance[0] == pytest.approx(first.best.acceptance[0], abs=1e-3)


def test_one_beginning_must_be_named(target: str, tmp_path: Path) -> None:
    from tests.model import checkpoints

    frozen = FrozenTarget(target, "float32")
    with pytest.raises(ContradictionError, match="nothing says"):
        draft_to_begin_with(frozen, shape=None, prune=None, init=None, seed=0)
    with pytest.raises(ContradictionError, match="shape and prune are given"):
        draft_to_begin_with(frozen, shape=SHAPE, prune=(1,), init=None, seed=0)
    other = checkpoints.save("llama", tmp_path, seed=3)
    with pytest.raises(VocabularyMismatchError, match="not those of"):
        draft_to_begin_with(frozen, shape=None, prune=None, init=other, seed=0)


# -- what is left ------------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_the_result_is_a_method_with_a_card_of_what_was_measured(job: Job) -> None:
    settings = job.settings.replace(steps=40, engine_prompts=4, engine_tokens=12, engine_every=20)
    found = train_draft(replace(job, settings=settings), DistillSettings(), shape=SHAPE)
    assert found.stats is not None
    assert found.stats.mean_acceptance_length > 2.5  # of 4 at most
    assert [each.engine_tau is not None for each in found.progress.measurements] == [
        each.step % 20 == 0 for each in found.progress.measurements
    ]
    assert found.before.engine_tau is not None
    assert found.before.engine_tau < 2 < found.stats.mean_acceptance_length
    card = (job.out / "README.md").read_text()
    for figure in (
        f"{found.stats.mean_acceptance_length:.2f} tokens",
        f"{found.best.acceptance[0]:.3f}",
        "8 were held out",
    ):
        assert figure in card
    result = json.loads((job.out / "training.json").read_text())["result"]
    assert result["engine_tau"] == found.stats.mean_acceptance_length
    assert not (job.out / "checkpoints").exists()
    assert {file.suffix for file in job.out.iterdir() if file.is_file()} == {".json", ".safetensors", ".md", ".csv", ".png"}
    llm = LLM(job.target, speculation={"method": "draft_model", "model": str(job.out)}, dtype="float32")
    output = llm.generate([[1, 2]], SamplingParams(max_tokens=20))[0]
    assert output.stats.mean_acceptance_length > 2.5


def test_curves_have_a_line_for_each_measurement(job: Job) -> None:
    found = train_draft(job, DistillSettings(), shape=SHAPE)
    head, *rows = (job.out / trainer.TABLE).read_text().splitlines()
    assert head == "step,tokens,seconds,loss,lr,tau,engine_tau,acceptance_1,acceptance_2,acceptance_3"
    assert [row.split(",")[0] for row in rows] == ["0", "5", "10", "15", "20"]
    assert rows[-1].endswith(f"{found.progress.measurements[-1].acceptance[-1]}")
    assert (job.out / trainer.DRAWING).read_bytes().startswith(b"\x89PNG")


def test_the_rate_rises_stays_and_falls() -> None:
    settings = TrainSettings(steps=100, warmup=0.1, decay=0.5, lr=1.0)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:50] == [1.0] * 41
    assert rates[75] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.02)


def test_progress_is_kept_as_it_was() -> None:
    progress = Progress(step=3, losses=(1.5, 0.1 + 0.2))
    assert Progress.model_validate_json(progress.model_dump_json()) == progress


def test_whoever_may_read_a_folder_may_read_the_weights_in_it(job: Job) -> None:
    train_draft(replace(job, settings=job.settings.replace(steps=1, engine_prompts=0)), DistillSettings(), shape=SHAPE)
    modes = {file.stat().st_mode for file in job.out.iterdir() if file.is_file()}
    assert len(modes) == 1


# -- what is measured -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hard", "stood", "tried"),
    [
        pytest.param({3, 6}, [2, 2], [2, 2], id="the target writes the hard ones"),
        pytest.param({1, 2}, [2, 1], [4, 1], id="drafts begin where hard ones come"),
        pytest.param({2}, [3, 1], [3, 2], id="the second one is hard"),
    ],
)
def test_a_draft_begins_behind_what_the_last_one_brought(hard: set[int], stood: list[float], tried: list[float]) -> None:
    """Greedy drafts of two tokens in a text of seven, of which token 0 is the prompt."""
    places = [[(row, row + depth + 1) for row in range(7)] for depth in range(2)]
    guessed = torch.tensor([[[float(token not in hard) for _, token in depth]] for depth in places])
    known = torch.tensor([[[token < 7 for _, token in depth]] for depth in places])
    found = tally(guessed, known)
    assert (found.stood.tolist(), found.tried.tolist()) == (stood, tried)


def test_a_text_without_drafts_counts_nothing() -> None:
    none = torch.zeros(2, 1, 4)
    assert tally(none, none.bool()).tried.tolist() == [0, 0]


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_the_acceptance_of_a_size_is_that_of_all_its_draft_tokens() -> None:
    assert _rate([0.5, 0.5, 0.5]) == pytest.approx(0.5)
    assert _rate([0.8, 0.25]) == pytest.approx((0.8 + 0.2) / (1.0 + 0.8))
    assert _rate([0.6]) == 0.6


def test_the_worth_of_a_size_is_the_formula() -> None:
    seconds = {rows: 10.0 + 0.1 * rows for rows in range(1, 8)}
    size = worth(SHAPE, 1000, 0.8, draft_seconds=0.5, target_seconds=seconds)
    by_length = {k: (1 - 0.8 ** (k + 1)) / (1 - 0.8) * 10.1 / (0.5 * k + 10.0 + 0.1 * (k + 1)) for k in range(1, 7)}
    assert size.speedup == pytest.approx(max(by_length.values()))
    assert size.num_draft_tokens == max(by_length, key=lambda k: by_length[k])
    assert size.tau == pytest.approx(expected_tokens([0.8] * size.num_draft_tokens))


def test_sizes_are_compared_and_kept(job: Job) -> None:
    shapes = [SHAPE, Shape(layers=2, width=64, feed_forward=64)]
    job = replace(job, settings=job.settings.replace(steps=10))
    found = compare_sizes(job, DistillSettings(), shapes)
    assert {size.shape for size in found} == set(shapes)
    assert found[0].speedup >= found[1].speedup
    assert all(size.draft_seconds > 0 and set(size.target_seconds) == {1, 2, 3, 4} for size in found)
    assert found[0].parameters != found[1].parameters
    assert (job.out / "1x32-32" / "config.json").exists()
    assert WIDTH == 64


def test_a_comparison_of_sizes_goes_on_where_it_was_broken_off(job: Job) -> None:
    job = replace(job, settings=job.settings.replace(steps=4, num_draft_tokens=1))
    trained: list[Shape] = []

    def compared(job: Job, *shapes: Shape) -> dict[Shape, float]:
        sizes = compare_sizes(job, DistillSettings(), shapes, watch=trained.append)  # type: ignore[arg-type, func-returns-value]
        return {size.shape: size.acceptance for size in sizes}

    other = Shape(layers=2, width=64, feed_forward=64)
    first = compared(job, SHAPE)
    both = compared(job, SHAPE, other)
    assert trained == [SHAPE, other]
    assert both[SHAPE] == first[SHAPE]
    with pytest.raises(ContradictionError, match="steps"):
        compared(replace(job, settings=job.settings.replace(steps=5)), SHAPE)


def _after_steps(optimiser: Callable[[list[torch.nn.Parameter]], Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((12, 5), (5, 12), (7, 7))]
    stepped = optimiser(matrices)
    for _ in range(3):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        stepped.step()
    return [matrix.detach() for matrix in matrices]


def test_muon_takes_the_steps_of_pytorch() -> None:
    """To the bit in bf16, and in float32 within the rounding of that."""
    how: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    want = _after_steps(lambda all_: torch.optim.Muon(all_, momentum=0.95, adjust_lr_fn="match_rms_adamw", **how))
    rounded, whole = (
        _after_steps(lambda all_, precision=each: trainer.Muon(all_, precision=precision, **how))
        for each in ("bf16", "fp32")
    )
    begin = _after_steps(lambda all_: trainer.Muon(all_, lr=0.0, weight_decay=0.0, precision="fp32"))
    for number, matrix in enumerate(want):
        assert torch.equal(rounded[number], matrix)
        assert (whole[number] - matrix).norm() < 0.02 * (matrix - begin[number]).norm()

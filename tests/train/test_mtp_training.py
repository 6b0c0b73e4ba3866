"""Layers that predict several tokens in training: they draft as in the engine, learn, and keep their checkpoint's names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from typer.testing import CliRunner

from outrider import LLM, Mtp, SamplingParams
from outrider.cli.app import app
from outrider.errors import InputError, InvalidParameterError, ModelLoadError, StorageError, UnsupportedModelError
from outrider.heads.formats.mtp import name_mtp, read_mtp
from outrider.lab.prove.tiny_heads import MTP_LAYOUTS, save_random_mtp
from outrider.lab.train import features as mtp
from outrider.lab.train.features import MtpSettings
from outrider.lab.train.run import Job, train_heads
from outrider.lab.train.target import FrozenTarget
from outrider.propose.defaults import drafter_at
from outrider.records import read_manifest
from tests.model import checkpoints
from tests.model.mtp_reference import MtpReference
from tests.train.drafted_rows import TEMPERATURE, assert_drafts_as, disturb
from tests.train.markov import save_data, save_markov_target
from tests.train.test_feature_heads import SETTINGS
from tests.train.test_training import KillAt, Killed

pytest.importorskip("accelerate")

NEW = MtpSettings(unroll=3)
FILE = "model.safetensors"


@pytest.fixture
def job(target: str, data: Path, tmp_path: Path) -> Job:
    return Job(data, tmp_path / "out", target, "float32", SETTINGS)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / FILE)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "layout", "num_layers"),
    [
        pytest.param("llama", "speculators", 0, id="new"),
        pytest.param("llama", "deepseek_v3", 2, id="two layers"),
        pytest.param("qwen2", "mimo_7b", 1, id="hidden state first", marks=pytest.mark.slow),
        pytest.param("mimo_v2_flash", "mimo_v2", 3, id="a window", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "qwen3_next", 2, id="shared norms", marks=pytest.mark.slow),
    ],
)
def test_each_draft_token_is_made_as_in_the_engine(tmp_path: Path, family: str, layout: str, num_layers: int) -> None:
    """Against a reference that knows the published layouts alone."""
    path = checkpoints.save(family, tmp_path / "target", seed=3)
    if num_layers:
        save_random_mtp(Path(path), path, layout, num_layers, scale=0.15)
    frozen, data = FrozenTarget(path, "float32"), save_data(tmp_path / "data", path, temperature=TEMPERATURE)
    asked = SETTINGS.replace(num_draft_tokens=4)
    trained = NEW.trainee(frozen, read_manifest(data), data, asked)
    disturb(trained)
    trained.save(tmp_path / "out")
    if num_layers:
        assert weights(tmp_path / "out").keys() <= weights(Path(path)).keys()

    def opened() -> Any:
        return MtpReference(str(tmp_path / "out"), layout, num_layers or 1, frozen.model).logits

    assert_drafts_as(trained, frozen, opened, depths=4)


@pytest.mark.core
def test_a_new_layer_learns_what_comes_and_learns_on(job: Job) -> None:
    found = train_heads(job, NEW)
    assert found.before.tau < 1.5
    assert min(found.best.acceptance) > 0.7
    assert found.stats is not None
    assert found.stats.mean_acceptance_length > 2.3  # the engine accepts it
    assert "| begun with | a new layer |" in (job.out / "README.md").read_text()
    assert drafter_at(str(job.out)) == Mtp(model=str(job.out))
    with LLM(job.target, dtype="float32", draft_model=str(job.out), speculation={"method": "mtp"}) as llm:
        assert llm.generate([[1, 2]], SamplingParams(seed=1, max_tokens=60))[0].stats.mean_acceptance_length > 1.9
    few = SETTINGS.replace(steps=2, evaluate_every=2, engine_prompts=0, lr=1e-4)
    more = train_heads(replace(job, out=job.out.with_name("more"), settings=few), NEW.replace(init=str(job.out)))
    assert more.facts["begun with"] == "layers that were there"
    assert more.before.acceptance == pytest.approx(found.best.acceptance, abs=1e-6)
    assert weights(job.out).keys() == weights(job.out.with_name("more")).keys()


def test_what_was_trained_drafts_from_the_one_file_that_is_made_of_it(tmp_path: Path) -> None:
    """The whole way: a hybrid without such a layer, its training, a file with rounded weights, and texts from it."""
    pytest.importorskip("gguf")
    target = save_markov_target(tmp_path / "target", hybrid=True)
    job = Job(save_data(tmp_path / "data", target), tmp_path / "out", target, "float32", SETTINGS)
    train_heads(job, NEW)
    file = str(tmp_path / "m.gguf")
    given = ["convert", target, "--mtp", str(job.out), "--to", "gguf", "--out", file, "--placeholders"]
    assert "matrices in Q8_0, 1 prediction layer" in CliRunner().invoke(app, given).output
    taus = []
    for model, method in ((target, {"method": "mtp", "model": str(job.out)}), (file, {"method": "mtp"})):
        with LLM(model, speculation=method) as llm:
            drafted, plain = (
                llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=60), speculation=how)[0]
                for how in (None, "none")
            )
        assert drafted.token_ids == plain.token_ids
        taus.append(drafted.stats.mean_acceptance_length)
    assert min(taus) > 2.3
    assert taus[1] == pytest.approx(taus[0], abs=0.5)


def test_a_training_goes_on_to_the_bit_from_any_step(job: Job) -> None:
    settings = job.settings.replace(steps=6, evaluate_every=3, save_every=2, engine_prompts=0)
    whole, broken = (replace(job, out=job.out / name, settings=settings) for name in ("whole", "broken"))
    kind = NEW.replace(loss="accepted_length")
    train_heads(whole, kind)
    for step in range(1, 7):
        with pytest.raises(Killed):
            train_heads(broken, kind, watcher=KillAt(step))
        assert not (broken.out / FILE).exists()  # nothing that loads
    train_heads(broken, kind)
    assert_same(weights(whole.out), weights(broken.out))


def test_a_full_disk_at_the_end_leaves_nothing_that_loads(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(job, settings=job.settings.replace(steps=2, evaluate_every=2, engine_prompts=0))

    def full(path: Path, *_: Any) -> None:
        raise StorageError(str(path), "No space left on device", "Free some space.")

    with monkeypatch.context() as patch:
        patch.setattr(mtp, "write_tensors", full)
        with pytest.raises(StorageError, match=r"model\.safetensors.*No space left"):
            train_heads(here, NEW)
    assert not (here.out / FILE).exists()
    train_heads(here, NEW)
    assert (here.out / FILE).exists()


@pytest.mark.parametrize("layout", MTP_LAYOUTS)
def test_names_are_those_of_the_checkpoint(layout: str, tmp_path: Path) -> None:
    family = {"mimo_v2": "mimo_v2_flash", "qwen3_next": "qwen3_next"}.get(layout, "llama")
    path = checkpoints.save(family, tmp_path / "target", seed=3)
    folder = save_random_mtp(tmp_path / "mtp", path, layout, 2)
    config = AutoConfig.from_pretrained(path)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    there = {name: weight for name, weight in weights(Path(folder)).items() if not name.endswith(copies)}
    assert_same(name_mtp(read_mtp(folder, config), config, folder), there)


def test_what_cannot_be_trained_is_refused_before_any_work(job: Job, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="no such folder"):
        train_heads(job, NEW.replace(init=str(tmp_path / "nowhere")))
    with pytest.raises(InputError):
        MtpSettings(unroll=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"it has no model\.safetensors"):
        train_heads(job, NEW.replace(init=str(tmp_path / "empty")))
    other = checkpoints.save("llama", tmp_path / "other", seed=3)
    wide = save_random_mtp(tmp_path / "wide", other, "speculators")
    with pytest.raises(ModelLoadError, match="fc of shape"):
        train_heads(job, NEW.replace(init=wide))
    with pytest.raises(UnsupportedModelError, match="carries no layers"):
        train_heads(job, NEW.replace(init=other))
    assert not job.out.exists()


def test_a_type_whose_layers_cannot_stand_alone_is_refused(tmp_path: Path) -> None:
    path = checkpoints.save("gpt2", tmp_path / "target", seed=3)
    frozen, data = FrozenTarget(path, "float32"), save_data(tmp_path / "data", path)
    with pytest.raises(UnsupportedModelError, match=r"gpt2 do not end with a norm.*Train eagle3"):
        NEW.trainee(frozen, read_manifest(data), data, SETTINGS)

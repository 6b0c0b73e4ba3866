"""A target that teaches is computed in float32 where that is fastest, and its drafts are saved in its own dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import DTypeName
from outrider.lab.train import distill, run, target
from outrider.lab.train.distill import DistilledDraft, DistillSettings, pruned
from outrider.lab.train.run import Job, train_draft
from outrider.lab.train.settings import TrainSettings
from outrider.lab.train.target import FrozenTarget, Teacher
from outrider.records import read_manifest
from tests.model import checkpoints

TEXT = torch.tensor([[5, 7, 11, 13, 2, 3]])


def test_a_model_in_fewer_bits_is_widened_and_its_drafts_are_saved_in_its_own(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = FrozenTarget(None, widened=True)
    assert (wide.model.dtype, wide.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide.logits(TEXT), FrozenTarget(None, "float32").logits(TEXT))
    saved: list[torch.dtype] = []
    monkeypatch.setattr(distill, "save_model", lambda model, tokenizer, folder, dtype: saved.append(dtype))
    teacher = Teacher(wide, read_manifest(data), "forward")
    DistilledDraft(pruned(wide, (0, 1)), None, wide, teacher, DistillSettings(), 1.0, 4).save(tmp_path)
    assert saved == [torch.bfloat16]


def test_blocks_of_a_file_stay_where_its_other_weights_are_widened(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.model.test_rounded_rows_of_files import write

    path = write(tmp_path, "qwen2", ("Q4_K", "Q6_K"))
    wide = FrozenTarget(path, activations="none", widened=True)
    assert wide.dtype == torch.bfloat16
    assert torch.equal(wide.logits(TEXT), FrozenTarget(path, "float32", activations="none").logits(TEXT))
    layer = wide.model.model.layers[0].mlp.up_proj
    assert layer.weight.dtype == torch.float32
    assert layer.weight.stride() == (0, 0), "a weight that holds no numbers takes no memory"


def test_blocks_that_are_unfolded_where_there_are_no_kernels_are_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from tests.model.test_rounded_rows_of_files import write

    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    path = write(tmp_path, "llama", ("Q8_0",))
    wide, narrow = (FrozenTarget(path, widened=widened).logits(TEXT) for widened in (True, False))
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert (wide - narrow).norm() < 0.05 * wide.norm()


def test_a_model_that_memory_holds_only_as_it_is_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "leaves_room", lambda size, device: False)
    assert FrozenTarget(None, widened=True).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "precision", "widened"),
    [("auto", "fp32", True), ("auto", "bf16", False), ("bfloat16", "fp32", False)],
)
def test_a_training_in_float32_widens_a_target_whose_dtype_nobody_asked_for(
    dtype: DTypeName, precision: Any, widened: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def seen(*args: Any, **options: Any) -> None:
        raise Seen(options)

    monkeypatch.setattr(run, "FrozenTarget", seen)
    job = replace(Job(data, tmp_path), dtype=dtype, settings=TrainSettings(precision=precision))
    with pytest.raises(Seen, match=f"'widened': {widened}"):
        train_draft(job, DistillSettings(), prune=(0,))


@pytest.mark.parametrize("kind", ["plain", "bias", "blocks"])
def test_the_logits_of_some_tokens_are_those_of_all(tmp_path: Path, kind: str) -> None:
    """The output layer computes them alone, and is itself again behind that."""
    folder = str(checkpoints.save("phi" if kind == "bias" else "llama", tmp_path / "target", seed=3))
    if kind == "blocks":
        pytest.importorskip("gguf")
        from tests.model.test_rounded_rows_of_files import write

        folder = write(tmp_path, "llama", ("Q8_0",))
    frozen = FrozenTarget(folder, "float32")
    states, tokens = frozen.states(TEXT, (frozen.num_layers,))[0][frozen.num_layers], torch.tensor([2, 40, 7, 13])
    whole, some = frozen.head(states[0]), frozen.head(states[0], tokens)
    assert some.shape == (len(TEXT[0]), 4)
    torch.testing.assert_close(some, whole[:, tokens], atol=1e-5, rtol=1e-5)
    other = tokens + 1
    torch.testing.assert_close(frozen.head(states[0], other), whole[:, other], atol=1e-5, rtol=1e-5)
    assert torch.equal(frozen.head(states[0]), whole)

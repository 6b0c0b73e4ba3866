"""The probe refuses a wrong description of a family, wherever it is wrong, and asks no more of the model than it must."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import CacheConfig, ModelConfig, SchedulerConfig
from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.kernels.library import available_sets
from outrider.loading.loader import load_model
from outrider.model import hf
from outrider.model.factory import make_runner, ways_of
from outrider.model.families import FAMILIES
from outrider.model.layer_builder import decoder_layer
from outrider.model.runner import ModelRunner
from tests.model import checkpoints
from tests.model.core import core, in_turn

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
DTYPES = ("float32", "bfloat16")


def runner_of(path: Path, dtype: Any, backend: str, quantization: Any = None) -> ModelRunner:
    loaded = load_model(ModelConfig(model=str(path), dtype=dtype, quantization=quantization))
    return make_runner(loaded, backend, CacheConfig(block_size=4), SchedulerConfig(max_num_seqs=4))


def saved(folder: Path, family: str, layers: int | None = None) -> Path:
    checkpoints.save(family, folder / family, seed=3, layers=layers)
    return folder / family


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"interleaved": True}),
    ("llama", {"norm_offset": 1.0}),
    ("llama", {"parallel": True}),
    ("llama", {"matrices": ("up_proj", "gate_proj", "down_proj")}),
    ("llama", {"qkv": ("k_proj", "q_proj", "v_proj")}),
    ("qwen3", {"head_norms": ("none", "none")}),
    ("gemma2", {"attention_post_norm": None}),
    ("gpt2", {"positions": None}),
]


def test_weights_are_packed_for_the_kernels_of_cpus_alone() -> None:
    """On a GPU the packed experts would wait for the device in every layer."""
    ways = {name: ways_of("paged", torch.device(name), batch_invariant=False) for name in ("cpu", "cuda")}
    assert ways == {"cpu": [("paged", True), ("paged", False)], "cuda": [("paged", False)]}


CASES = [(*each, dtype) for each in WRONG for dtype in DTYPES]


@pytest.mark.parametrize(
    ("family", "wrong", "dtype"),
    core(CASES, CASES[::3], *("src/outrider/model/", "src/outrider/loading/"), "src/outrider/kernels/"),
    ids=str,
)
def test_a_wrong_description_is_refused(
    family: str, wrong: dict[str, Any], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, family)
    assert runner_of(path, dtype, "fused").backend.name == "fused"
    kind = checkpoints.model_type(family)
    monkeypatch.setitem(FAMILIES, kind, replace(FAMILIES[kind], **wrong))
    with pytest.raises(UnsupportedModelError, match="fused"):
        runner_of(path, dtype, "fused")
    assert runner_of(path, dtype, "auto").backend.name == "paged"


LAYERS, ROUNDINGS = [0, 2, 5], [None, "int8"]


@pytest.mark.parametrize(
    ("layer", "dtype", "quantization"),
    core(
        product(LAYERS, DTYPES, ROUNDINGS),
        in_turn(LAYERS, DTYPES, ROUNDINGS),
        *("src/outrider/model/", "src/outrider/loading/"),
    ),
)
def test_a_single_wrong_layer_is_refused(
    layer: int, dtype: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So all layers are compared, and not some that stand for the others."""
    path, seen = saved(tmp_path, "llama", layers=6), list[Any]()

    def one_wrong(*arguments: Any) -> Any:
        made = decoder_layer(*arguments)
        seen.append(made)
        return replace(made, up=made.gate, gate=made.up) if len(seen) == layer + 1 else made

    monkeypatch.setattr("outrider.model.fused.decoder_layer", one_wrong)
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        runner_of(path, dtype, "fused", quantization)
    assert len(seen) == 6


def test_the_stock_model_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    real = hf.noting_layers

    def noting(model: Any) -> Any:
        model.register_forward_pre_hook(lambda _, given: rows.append(given[0].numel()))
        return real(model)

    monkeypatch.setattr(hf, "noting_layers", noting)
    assert runner_of(saved(tmp_path, "llama"), "float32", "auto").backend.name == "fused"
    assert rows == [24]


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = saved(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(path)
    with pytest.raises(ModelLoadError, match=r"layers\.0\.mlp\.up_proj\.weight holds NaN"):
        runner_of(path, "float32", "auto")

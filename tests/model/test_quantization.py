"""Rounded weights: the rounded model is the target, and speculation is lossless against it."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig, Suffix, building
from outrider.config import default_model
from outrider.errors import ContradictionError, InvalidParameterError, UnsupportedModelError
from outrider.kernels.library import available_sets, kernel_library
from outrider.lab.tune.tuner import candidates
from outrider.loading import hf_modules
from outrider.model.batch import Segment
from tests.model import checkpoints
from tests.model.core import core, in_turn

TEXT = [(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(23)]


def logits(llm: LLM) -> torch.Tensor:
    runner = llm.engine.runner
    return runner.forward([Segment(TEXT, 0, runner.blocks.allocate(8))]).logits


FAMILIES = ["llama", "mixtral", "gemma2", "gpt_oss", "gpt_neox"]
#: Where a change may concern one family, or one rounding.
OF_ROUNDING = (
    "src/outrider/kernels/",
    "src/outrider/model/",
    "src/outrider/loading/",
    "tests/model/checkpoints.py",
    "tests/model/test_quantization.py",
)


@pytest.fixture(scope="module", params=core(FAMILIES, FAMILIES[:2], *OF_ROUNDING))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save(request.param, tmp_path_factory.mktemp("int8") / request.param, seed=2)


@pytest.fixture(scope="module")
def grouped(path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a feed-forward whose inputs are whole groups."""
    name = Path(path).name
    return checkpoints.save(name, tmp_path_factory.mktemp("grouped") / name, seed=2, intermediate_size=64)


ROUNDINGS = ["int8", "int4-g32-asym", "int8-g32", "int4-g32"]


@pytest.mark.parametrize(
    ("path", "quantization"),
    core(product(FAMILIES, ROUNDINGS), in_turn(FAMILIES, ROUNDINGS), *OF_ROUNDING),
    indirect=["path"],
)
def test_kernels_compute_the_rounded_model(grouped: str, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "quantization": quantization}
    fast = logits(LLM(grouped, **settings))
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    torch.testing.assert_close(fast, logits(LLM(grouped, **settings)), rtol=1e-4, atol=1e-4)
    whole = logits(LLM(grouped, dtype="float32"))
    assert 1e-4 < _distance(fast, whole) < (0.1 if "int8" in quantization else 0.5), "rounded, and not by much"


HYBRIDS = ["qwen3_5_text", "granitemoehybrid", "lfm2"]


@pytest.mark.parametrize(
    ("name", "quantization"), core(product(HYBRIDS, ROUNDINGS[:2]), in_turn(HYBRIDS, ROUNDINGS[:2]), *OF_ROUNDING)
)
def test_whole_passes_over_running_states_compute_the_rounded_model(
    name: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.save(name, tmp_path / name, seed=2, intermediate_size=64, shared_intermediate_size=64)
    settings: dict[str, Any] = {"dtype": "float32", "quantization": quantization}
    for kernels in available_sets()[:2]:
        monkeypatch.setenv("OUTRIDER_KERNELS", kernels)
        llm = LLM(path, **settings)
        assert llm.engine.runner.backend.name == "fused"
        fast = logits(llm)
        monkeypatch.setenv("OUTRIDER_KERNELS", "off")
        # Running states carry the last bits of products on, and those of PyTorch differ from processor to processor.
        torch.testing.assert_close(fast, logits(LLM(path, **settings)), rtol=1e-4, atol=3e-4)


def test_a_rounded_gate_beside_experts_is_left_to_transformers(tmp_path: Path) -> None:
    """Under its modules, and with the same states."""
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    path = checkpoints.save("qwen3_next", tmp_path / "qwen3_next", seed=2, **sizes)
    llm = LLM(path, dtype="float32", quantization="int8", draft_model=path)
    assert llm.engine.runner.backend.name == "paged"
    want = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=16), speculation="none")[0].token_ids
    way = SpeculationConfig(method=DraftModel(), tree=(2, 1))
    assert llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=16), speculation=way)[0].token_ids == want


@pytest.mark.parametrize(("dtype", "most"), [("float64", 1e-4), ("bfloat16", 0.1)])  # rounded once, or twice
def test_other_types_hold_the_rounded_weights(path: str, dtype: Any, most: float) -> None:
    rounded, near = (logits(LLM(path, dtype=d, quantization="int8")) for d in (dtype, "float32"))
    assert _distance(rounded, near) < most


def _distance(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Of most rows. Where a router is nearly undecided, what is rounded may send a row to another expert."""
    return float((logits - others).abs().amax(-1).median() / others.abs().max())


HOW = [("int4-g32", "int8"), ("int8", None), ("int4-g32", None)]


@pytest.mark.parametrize(("quantization", "activations"), core(HOW, HOW[:1], *OF_ROUNDING))
def test_speculation_writes_what_the_rounded_model_writes(quantization: Any, activations: Any) -> None:
    llm = LLM(
        activations=activations,
        quantization=quantization,
        draft_quantization="int4-g32-asym",
        dtype="bfloat16",
        batch_invariant=True,
        max_num_seqs=4,
    )
    prompts = ["class Reader:\n    def ", "import os\n\n\ndef ", "for i in range(10):\n"]
    params = [SamplingParams(seed=seed, max_tokens=24, temperature=seed % 2) for seed in range(3)]
    want = [o.token_ids for o in llm.generate(prompts, params, speculation="none")]
    for way in (
        SpeculationConfig(method=DraftModel(model=default_model("draft")), num_draft_tokens=4),
        SpeculationConfig(method=Suffix(min_match=1)),
    ):
        assert [o.token_ids for o in llm.generate(prompts, params, speculation=way)] == want


@pytest.mark.parametrize("quantization", ROUNDINGS[:2])
def test_rounded_activations_are_those_of_the_stock_model(
    grouped: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "quantization": quantization}
    exact = logits(LLM(grouped, **settings))
    fast = logits(LLM(grouped, activations="int8", **settings))
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    stock = logits(LLM(grouped, activations="int8", **settings))
    assert _distance(fast, stock) < 0.3 * _distance(fast, exact), "two that round alike are nearer than one that does not"


def test_experts_of_an_unknown_form_do_not_take_rounded_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.save("mixtral", tmp_path, intermediate_size=64)
    monkeypatch.setattr(hf_modules, "takes_packed_experts", lambda module: False)
    with pytest.raises(
        UnsupportedModelError, match=r"experts are not rounded: no product with model\.layers\.0\.mlp\.experts"
    ):
        LLM(path, activations="int8", dtype="float32", quantization="int8")


def test_activations_are_rounded_only_beside_weights_on_cpus() -> None:
    with pytest.raises(ContradictionError, match=r"activations='int8': .* quantization is None"):
        LLM(activations="int8")
    with pytest.raises(ContradictionError, match=r"activations='int8': .* this one is torch\.float64 on cpu"):
        LLM(activations="int8", quantization="int8", dtype="float64")
    with pytest.raises(InvalidParameterError, match="activations='int4'"):
        LLM(activations="int4", quantization="int8")  # type: ignore[arg-type]


def test_an_unknown_rounding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="quantization"):
        LLM(quantization="int3")  # type: ignore[arg-type]


def test_draft_models_are_rounded_as_the_llm_or_their_settings_say() -> None:
    draft = DraftModel(model=default_model("draft"))
    for settings, chosen, bits in (({}, draft, None), ({"draft_quantization": "int8"}, draft, 8)):
        assert _bits_of_draft(LLM(speculation=SpeculationConfig(method=chosen), **settings)) == bits
    own = draft.replace(quantization="int4-g32")
    assert _bits_of_draft(LLM(speculation=SpeculationConfig(method=own), draft_quantization="int8")) == 4


def test_a_large_draft_model_in_a_folder_is_rounded_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel_library() is None:
        pytest.skip("without kernels rounding saves no time")
    speculation = SpeculationConfig(method=DraftModel(model=default_model("draft")))

    def bits(**settings: Any) -> int | None:
        return _bits_of_draft(LLM(speculation=speculation, **settings))

    assert bits(dtype="bfloat16") is None, "a small one is not"
    monkeypatch.setattr(building, "_LEAST_ROUNDED", 0)
    assert bits(dtype="bfloat16") == 8
    assert bits(dtype="float32") is None
    assert bits(dtype="bfloat16", draft_quantization="none") is None
    assert bits(dtype="bfloat16", draft_quantization="int4-g32") == 4


def test_a_tuning_tries_a_draft_model_of_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, draft = LLM(dtype="bfloat16", kv_cache_tokens=1024), default_model("draft")
    assert not [way.name for way in candidates(llm, (), draft) if "int4" in way.name]
    monkeypatch.setattr(building, "_LEAST_ROUNDED", 0)
    found = {way.name: way.config.method for way in candidates(llm, (), draft)}
    if kernel_library() is not None:
        assert found["draft_model k=3 int4"] == DraftModel(model=draft, quantization="int4")
    assert not [way.name for way in candidates(llm, ("draft_model:3",), draft) if "int4" in way.name]


def _bits_of_draft(llm: LLM) -> int | None:
    proposer: Any = llm.engine.proposers.get(llm.speculation.method)  # type: ignore[arg-type]
    fmt = proposer.runner.backend.kernel.head.format
    return fmt.bits if fmt.quantised else None


def test_a_checkpoint_that_is_quantised_already_is_refused(path: str, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"quantised already \(fp8\), and quantization='int8'"):
        LLM(str(tmp_path / "model"), quantization="int8")


def test_groups_that_do_not_divide_are_refused_by_the_tensor(path: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"quantization='int4-g128': .*weight has \d+ inputs") as caught:
        LLM(path, quantization="int4")
    assert caught.value.remedy == "Use int8."


def test_a_weight_that_is_not_finite_is_refused_by_name(grouped: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(grouped)
    model.get_output_embeddings().weight.data[3, 5] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"weight holds weights that are not finite"):
        LLM(model, quantization="int4-g32")

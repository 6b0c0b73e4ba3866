"""Checkpoints that others quantised: every weight is the layout's to the bit, and speculation is lossless against these."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.config import ModelConfig
from outrider.errors import ContradictionError, ModelLoadError, UnsupportedModelError
from outrider.kernels.formats import FORMATS
from outrider.kernels.linear import use_stock_linear
from outrider.kernels.weights import stored_weight
from outrider.lab.convert.compressed_tensors import write_compressed
from outrider.loading import hf_modules
from outrider.loading.configuration import read_context, read_needs
from outrider.loading.loader import load_model
from outrider.model import keeping
from tests.model import checkpoints, quantised_files
from tests.model.core import core
from tests.model.quantised_files import GROUP, awq, declare, fp8, gptq

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FILES: dict[str, Any] = {
    "gptq": (gptq(), GPTQ),
    "gptq-v2": (gptq(version=2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-ordered": (gptq(ordered=True), GPTQ | {"desc_act": True}),
    "gptq-symmetric": (gptq(zeros=False), GPTQ | {"sym": True}),
    "gptq-8": (gptq(8), GPTQ | {"bits": 8}),
    "awq": (awq, AWQ),
}


@pytest.fixture(
    scope="module", params=core(FILES, ("gptq-ordered", "awq"), "src/outrider/loading/", "src/outrider/kernels/")
)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    return quantised_files.write(tmp_path_factory.mktemp("files") / request.param, *FILES[request.param])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return quantised_files.write(tmp_path / "model", gptq(), GPTQ, num_hidden_layers=1)[0]


def read(folder: Path, dtype: Any = "float32") -> Any:
    return load_model(ModelConfig(model=str(folder), dtype=dtype)).model


def weight_of(model: Any, name: str) -> Tensor:
    stored = stored_weight(model.get_submodule(name.removesuffix(".weight")))
    assert stored.quantised
    return stored.format.dequantise(stored, torch.float32)


def replaced(folder: Path, model: Any) -> str:
    """The same model as a checkpoint in full precision, with the weights that its quantised ones stand for."""
    plain = deepcopy(model)
    for name, module in plain.named_modules():
        if hasattr(module, "quantised_weight"):
            module.weight = torch.nn.Parameter(weight_of(model, f"{name}.weight"))
            module.__class__ = torch.nn.Linear
            del module.quantised_weight
    plain.save_pretrained(folder)
    return str(folder)


def test_weights_are_those_of_the_layout_to_the_bit(written: tuple[Path, dict[str, Tensor]]) -> None:
    model = read(written[0])
    for name, want in written[1].items():
        assert torch.equal(weight_of(model, name).double(), want)
        assert model.get_parameter(name).untyped_storage().nbytes() <= 4, "nothing is kept in full precision"


def test_texts_are_those_of_the_weights(written: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    plain = replaced(tmp_path / "plain", read(written[0]))
    prompt, params = [5, 3, 8, 1, 2, 3, 8, 1], SamplingParams(temperature=0, max_tokens=12)
    for dtype in ("float64", "float32"):
        llm = LLM(str(written[0]), dtype=dtype)
        assert llm.engine.runner.backend.name == "fused"
        ours = [llm.generate([prompt], params, speculation=how)[0].token_ids for how in ("none", "suffix")]
        assert ours[0] == ours[1]
        if dtype == "float64":
            assert tuple(ours[0]) == checkpoints.greedy_by_transformers(plain, prompt, 12)


def test_weights_come_back_from_the_kernels(written: tuple[Path, dict[str, Tensor]]) -> None:
    llm = LLM(str(written[0]), dtype="float32", speculation="none")
    runner: Any = llm.engine.runner
    runner.backend.uninstall()
    for name, want in written[1].items():
        assert torch.equal(weight_of(runner.loaded.model, name).double(), want)


#: One layer, whose experts' names in files and in transformers are not those of the other families.
MIXTRAL = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1}
QWEN = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": [], "head_dim": 16}


def compressed(bits: int, group: int | None, **how: Any) -> Any:
    return lambda: quantised_files.compressed(bits, group, **how)


@pytest.mark.parametrize(
    ("family", "files", "shape", "rounds_rows"),
    [
        ("mixtral", (gptq(), GPTQ), MIXTRAL, False),
        ("qwen3_moe", (gptq(8, zeros=False), GPTQ | {"bits": 8, "sym": True}), QWEN, False),
        ("qwen3_moe", (awq, AWQ), QWEN, True),
        ("qwen3_moe", (fp8(GROUP), FP8), QWEN, False),
        ("qwen3_moe", compressed(4, GROUP, symmetric=False, dtype=torch.bfloat16), QWEN, True),
        ("mixtral", compressed(4, GROUP, symmetric=True, dtype=torch.float16), MIXTRAL, False),
        ("qwen3_moe", compressed(8, None, symmetric=False, dtype=torch.bfloat16, format="int-quantized"), QWEN, True),
    ],
    ids=["mixtral", "gptq", "awq", "fp8", "compressed", "compressed-mixtral", "compressed-channels"],
)
def test_experts_are_those_of_the_layout_to_the_bit(
    tmp_path: Path, family: str, files: Any, shape: dict[str, Any], rounds_rows: bool
) -> None:
    packing, declared = files() if callable(files) else files
    folder, values = quantised_files.write(tmp_path / "model", packing, declared, family, **shape)
    plain = Path(checkpoints.save(family, tmp_path / "plain", hidden_size=64, intermediate_size=96, num_attention_heads=4,
                                  **{"num_hidden_layers": 2} | shape))  # fmt: skip
    weights = load_file(plain / "model.safetensors")
    assert sum("experts" in name for name in values) == sum("experts" in name for name in weights) > 0
    save_file(
        weights | {name: value.float() for name, value in values.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    stock, model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), read(folder)
    for ours, theirs in zip(hf_modules.expert_stacks(model), hf_modules.expert_stacks(stock), strict=True):
        stored, want = ours.stored(), theirs.stored().data
        assert torch.equal(
            stored.format.dequantise(stored.each(lambda tensor: tensor.flatten(0, 1)), torch.float32), want.flatten(0, 1)
        )
        if stored.quantised:
            assert getattr(ours.module, ours.name).untyped_storage().nbytes() <= 4, "nothing is kept in full precision"
    prompt, params = [5, 3, 8, 1, 2, 3, 8, 1], SamplingParams(temperature=0, max_tokens=12)
    computed = [{"dtype": "float64"}, {"dtype": "float32"}] + [{"dtype": "float32", "activations": "int8"}] * rounds_rows
    for how in computed:
        llm = LLM(str(folder), **how)
        assert llm.engine.runner.backend.name == "fused"
        texts = [llm.generate([prompt], params, speculation=way)[0].token_ids for way in ("none", "suffix")]
        assert texts[0] == texts[1]
        assert how["dtype"] != "float64" or tuple(texts[0]) == checkpoints.greedy_by_transformers(str(plain), prompt, 12)


def test_experts_that_cannot_be_kept_together_are_named(tmp_path: Path) -> None:
    folder, _ = quantised_files.write(
        tmp_path / "ordered", gptq(ordered=True), GPTQ | {"desc_act": True}, "mixtral", **MIXTRAL
    )
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj: experts with an order of inputs of their own"):
        read(folder)
    folder, _ = quantised_files.write(tmp_path / "fewer", awq, AWQ, "qwen3_moe", **QWEN)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".experts.1.up_proj." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"2 quantised matrices of experts are missing, .*experts\.1\.up_proj first"):
        read(folder)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, None), (8, 32), (8, None)])
@pytest.mark.parametrize(
    ("dtype", "format"), [("bfloat16", "pack-quantized"), ("float16", "pack-quantized"), ("float16", "int-quantized")]
)
def test_compressed_tensors_are_those_of_its_package(
    tmp_path: Path, bits: int, group: int | None, dtype: str, format: str, symmetric: bool
) -> None:
    if format == "int-quantized" and bits == 4:
        pytest.skip("whole numbers of 8 bits alone are kept as they are")
    how = {"symmetric": symmetric, "dtype": getattr(torch, dtype), "format": format}
    pack, declared = quantised_files.compressed(bits, group, **how)
    folder, values = quantised_files.write(tmp_path / "model", pack, declared, num_hidden_layers=1)
    model = read(folder)
    for name, want in values.items():
        assert torch.equal(weight_of(model, name).double(), want.double())


def test_what_is_declared_and_not_rounded_here_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = checkpoints.save("llama", tmp_path / "source", seed=3, hidden_size=64, intermediate_size=96, layers=1)
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "whole")
    out = write_compressed(str(tmp_path / "whole"), tmp_path / "out", FORMATS["int8-g32"])
    read(out)
    assert "declares" not in caplog.text
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    group = next(iter(said["config_groups"].values()))
    group["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
    declare(out, quantization_config=said | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    read(out)
    assert "its configuration declares input_activations and kv_cache_scheme; only its weights are rounded" in caplog.text


@pytest.mark.parametrize("name", ["int4-g32", "int8", "int8-g32"])
def test_what_is_written_here_is_loaded(tmp_path: Path, name: str) -> None:
    source = checkpoints.save("llama", tmp_path / "source", seed=3, hidden_size=64, intermediate_size=96, layers=1)
    whole: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    whole.save_pretrained(tmp_path / "whole")
    out = write_compressed(str(tmp_path / "whole"), tmp_path / "out", FORMATS[name])
    model = read(out, "auto")
    assert model.dtype == torch.bfloat16
    for path, module in whole.named_modules():
        if type(module) is torch.nn.Linear and path != "lm_head" and module.in_features > 32:
            stored = stored_weight(model.get_submodule(path))
            assert stored.format == FORMATS[name], "the kernels that are made for it"
            rounded = FORMATS[name].store(module.weight.data)
            if name != "int8":  # which the file rounds to scales in bfloat16
                assert torch.equal(stored.data, rounded.data)
                assert torch.equal(stored.scale, rounded.scale)


@pytest.mark.parametrize(
    ("packing", "declared"),
    [
        (fp8(GROUP), FP8),
        (fp8(GROUP, torch.uint8), FP8),
        (fp8(None), FP8 | {"weight_block_size": None, "activation_scheme": "static"}),
    ],
    ids=["blocks", "exponents", "one scale"],
)
def test_fp8_is_unfolded_as_transformers_does(tmp_path: Path, packing: Any, declared: dict[str, Any]) -> None:
    folder, values = quantised_files.write(tmp_path / "model", packing, declared, num_hidden_layers=1)
    for dtype in (torch.bfloat16, torch.float32):
        ours, theirs = read(folder, str(dtype)[6:]), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        for name in values:
            assert ours.get_parameter(name).dtype == dtype
            assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name)), name


def test_fp8_writes_the_text_of_its_weights(tmp_path: Path) -> None:
    """The last blocks of a row and of a column may be smaller."""
    folder, values = quantised_files.write(tmp_path / "model", fp8(40), FP8 | {"weight_block_size": [40, 40]})
    model = read(folder)
    assert all(torch.equal(model.get_parameter(name), want) for name, want in values.items())
    model.save_pretrained(tmp_path / "plain")
    prompt, params = [5, 3, 8, 1, 2, 3, 8, 1], SamplingParams(temperature=0, max_tokens=12)
    llm = LLM(str(folder), dtype="float64")
    assert llm.engine.runner.backend.name == "fused"
    ours = [llm.generate([prompt], params, speculation=how)[0].token_ids for how in ("none", "suffix")]
    assert tuple(ours[0]) == tuple(ours[1]) == checkpoints.greedy_by_transformers(str(tmp_path / "plain"), prompt, 12)
    needs = read_needs(ModelConfig(model=str(folder), dtype="bfloat16"))
    assert needs is not None
    assert needs.weight_bytes > 2 * sum(want.numel() for want in values.values()), "it takes two bytes a weight"
    with pytest.raises(ContradictionError, match="brings no weights of 8 bits or less"):
        read_context(ModelConfig(model=str(folder), activations="int8"))


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("weight_scale_inv", None, "weight_scale_inv is missing"),
        ("weight_scale_inv", lambda t: t[:2], r"scales of shape \[2, 2\] do not fit \[3, 2\] blocks"),
        ("weight_scale_inv", lambda t: t * float("nan"), "weights are not finite"),
        ("weight", lambda t: t.float(), "weights are F32, and not numbers of 8 bits"),
        ("weight", lambda t: t[:4], r"up_proj.weight has shape \[4, 64\], and config.json asks for \[96, 64\]"),
    ],
)  # fmt: skip
def test_blocks_of_fp8_that_do_not_belong_together_are_named(tmp_path: Path, part: str, change: Any, problem: str) -> None:
    folder, _ = quantised_files.write(tmp_path / "model", fp8(GROUP), FP8, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(f"{LAYER}.{part}")
    if change is not None:
        tensors[f"{LAYER}.{part}"] = change(tensor).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=problem):
        read(folder)


def test_what_passes_cost_is_kept_apart_where_rows_are_rounded(folder: Path) -> None:
    """Products of rounded rows take another time, and the texts are those of another model."""
    runners = [
        LLM(str(folder), dtype="float32", activations=how, speculation="none").engine.runner for how in (None, "int8")
    ]
    assert keeping.identity(runners[0]) == keeping.identity(runners[0])
    assert keeping.identity(runners[0]) != keeping.identity(runners[1])


def test_order_of_inputs_reaches_the_kernels(tmp_path: Path) -> None:
    """Layers that share their input, each with an order of its own, cannot be one matrix; other backends compute these."""
    folder, values = quantised_files.write(tmp_path / "model", gptq(ordered=True), GPTQ, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.0.self_attn.k_proj"
    order = torch.randperm(64)
    tensors[f"{layer}.g_idx"] = tensors[f"{layer}.g_idx"][order]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(folder), dtype="float32", speculation="none")
    model: Any = llm.engine.runner.loaded.model
    assert llm.engine.runner.backend.name != "fused"
    assert model.get_submodule("model.layers.0.self_attn.q_proj").packed.places is not None
    use_stock_linear(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weight_of(model, name).double(), values[name])


def test_a_file_in_half_precision_is_computed_in_float32(folder: Path) -> None:
    declare(folder, dtype="float16")
    assert read(folder, "auto").dtype == torch.float32


@pytest.mark.parametrize(
    ("declared", "problem", "remedy"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by bitsandbytes", 'quantization="int8"'),
        ({"quant_method": "hqq"}, "quantised by hqq", "compressed-tensors"),
        (FP8 | {"weight_block_size": [32]}, r"weight_block_size=[32], and two whole numbers", "config.json"),
        (GPTQ | {"checkpoint_format": "marlin"}, "the layout marlin of GPTQ", "GPTQ"),
        (GPTQ | {"bits": "4"}, "bits='4', which is no whole number", "config.json"),
        (GPTQ | {"bits": 3}, "weights of 3 bits are not known", "again"),
        (AWQ | {"version": "gemv"}, "the layout gemv of AWQ", "gemm"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "nvfp4-pack-quantized",
            "pack-quantized",
        ),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_name(folder: Path, declared: dict[str, Any], problem: str, remedy: str) -> None:
    declare(folder, quantization_config=declared)
    with pytest.raises((UnsupportedModelError, ModelLoadError)) as caught:
        read(folder)
    assert problem in str(caught.value)
    assert remedy in str(caught.value)


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("qzeros", None, "qzeros is missing"),
        ("scales", None, "scales is missing"),
        ("scales", lambda t: t[:, :50], r"scales of shape \[50, 2\] do not fit 96 outputs"),
        ("scales", lambda t: t * float("inf"), "scales are not finite"),
        ("g_idx", lambda t: t + 1, "a group beyond the 2 that there are"),
        ("g_idx", lambda t: t * 0, "groups have between 0 and 64 inputs"),
        ("g_idx", lambda t: t[:40], r"groups of \[40\] inputs are given"),
        ("qweight", lambda t: t.float(), "kept in torch.float32"),
        ("qzeros", lambda t: t.long(), "zero points are kept in torch.int64"),
        ("qweight", lambda t: t[:4], r"up_proj.weight has shape \[96, 32\], and config.json asks for \[96, 64\]"),
        ("qweight", lambda t: t[0], "cannot be read: not enough values to unpack"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_together_are_named(folder: Path, part: str, change: Any, problem: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(f"{LAYER}.{part}")
    if change is not None:
        tensors[f"{LAYER}.{part}"] = change(tensor).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=problem) as caught:
        read(folder)
    assert "up_proj" in str(caught.value)


def test_missing_weights_and_unknown_layers_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensors[f"model.layers.0.mlp.experts.0.up_proj.{part}"] = tensors[f"{LAYER}.{part}"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"experts\.0\.up_proj is quantised, and transformers' model has no such"
    ):
        read(folder)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 weights are missing, model\.norm\.weight first"):
        read(tmp_path / "other")
    declare(folder, quantization_config=GPTQ)
    whole = checkpoints.save("llama", tmp_path / "whole", layers=1)
    declare(Path(whole), quantization_config=GPTQ)
    with pytest.raises(ModelLoadError, match="weights are quantised, and none are"):
        read(Path(whole))


def test_scales_of_keys_and_values_are_passed_over(tmp_path: Path) -> None:
    """Keys and values are not rounded here, so the scales that a file has for them change nothing."""
    pack, declared = quantised_files.compressed(4, GROUP, symmetric=True, dtype=torch.bfloat16)
    declared["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    folder, values = quantised_files.write(tmp_path / "model", pack, declared, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    for name in ("k_scale", "v_scale", "q_scale", "k_proj.output_scale", "k_proj.k_scale", "v_proj.v_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor([0.03])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = read(folder)
    for name, want in values.items():
        assert torch.equal(weight_of(model, name).double(), want.double())

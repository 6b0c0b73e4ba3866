"""GGUF files as models: weights to the bit, texts of the stock model with these weights, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.config import ModelConfig
from outrider.errors import InvalidParameterError, OutriderError, UnsupportedModelError
from outrider.kernels.weights import stored_weight
from outrider.model.loading.configuration import read_context, read_needs
from outrider.model.loading.gguf.header import read_gguf
from outrider.model.loading.loader import load_model
from outrider.train.models import existing, pruned
from outrider.train.target import FrozenTarget
from tests.model import checkpoints
from tests.model.gguf_files import Written

pytest.importorskip("gguf")
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "layers": 2}
PROMPT, GREEDY = [5, 3, 8, 1, 2, 3, 8, 1], SamplingParams(temperature=0, max_tokens=10)
GEMMA: dict[str, Any] = {"tie_word_embeddings": True}
SEVEN: dict[str, Any] = {
    "num_hidden_layers": 7,
    "layers": None,
    "layer_types": [("sliding" if layer != 5 else "full") + "_attention" for layer in range(7)],
}
#: Types of matrices in turn. Queries, keys and values have other types than one another, as in Q4_K_M.
FILES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "llama-q4_0": ("llama", ("Q4_0",), {}),
    "llama-k": ("llama", ("Q4_K", "Q6_K", "Q5_K"), {}),
    "qwen2-mixed": ("qwen2", ("Q8_0", "F16", "Q5_0", "F32"), {}),
    "qwen3-tied": ("qwen3", ("Q4_1", "Q5_1", "BF16"), {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", ("Q8_0", "Q5_0"), GEMMA | {"query_pre_attn_scalar": 64}),
    "gemma3": ("gemma3", ("Q8_0", "F32"), GEMMA | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": None} | SEVEN),
    "llama-tables": ("llama", ("IQ4_NL", "MXFP4", "Q3_K", "Q2_K"), {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=FILES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    family, kinds, changes = FILES[request.param]
    folder = tmp_path_factory.mktemp("gguf")
    checkpoint = checkpoints.save(family, folder / "source", seed=1, head_dim=64, **(SHAPE | changes))
    return Written(checkpoint, folder / "model.gguf", kinds)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("small")
    return Written(
        checkpoints.save("llama", folder / "source", layers=1, intermediate_size=64), folder / "model.gguf", ("Q8_0",)
    )


def test_weights_are_those_of_the_file_to_the_bit(written: Written) -> None:
    model = load_model(ModelConfig(model=str(written.path), dtype="float32")).model
    for name, want in written.values.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if want.dim() == 1 or not hasattr(module, "quantised_weight"):
            assert torch.equal(model.state_dict()[name], want)
            continue
        stored = stored_weight(module)
        assert torch.equal(stored.format.dequantise(stored, torch.float32), want)
        assert module.weight.untyped_storage().nbytes() <= 4, "nothing is kept in full precision"


def test_bfloat16_is_taken_where_it_holds_all_that_is_not_in_blocks(tmp_path: Path) -> None:
    source = checkpoints.save("llama", tmp_path / "source", layers=1, intermediate_size=64)
    stock: Any = AutoModelForCausalLM.from_pretrained(source)
    for weight in stock.parameters():
        weight.data = weight.bfloat16().float() if weight.dim() == 1 else weight.data
    stock.save_pretrained(source)

    def dtype(kinds: tuple[str, ...]) -> torch.dtype:
        file = Written(source, tmp_path / "file.gguf", kinds).path
        found: torch.dtype = load_model(ModelConfig(model=str(file))).model.dtype
        return found

    assert dtype(("Q8_0", "BF16")) == torch.bfloat16
    assert dtype(("Q8_0", "F16")) == torch.float32
    stock.model.norm.weight.data.fill_(1.001)
    stock.save_pretrained(source)
    assert dtype(("Q8_0",)) == torch.float32


def test_texts_are_those_of_the_stock_model(written: Written, tmp_path: Path) -> None:
    plain = written.plain(tmp_path / written.model.config.model_type)
    exact = LLM(str(written.path), dtype="float64")
    want = checkpoints.greedy_by_transformers(plain, PROMPT, 10)
    assert tuple(exact.generate([PROMPT], GREEDY, speculation="suffix")[0].token_ids) == want
    llm = LLM(str(written.path))
    kinds = {tensor.type for tensor in read_gguf(str(written.path)).tensors.values() if len(tensor.shape) == 2}
    # Rows enter products with whole numbers smaller than those with floats, so both cannot share them.
    assert llm.engine.runner.backend.name == ("paged" if "F32" in kinds else "fused")
    ours = [llm.generate([PROMPT], GREEDY, speculation=how)[0].token_ids for how in ("none", "suffix")]
    assert ours[0] == ours[1]


def test_weights_come_back_from_the_kernels(written: Written) -> None:
    llm = LLM(str(written.path), speculation="none")
    runner: Any = llm.engine.runner
    runner.backend.uninstall()
    model = runner.loaded.model
    for name, want in written.values.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if want.dim() == 2 and hasattr(module, "quantised_weight"):
            stored = stored_weight(module)
            assert torch.equal(stored.format.dequantise(stored, torch.float32), want)


def test_a_file_drafts_for_a_file(small: Written, written: Written) -> None:
    llm = LLM(str(written.path), draft_model=str(small.path))
    want = llm.generate([PROMPT], GREEDY, speculation="none")[0].token_ids
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == want


def test_a_file_is_the_target_or_the_beginning_of_a_training(written: Written) -> None:
    target = FrozenTarget(str(written.path))
    begun = existing(str(written.path), target)
    kept = pruned(target, (1,))
    for model in (begun, kept):
        assert all(parameter.requires_grad and bool(parameter.isfinite().all()) for parameter in model.parameters())
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(begun(ids).logits, target.logits(ids))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(kept.get_parameter(name.replace(".1.", ".0.")), written.values[name])
    tied = written.model.config.tie_word_embeddings
    assert (begun.get_input_embeddings().weight is begun.get_output_embeddings().weight) is tied


def test_context_and_needs_are_read_from_the_header(small: Written) -> None:
    config = ModelConfig(model=str(small.path))
    assert read_context(config) == 160
    needs = read_needs(config)
    assert needs is not None
    assert 0 < needs.weight_bytes < small.path.stat().st_size
    with pytest.raises(UnsupportedModelError, match="in blocks already"):
        LLM(str(small.path), quantization="int8")
    with pytest.raises(InvalidParameterError, match=r"the context of .* is 160"):
        read_context(ModelConfig(model=str(small.path), max_model_len=200))


def test_factors_of_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    """What llama.cpp's converter makes of `rope_type="llama3"` is one factor for each frequency."""
    import gguf

    scaled = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 40}
    source = checkpoints.save("llama", tmp_path / "source", layers=1, rope_parameters=scaled)
    plain = Written(source, tmp_path / "plain.gguf", ("F32",))
    reader = gguf.GGUFReader(plain.path)
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    for name, value in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, value.contents(), value.types[0])
    usual = 1 / 10_000.0 ** (torch.arange(0, 8, 2) / 8)
    factors = usual / plain.model.model.rotary_emb.inv_freq
    assert factors.max() > 3
    writer.add_tensor("rope_freqs.weight", factors.numpy())
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    prompt = [(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(60)]
    want = checkpoints.greedy_by_transformers(source, prompt, 10)
    for path, same in (("scaled.gguf", True), ("plain.gguf", False)):
        llm = LLM(str(tmp_path / path), dtype="float64", speculation="none")
        assert (tuple(llm.generate([prompt], GREEDY)[0].token_ids) == want) is same


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"rope.scaling.type": "yarn"}, "scaled by yarn"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "no positive number"),
    ],
    ids=str,
)
def test_what_a_file_has_beside_its_architecture_is_refused(tmp_path: Path, metadata: dict[str, Any], problem: str) -> None:
    source = checkpoints.save("llama", tmp_path / "source", layers=1)
    if "attention.layer_norm_rms_epsilon" in metadata:
        metadata, source = {}, checkpoints.save("llama", tmp_path / "zero", layers=1, rms_norm_eps=0.0)
    file = Written(source, tmp_path / "model.gguf", ("F32",), **metadata)
    with pytest.raises(OutriderError, match=problem):
        LLM(str(file.path))

"""GGUF files as models: weights to the bit, texts of the stock model with these weights, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig, building
from outrider.config import ModelConfig
from outrider.errors import InvalidParameterError, OutriderError, UnsupportedModelError
from outrider.kernels.library import kernel_library
from outrider.kernels.weights import ExpertStack, stored_weight
from outrider.lab.convert.gguf_families import FAMILIES
from outrider.lab.convert.gguf_family import FileFamily, rotated
from outrider.lab.train.distill import existing, pruned
from outrider.lab.train.target import FrozenTarget
from outrider.loading.configuration import read_context, read_needs
from outrider.loading.gguf.header import read_gguf
from outrider.loading.loader import load_model
from tests.model import checkpoints
from tests.model.core import core
from tests.model.gguf_files import Kinds, Written, is_matrix

pytest.importorskip("gguf")
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "layers": 2}
PROMPT, GREEDY = [5, 3, 8, 1, 2, 3, 8, 1], SamplingParams(temperature=0, max_tokens=10)
GEMMA: dict[str, Any] = {"tie_word_embeddings": True}
SEVEN: dict[str, Any] = {
    "num_hidden_layers": 7,
    "layers": None,
    "layer_types": [("sliding" if layer != 5 else "full") + "_attention" for layer in range(7)],
}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
LONG: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.5 + 0.2 * i for i in range(32)],
        "original_max_position_embeddings": checkpoints.LONG_AFTER,
        "factor": 160 / checkpoints.LONG_AFTER,
    }
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "mlp_only_layers": []}
#: Types of matrices in turn. Queries, keys and values have other types than one another, as in Q4_K_M.
FILES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "llama-q4_0": ("llama", ("Q4_0",), {}),
    "llama-k": ("llama", ("Q4_K", "Q6_K", "Q5_K"), {}),
    "qwen2-mixed": ("qwen2", ("Q8_0", "F16", "Q5_0", "F32"), {}),
    "qwen3-tied": ("qwen3", ("Q4_1", "Q5_1", "BF16"), {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", ("Q8_0", "Q5_0"), GEMMA | {"query_pre_attn_scalar": 64}),
    "gemma3": ("gemma3", ("Q8_0", "F32"), GEMMA | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": None} | SEVEN),
    "qwen3-yarn": ("qwen3", ("Q8_0",), {"rope_parameters": YARN}),
    "phi3": ("phi3", ("Q8_0", "Q4_0"), {"sliding_window": None}),
    "phi3-longrope": ("longrope", ("Q8_0",), LONG | {"sliding_window": None}),
    "qwen3moe": ("qwen3_moe", ("Q4_K", "Q6_K", "Q8_0"), EXPERTS),
    "qwen3moe-floats": ("qwen3_moe", ("F32",), EXPERTS),
    "gpt-oss": ("gpt_oss", ("MXFP4",), {"rope_parameters": YARN | {"truncate": False}}),
    "ministral3": ("ministral3", ("Q8_0", "Q4_0"), {}),
    "llama-tables": ("llama", ("IQ4_NL", "MXFP4", "Q3_K", "Q2_K"), {"tie_word_embeddings": True}),
}


#: Matrices of small and of large blocks, experts of both kinds, changed factors, and values from tables.
FEW = ("qwen3-tied", "gemma2", "phi3-longrope", "qwen3moe", "gpt-oss", "llama-tables")


@pytest.fixture(scope="module", params=core(FILES, FEW, "src/outrider/loading/", "src/outrider/kernels/"))
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
        module, kind = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if kind in getattr(module, "quantised_stacks", {}):
            assert torch.equal(of_experts(module, kind), want)
        elif want.dim() > 1 and hasattr(module, "quantised_weight"):
            stored = stored_weight(module)
            assert torch.equal(stored.format.dequantise(stored, torch.float32), want)
        else:
            assert torch.equal(model.state_dict()[name], want)
            continue
        assert getattr(module, kind).untyped_storage().nbytes() <= 4, "nothing is kept in full precision"
    for name, want in written.model.named_buffers():  # rotary frequencies
        assert torch.equal(model.get_buffer(name), want)


def of_experts(module: Any, name: str) -> torch.Tensor:
    """What the blocks of experts stand for, as transformers has it."""
    stored = ExpertStack(module, name, module.is_transposed).stored()
    every = [stored.format.dequantise(stored.expert(i), torch.float32) for i in range(len(stored.data))]
    return torch.stack(every).transpose(1, 2) if module.is_transposed else torch.stack(every)


def test_bfloat16_is_taken_where_it_holds_all_matrices(tmp_path: Path) -> None:
    """Norms keep their own bits, so a file is not computed in float32 because of them."""
    source = checkpoints.save("llama", tmp_path / "source", layers=1, intermediate_size=64)
    stock: Any = AutoModelForCausalLM.from_pretrained(source)
    for weight in stock.parameters():
        weight.data = weight.bfloat16().float() if weight.dim() == 1 else weight.data
    stock.save_pretrained(source)

    def loaded(kinds: Kinds) -> Any:
        file = Written(source, tmp_path / "file.gguf", kinds).path
        return load_model(ModelConfig(model=str(file))).model

    assert loaded(("BF16",)).dtype == torch.bfloat16
    assert loaded(("Q8_0", "BF16")).dtype == torch.float32, "queries take other rows than keys"
    assert loaded(("Q8_0", "F16")).dtype == torch.float32
    assert loaded(("F32",)).dtype == torch.float32
    assert loaded(("Q8_0",)).model.norm.weight.dtype == torch.bfloat16
    stock.model.norm.weight.data.fill_(1.001)
    stock.save_pretrained(source)
    model = loaded(("Q8_0",))
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.norm.weight.data, torch.full_like(model.model.norm.weight, 1.001, dtype=torch.float32))
    hidden = torch.randn(3, model.config.hidden_size).bfloat16()
    assert model.model.norm(hidden).dtype == torch.bfloat16


def test_texts_are_those_of_the_stock_model(written: Written, tmp_path: Path) -> None:
    plain = written.plain(tmp_path / written.model.config.model_type)
    exact = LLM(str(written.path), dtype="float64")
    want = checkpoints.greedy_by_transformers(plain, PROMPT, 10)
    assert tuple(exact.generate([PROMPT], GREEDY, speculation="suffix")[0].token_ids) == want
    llm = LLM(str(written.path))
    tensors = read_gguf(str(written.path)).tensors.values()
    kinds = {tensor.type for tensor in tensors if is_matrix(tensor.name)}
    # Rows enter products with whole numbers smaller than those with floats, so both cannot share them.
    fused = written.model.config.model_type in checkpoints.DESCRIBED_TYPES and not ("F32" in kinds and len(kinds) > 1)
    assert llm.engine.runner.backend.name == ("fused" if fused else "paged")
    ours = [llm.generate([PROMPT], GREEDY, speculation=how)[0].token_ids for how in ("none", "suffix")]
    assert ours[0] == ours[1]


def test_weights_come_back_from_the_kernels(written: Written) -> None:
    llm = LLM(str(written.path), speculation="none")
    runner: Any = llm.engine.runner
    runner.backend.uninstall()
    model = runner.loaded.model
    for name, want in written.values.items():
        module = model.get_submodule(name.rpartition(".")[0])
        kind = name.rpartition(".")[2]
        if kind in getattr(module, "quantised_stacks", {}):
            assert torch.equal(of_experts(module, kind), want)
            assert getattr(module, kind).untyped_storage().nbytes() <= 4, "nothing is unfolded"
        elif want.dim() == 2 and hasattr(module, "quantised_weight"):
            stored = stored_weight(module)
            assert torch.equal(stored.format.dequantise(stored, torch.float32), want)


def test_a_file_drafts_for_a_file(small: Written, written: Written) -> None:
    llm = LLM(str(written.path), draft_model=str(small.path))
    want = llm.generate([PROMPT], GREEDY, speculation="none")[0].token_ids
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == want


def test_a_file_is_the_target_or_the_beginning_of_a_training(written: Written) -> None:
    target = FrozenTarget(str(written.path), "float32", activations="none")  # as what is trained computes
    begun = existing(str(written.path), target)
    kept = pruned(target, (1,))
    for model in (begun, kept):
        assert all(parameter.requires_grad and bool(parameter.isfinite().all()) for parameter in model.parameters())
    ids = torch.tensor([PROMPT])
    logits = begun(ids).logits
    torch.testing.assert_close(logits, target.logits(ids))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in begun.parameters())
    name = next(name for name in written.values if ".layers.1." in name and ".down_proj" in name)
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


def test_blocks_of_more_bits_are_rounded_to_four_where_it_is_asked_for_or_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoints.save("llama", tmp_path / "source", seed=1, **SHAPE | {"head_dim": 64})
    kinds = {"output.weight": "Q8_0", "token_embd.weight": "Q5_0"}
    path = str(
        Written(source, tmp_path / "model.gguf", lambda turn, name: kinds.get(name, ("Q5_0", "Q4_K")[turn % 2])).path
    )

    def types(**settings: Any) -> set[str]:
        model = load_model(ModelConfig(model=path, **settings)).model
        return {stored_weight(module).format.name for module in model.modules() if isinstance(module, torch.nn.Linear)}

    def head_of_draft(**settings: Any) -> str:
        llm = LLM(
            path, draft_model=path, speculation=SpeculationConfig(method=DraftModel(), num_draft_tokens=3), **settings
        )
        want = llm.generate([PROMPT], GREEDY, speculation="none")[0].token_ids
        assert llm.generate([PROMPT], GREEDY)[0].token_ids == want
        proposer: Any = llm.engine.proposers.get(llm.speculation.method)  # type: ignore[arg-type]
        return str(proposer.runner.backend.kernel.head.format.name)

    assert types() == {"q8_0", "q5_0", "q4_k"}
    assert types(quantization="int4-g32") == {"q4_0", "q4_k"}
    if kernel_library() is not None:
        assert head_of_draft() == "q8_0", "a small draft model stays as it is"
        monkeypatch.setattr(building, "_LEAST_ROUNDED", 0)
        assert head_of_draft() == "q4_0"
        assert head_of_draft(draft_quantization="none") == "q8_0"
    other = str(Written(source, tmp_path / "other.gguf", ("Q4_K",)).path)
    with pytest.raises(UnsupportedModelError, match=r"makes Q4_0 of Q5_0 and Q8_0, and no matrix of it"):
        LLM(other, quantization="int4-g32")


def test_factors_of_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    """What llama.cpp's converter makes of `rope_type="llama3"` is one factor for each frequency."""
    scaled = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 40}
    source = checkpoints.save("llama", tmp_path / "source", layers=1, rope_parameters=scaled)
    plain = checkpoints.save("llama", tmp_path / "plain", layers=1)
    prompt = [(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(60)]
    want = checkpoints.greedy_by_transformers(source, prompt, 10)
    for checkpoint, same in ((source, True), (plain, False)):
        file = Written(checkpoint, Path(f"{checkpoint}.gguf"), ("F32",)).path
        assert ("rope_freqs.weight" in read_gguf(str(file)).tensors) is same
        llm = LLM(str(file), dtype="float64", speculation="none")
        assert (tuple(llm.generate([prompt], GREEDY)[0].token_ids) == want) is same


def test_files_of_mistral_may_be_called_mistral3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they say no temperature of attention, they are those of Mistral, without a window."""
    monkeypatch.setitem(FAMILIES, "mistral", FileFamily("mistral3", parts=rotated))
    source = checkpoints.save("mistral", tmp_path / "source", sliding_window=None)
    file = Written(source, tmp_path / "m.gguf", ("F32",)).path
    assert read_gguf(str(file)).metadata["general.architecture"] == "mistral3"
    llm = LLM(str(file), dtype="float64", speculation="none")
    assert llm.engine.runner.backend.name == "fused"
    want = checkpoints.greedy_by_transformers(source, PROMPT, 10)
    assert tuple(llm.generate([PROMPT], GREEDY)[0].token_ids) == want


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"attention.temperature_length": 5}, "mistral3.attention.temperature_length=5"),
        ({"rope.scaling.yarn_attn_factor": 0.5}, "rope.scaling.yarn_attn_factor=0.5"),
        ({"rope.scaling.type": "linear"}, "other rotary positions than those of YaRN"),
    ],
    ids=str,
)
def test_what_is_not_known_of_ministral_is_refused(tmp_path: Path, metadata: dict[str, Any], problem: str) -> None:
    source = checkpoints.save("ministral3", tmp_path / "source", layers=1)
    with pytest.raises(OutriderError, match=problem):
        LLM(str(Written(source, tmp_path / "m.gguf", ("F32",), **metadata).path))


def test_gates_and_values_of_experts_of_two_types_are_refused(tmp_path: Path) -> None:
    source = checkpoints.save("qwen3_moe", tmp_path / "source", **(SHAPE | EXPERTS))
    file = Written(source, tmp_path / "m.gguf", lambda turn, name: "Q4_0" if "up_exps" in name else "Q8_0")
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_gate_exps\.weight as Q8_0 and .*up_exps\.weight as Q4_0"):
        LLM(str(file.path))


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"rope.scaling.type": "dynamic"}, "scaled by dynamic"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.factor is None, and no positive number"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 1.0}, "rope.scaling.yarn_attn_factor=1.0"),
        ({"rope.dimension_count": 4}, "rotary positions of a part of each head"),
        ({"expert_count": 4}, "llama.expert_count=4"),
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

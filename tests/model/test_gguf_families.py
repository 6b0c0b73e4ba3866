"""Families whose files llama.cpp writes in its own order: the folder's bits, the blocks' texts, and layers left out."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.errors import OutriderError
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.convert.gguf_families import FAMILIES
from outrider.loading.gguf.header import read_gguf
from tests.model import checkpoints
from tests.model.core import core, of_formats
from tests.model.gguf_families import GROUPS, SHAPES, as_ling, save
from tests.model.gguf_files import Written

pytest.importorskip("gguf")
PROMPT = [(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(20)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=4)
FEW = ("qwen3_5_text", "qwen3_next", "deepseek_v3", "lfm2_moe")
families = pytest.mark.parametrize("family", core(SHAPES, FEW, "src/outrider/loading/", "tests/model/gguf_"))


def folder(family: str, path: Path, **changes: Any) -> str:
    shape = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    return save(family, path, **(shape | SHAPES[family] | changes))


def told(model: str, **settings: Any) -> list[dict[int, float]]:
    """Logarithms of probabilities, token by token."""
    found = LLM(model, speculation="none", **settings).generate([PROMPT], GREEDY)[0]
    assert found.logprobs is not None
    return [{token: entry.logprob for token, entry in each.items()} for each in found.logprobs]


def kinds(turn: int, name: str) -> str:
    """Few of the types of which blocks are drawn, since a text of drawn numbers alone says little."""
    if name.endswith(("ssm_out.weight", "down_exps.weight")):
        return "Q4_K"
    return "Q8_0" if "ssm_" in name or "_exps" in name else ("Q8_0", "Q5_0", "Q4_0")[turn % 3]


@families
def test_a_file_of_floats_has_the_bits_of_its_folder(tmp_path: Path, family: str) -> None:
    source = folder(family, tmp_path / "source")
    assert told(write_gguf(source, tmp_path / "m.gguf")) == told(source, dtype="float32")


@families
def test_a_file_of_bfloat16_has_the_numbers_of_its_folder(tmp_path: Path, family: str) -> None:
    """In float64, in which the kernels compute both in one way. Norms to which 1 was added have lost their last bits."""
    source = folder(family, tmp_path / "source")
    rounded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    rounded.save_pretrained(source)
    file = Written(source, tmp_path / "m.gguf", ("BF16",))
    for ours, want in zip(told(str(file.path), dtype="float64"), told(source, dtype="float64"), strict=True):
        assert ours == pytest.approx(want, abs=1e-6)  # routers compute in float32


@families
def test_blocks_have_the_logits_of_what_they_stand_for(tmp_path: Path, family: str) -> None:
    file = Written(folder(family, tmp_path / "source"), tmp_path / "m.gguf", kinds)
    plain = file.plain(tmp_path / "plain")
    for ours, want in zip(told(str(file.path), dtype="float64"), told(plain, dtype="float64"), strict=True):
        assert ours == pytest.approx(want, abs=1e-5)  # rates have been computed and undone
    rows = LLM(str(file.path))
    texts = [rows.generate([PROMPT], GREEDY, speculation=how)[0].token_ids for how in ("none", "suffix")]
    assert texts[0] == texts[1]
    stock = file.model.config.model_type
    assert (rows.engine.runner.backend.name == "fused") is (stock in checkpoints.DESCRIBED_TYPES)


@pytest.mark.parametrize("kind", core(["F32", "Q8_0"], ["F32"], *of_formats.args))
def test_a_file_of_ling_has_the_bits_of_the_same_numbers_as_glm(tmp_path: Path, kind: str) -> None:
    """Queries, keys and values are one tensor, and experts have groups."""
    source = folder("glm4_moe", tmp_path / "source", use_qk_norm=True, n_group=2, topk_group=1)
    glm = Written(source, tmp_path / "glm.gguf", (kind,), **GROUPS)
    ling = as_ling(glm.path, tmp_path / "ling.gguf")
    assert told(ling) == told(str(glm.path))
    assert told(ling) != told(str(Written(source, tmp_path / "other.gguf", (kind,)).path)), "groups say nothing"
    assert kind != "F32" or told(ling) == told(source, dtype="float32")


def test_matrices_that_llama_cpp_leaves_are_not_rounded(tmp_path: Path) -> None:
    source = folder("gemma3n_text", tmp_path / "source")
    types = {
        name: tensor.type for name, tensor in read_gguf(write_gguf(source, tmp_path / "m.gguf", "int8")).tensors.items()
    }
    assert types["blk.0.attn_q.weight"] == "Q8_0"
    assert {types[name] for name in types if "altup" in name or "laurel" in name} == {"F32"}


def test_prediction_layers_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file counts them among its blocks."""
    source = folder("qwen3_5_text", tmp_path / "source")
    plain = Written(source, tmp_path / "plain.gguf", ("F32",))
    behind = {"blk.4.nextn.eh_proj.weight": (256, 512), "blk.4.attn_norm.weight": (256,)}
    counts = {"nextn_predict_layers": 1, "block_count": 5}
    file = Written(source, tmp_path / "m.gguf", ("F32",), more=behind, **counts)
    assert "blk.4.nextn.eh_proj.weight" in read_gguf(str(file.path)).tensors
    with caplog.at_level(logging.INFO, "outrider"):
        assert told(str(file.path)) == told(str(plain.path))
    assert "m.gguf carries 1 prediction layer: mtp, not in use" in caplog.text


@pytest.mark.parametrize("family", core(["gemma3n_text:shared", "gemma4_text"], ["gemma4_text"], *of_formats.args))
def test_keys_and_values_that_no_layer_reads_are_left_out(tmp_path: Path, family: str) -> None:
    """As files have them of layers that read those of another layer."""
    source = folder(family, tmp_path / "source")
    plain = Written(source, tmp_path / "plain.gguf", ("F32",))
    assert "blk.3.attn_k.weight" not in read_gguf(str(plain.path)).tensors
    more = {"blk.3.attn_k.weight": (128, 256), "blk.3.attn_v.weight": (128, 256), "blk.3.attn_k_norm.weight": (64,)}
    file = Written(source, tmp_path / "m.gguf", ("F32",), more=more)
    assert told(str(file.path)) == told(str(plain.path))


def test_deepseek_may_unfold_with_one_tensor_and_compress_no_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older files do, which say the width of heads instead, and as small models are."""
    source = folder("deepseek_v2", tmp_path / "source", q_lora_rank=None)
    monkeypatch.setitem(FAMILIES, "deepseek_v2", replace(FAMILIES["deepseek_v2"], parts=lambda config: {}))
    widths = {"attention.key_length": 96, "attention.value_length": 128, "attention.head_count_kv": 4}
    file = Written(source, tmp_path / "m.gguf", ("F32",), without=("key_length_mla", "value_length_mla"), **widths)
    assert "blk.0.attn_kv_b.weight" in read_gguf(str(file.path)).tensors
    assert told(str(file.path)) == told(source, dtype="float32")


@pytest.mark.parametrize(
    ("family", "metadata", "problem"),
    [
        ("qwen3_5_text", {"ssm.group_count": 5}, "12 heads of values of 768 numbers, and 5 of keys"),
        ("qwen3_5_text", {"ssm.inner_size": 500}, "12 heads of values of 500 numbers"),
        ("qwen3_5_text", {"ssm.group_count": 6}, "its metadata ask for"),
        ("qwen3_5_text", {"nextn_predict_layers": 4}, "no number of some of its 4 layers"),
        ("qwen3_5_text", {"full_attention_interval": 2}, "which its architecture does not have"),
        ("qwen3_5_text", {"expert_count": 4}, "qwen35.expert_count=4"),
        ("nemotron_h:experts", {"expert_gating_func": 1}, "expert_gating_func=1"),
        ("nemotron_h:experts", {"moe_latent_size": 64}, r"blk\.1\.ffn_\w+\.weight has shape .* its metadata ask for"),
        ("nemotron_h:experts", {"ssm.inner_size": 500}, "a scan of 500 numbers in 8 heads"),
        ("mamba2", {"ssm.time_step_rank": 7}, "a scan of 512 numbers in 7 heads"),
        ("mamba2", {"ssm.group_count": 4}, r"blk\.0\.ssm_\w+\.weight has shape .* its metadata ask for"),
        ("gemma3n_text", {"altup.num_inputs": 3}, r"altup_correct_coef\.weight has shape \[4, 4\]"),
        ("gemma3n_text", {"activation_sparsity_scale": 1.6}, "activation_sparsity_scale=1.6"),
        ("gemma3n_text", {"embedding_length_per_layer_input": 32}, r"\.weight has shape .* its metadata ask for"),
        ("llama4_text", {"expert_feed_forward_length": 128}, r"blk\.1\.ffn_\w+\.weight has shape .* its metadata ask for"),
        ("llama4_text", {"interleave_moe_layer_step": 4}, r"blk\.1\.ffn_\w+\.weight, which its architecture does not have"),
        ("llama4_text", {"interleave_moe_layer_step": 1}, "which its architecture does not have"),
    ],
    ids=str,
)
def test_values_that_contradict_the_tensors_are_refused(
    tmp_path: Path, family: str, metadata: dict[str, Any], problem: str
) -> None:
    source = folder(family, tmp_path / "source")
    with pytest.raises(OutriderError, match=problem):
        LLM(str(Written(source, tmp_path / "m.gguf", ("F32",), **metadata).path))


@pytest.mark.parametrize(
    ("family", "missing", "problem"),
    [
        ("mamba2", "blk.1.ssm_out.weight", r"1 tensors are missing, that for backbone\.layers\.1\.mixer\.out_proj\.weight"),
        ("nemotron_h:experts", "blk.1.ffn_latent_up.weight", r"that for model\.layers\.1\.mixer\.fc2_latent_proj\.weight"),
        ("nemotron_h:experts", "blk.1.ffn_up_exps.weight", r"that for model\.layers\.1\.mixer\.experts\.up_proj\[0\]"),
        ("llama4_text", "blk.1.ffn_up_exps.weight", r"that for model\.layers\.1\.feed_forward\.experts\.gate_up_proj\[1\]"),
        ("gemma3n_text", "altup_proj.weight", r"3 tensors are missing, that for model\.altup_projections\.0\.weight"),
        ("gemma3n_text", "blk.2.altup_correct_scale.weight", r"that for model\.layers\.2\.altup\.correct_output_scale"),
    ],
)
def test_missing_tensors_are_named(tmp_path: Path, family: str, missing: str, problem: str) -> None:
    source = folder(family, tmp_path / "source")
    with pytest.raises(OutriderError, match=problem):
        LLM(str(Written(source, tmp_path / "m.gguf", ("F32",), missing=(missing,)).path))


def test_rates_that_cannot_be_are_refused(tmp_path: Path) -> None:
    source = folder("qwen3_5_text", tmp_path / "source")
    stock: Any = AutoModelForCausalLM.from_pretrained(source)
    stock.model.layers[0].linear_attn.A_log.data.fill_(-200.0)  # a rate of 0
    stock.save_pretrained(source)
    with pytest.raises(OutriderError, match=r"blk\.0\.ssm_a holds numbers that cannot be"):
        LLM(str(Written(source, tmp_path / "m.gguf", ("F32",)).path))


@pytest.mark.parametrize("name", ["t5encoder", "step35"])
def test_architectures_that_are_not_read_are_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", name)
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(OutriderError, match=f"its architecture is {name}, and (it has no decoder|transformers has no)"):
        LLM(str(tmp_path / "m.gguf"))

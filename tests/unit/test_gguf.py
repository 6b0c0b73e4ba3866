"""The GGUF writer: the files that it writes, how llama.cpp reads them, and the models that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.convert.gguf_families import FAMILIES
from outrider.lab.convert.gguf_family import FileFamily
from outrider.lab.peers.base import PeerMode, PeerModels, PeerRequest
from tests.model import checkpoints

PROMPT = tuple((7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(23))
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
PLAIN = PeerMode("plain", "plain")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("llama"))


def transformers_greedy(path: str, num_tokens: int) -> tuple[int, ...]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=num_tokens)
    return tuple(text[0, len(PROMPT) :].tolist())


def llama_cpp_greedy(path: str, folder: Path, num_tokens: int) -> tuple[int, ...]:
    from outrider.lab.peers.llama_cpp import LlamaCppEngine

    engine = LlamaCppEngine(PeerModels(path, None, "float32", 1, folder))
    return engine.generate(PeerRequest(PLAIN, (PROMPT,), num_tokens, 0.0, None)).texts[0]


# -- what is written ---------------------------------------------------------------------------------------------------


def test_a_folder_that_was_made_of_a_file_becomes_one_again(tmp_path):
    """Its numbers have 32 bits, which models compute with, and a reader finds those with the fewest digits in the file."""
    pytest.importorskip("gguf")
    logprobs = []
    for epsilon in (1e-5, float(np.float32(1e-5))):
        source = checkpoints.save("llama", tmp_path / str(epsilon), rms_norm_eps=epsilon)
        for model in (source, write_gguf(source, tmp_path / f"{epsilon}.gguf", "float32")):
            with LLM(model, dtype="float32", speculation="none") as llm:
                found = llm.generate([list(PROMPT)], SamplingParams(temperature=0, max_tokens=8, logprobs=3))[0]
            logprobs.append(found.logprobs)
    assert logprobs == logprobs[:1] * 4


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 2**-11), ("bfloat16", 2**-8)])
def test_weights_survive_as_far_as_the_type_allows(llama, tmp_path, dtype, tolerance):
    gguf = pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    tensors = {t.name: t for t in gguf.GGUFReader(write_gguf(llama, tmp_path / "m.gguf", dtype)).tensors}
    state = AutoModelForCausalLM.from_pretrained(llama).float().state_dict()
    assert len(tensors) == len(state)
    for ours, theirs in (("model.layers.3.mlp.up_proj.weight", "blk.3.ffn_up.weight"), ("lm_head.weight", "output.weight")):
        expected = state[ours].numpy()
        stored = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        assert np.abs(stored - expected).max() <= tolerance * np.abs(expected).max()
    norm = tensors["output_norm.weight"]
    assert norm.tensor_type.name == "F32"
    assert np.array_equal(norm.data, state["model.norm.weight"].numpy())


@pytest.mark.parametrize(("dtype", "stored_as", "steps"), [("int8", "Q8_0", 127), ("int4", "Q4_0", 8)])
def test_blocks_keep_weights_to_a_step_of_their_scale(tmp_path, dtype, stored_as, steps):
    gguf = pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    from outrider.config import default_model

    checkpoint = default_model("draft")
    tensors = {t.name: t for t in gguf.GGUFReader(write_gguf(checkpoint, tmp_path / "m.gguf", dtype)).tensors}
    stored = tensors["blk.0.ffn_up.weight"]
    assert stored.tensor_type.name == stored_as
    weight = (
        AutoModelForCausalLM.from_pretrained(checkpoint).float().state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    )
    blocks = weight.reshape(-1, 32)
    wrong = np.abs(gguf.quants.dequantize(stored.data, stored.tensor_type).reshape(-1, 32) - blocks).max(1)
    assert (wrong <= 1.01 * np.abs(blocks).max(1) / steps).all()
    assert wrong.max() > 0


def test_a_tied_head_is_written_once(tmp_path):
    gguf = pytest.importorskip("gguf")
    from outrider.config import default_model

    names = [t.name for t in gguf.GGUFReader(write_gguf(default_model("draft"), tmp_path / "m.gguf")).tensors]
    assert "token_embd.weight" in names
    assert "output.weight" not in names
    assert len(list(tmp_path.iterdir())) == 1  # nothing unfinished lies about


def test_halves_of_a_head_become_neighbours():
    pytest.importorskip("gguf")
    from transformers import LlamaConfig

    rows = np.arange(8)[:, None] * np.ones((1, 3))  # 2 heads of 4
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    names = [f"model.layers.0.self_attn.q_proj.{kind}" for kind in ("weight", "bias")]
    weight, bias = FAMILIES["llama"].tensors(config, names)
    assert (weight.name, bias.name) == ("blk.0.attn_q.weight", "blk.0.attn_q.bias")
    assert weight.arranged(rows)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert bias.arranged(np.arange(8)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


# -- what llama.cpp makes of it ----------------------------------------------------------------------------------------


@pytest.mark.slow  # with the extra `peers`
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "ministral3"])
def test_llama_cpp_writes_the_text_of_transformers(family, tmp_path):
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    path = checkpoints.save(family, tmp_path / family) if family != "qwen2" else save_qwen2(tmp_path / family)
    assert llama_cpp_greedy(path, tmp_path, 32) == transformers_greedy(path, 32)


@pytest.mark.slow  # with the extra `peers`
def test_unpermuted_heads_would_be_noticed(llama, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    monkeypatch.setitem(FAMILIES, "llama", FileFamily("llama"))
    assert llama_cpp_greedy(llama, tmp_path, 32) != transformers_greedy(llama, 32)


def save_qwen2(folder: Path) -> str:
    """The one of the three with biases, drawn like the weights: at zero nobody would miss them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    shape: dict[str, Any] = {**checkpoints._SHAPE, "tie_word_embeddings": False}
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(folder)
    return str(folder)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_an_unknown_type_of_weights_is_refused(llama, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(InvalidParameterError, match="dtype"):
        write_gguf(llama, tmp_path / "m.gguf", "int3")


def test_rows_that_do_not_divide_into_blocks_are_refused(llama, tmp_path):
    pytest.importorskip("gguf")  # rows of 48
    with pytest.raises(UnsupportedModelError, match="48 weights do not divide"):
        write_gguf(llama, tmp_path / "m.gguf", "int8")


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("gpt2", {}, "no GGUF is written for gpt2"),
        ("mistral", {}, "its sliding_window is 6, and a reader of its file would take None"),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}, "its norm_topk_prob is False"),
        ("qwen3_moe", {}, "no tensor for model.layers.2.mlp.gate_proj"),
        ("gemma3", {"tie_word_embeddings": True}, "its layer_types is"),
        ("gemma2", {"query_pre_attn_scalar": 3}, "its query_pre_attn_scalar is 3"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "its swiglu_limit is 5.0, and a reader of its file would take 7.0"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic'",
        ),
        ("llama", {"hidden_act": "gelu"}, "its hidden_act is 'gelu', and a reader of its file would take 'silu'"),
        ("nemotron_h", {}, "its time_step_min is 0.001, and a reader of its file would take 1e-09"),
        ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.2}}, "'attention_factor': 1.2"),
        ("stablelm", {"qk_layernorm": True}, "files of stablelm have no tensor for"),
        ("qwen3_5_text", {"layer_types": ["full_attention", *["linear_attention"] * 3]}, "full_attention_interval"),
    ],
    ids=str,
)
def test_a_model_that_gguf_cannot_describe_is_refused(family, changes, problem, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(UnsupportedModelError, match=problem):
        write_gguf(checkpoints.save(family, tmp_path / "source", **changes), tmp_path / "m.gguf")

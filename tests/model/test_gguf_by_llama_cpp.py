"""Files that llama.cpp's own quantiser writes: the type of each tensor, its values to the bit, and texts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from outrider import LLM, SamplingParams
from outrider.config import default_model
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.convert.gguf_vocabulary import own_vocabulary
from outrider.loading.gguf.header import GgufFile, is_packed, read_gguf, stored_tensor
from tests.model import checkpoints
from tests.model.drawn_files import q4_k_m
from tests.model.gguf_files import is_matrix
from tests.model.test_gguf_models import EXPERTS, SHAPE
from tests.model.test_gguf_vocabularies import byte_level_tokenizer

gguf = pytest.importorskip("gguf")
#: ik_llama.cpp brings llama.cpp's program, which xllamacpp does not.
quantiser = pytest.importorskip("ik_llama_cpp.quantize").find_quantize_bin()
#: What llama.cpp writes of types that are taken here.
MIXTURES = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "Q4_0", "Q8_0", "IQ4_NL")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded draft model, whose columns 256 does not divide."""
    return write_gguf(default_model("draft"), tmp_path_factory.mktemp("embedded") / "m.gguf", "float16")


def source(folder: Path, family: str, **changes: Any) -> tuple[str, Any]:
    """A random model with 256 columns and a vocabulary, as a file of halves, and its configuration."""
    tokenizer = byte_level_tokenizer("llama-bpe")
    shape = SHAPE | {"layers": 4, "head_dim": 64, "vocab_size": len(tokenizer) + 3} | changes
    checkpoint = checkpoints.save(family, folder / "source", seed=1, **shape)
    tokenizer.save_pretrained(checkpoint)
    file = write_gguf(checkpoint, folder / "halves.gguf", "float16", own_vocabulary(checkpoint))
    return file, AutoConfig.from_pretrained(checkpoint)


def quantised(path: str, out: Path, kind: str, *options: str) -> GgufFile:
    """What llama.cpp makes of a file."""
    done = subprocess.run([str(quantiser), *options, path, str(out), kind, "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return read_gguf(str(out))


def checked_types(file: GgufFile) -> dict[str, str]:
    """The types of the matrices, after all values were compared with those of the gguf package."""
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file.path).tensors}
    assert theirs.keys() == file.tensors.keys()
    for name, tensor in file.tensors.items():
        want = torch.from_numpy(gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type).copy())
        if is_packed(tensor):
            stored = stored_tensor(file.path, tensor, torch.float32)
            ours = stored.format.dequantise(stored, torch.float32)
        else:
            ours = tensor.floats()
        assert torch.equal(ours.reshape(want.shape), want), name
    return {name: tensor.type for name, tensor in file.tensors.items() if is_matrix(name)}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"])
def test_every_matrix_has_blocks_of_32(embedded: str, tmp_path: Path, kind: str) -> None:
    types = checked_types(quantised(embedded, tmp_path / "m.gguf", kind, "--pure"))
    assert set(types.values()) == {kind}


def test_smaller_blocks_take_the_place_of_those_of_256_where_they_do_not_fit(embedded: str, tmp_path: Path) -> None:
    file = quantised(embedded, tmp_path / "m.gguf", "Q4_K_M")
    types = checked_types(file)
    assert set(types.values()) == {"Q4_K", "Q6_K", "Q5_0", "Q8_0"}
    for name, kind in types.items():
        assert kind.endswith("_K") is (file.tensors[name].shape[-1] % 256 == 0), name


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q5_K", "Q6_K"])
def test_every_matrix_has_blocks_of_256(tmp_path: Path, kind: str) -> None:
    file, _ = source(tmp_path, "llama", layers=1)
    types = checked_types(quantised(file, tmp_path / "m.gguf", kind, "--pure"))
    assert set(types.values()) == {kind}


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("qwen3_moe", EXPERTS), ("gpt_oss", {})], ids=str)
def test_the_mixture_of_q4_k_m_writes_texts(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """The projections back of some layers are Q6_K, those of experts too, beside gates and values that are Q4_K."""
    path, config = source(tmp_path, family, **changes)
    file = quantised(path, tmp_path / "m.gguf", "Q4_K_M")
    types = checked_types(file)
    usual = [name for name in types if "attn" not in name or family == "llama"]  # attention beside experts has more bits
    assert {name: types[name] for name in usual} == {name: q4_k_m(config)(name) for name in usual}
    assert {types[name] for name in types if "ffn_down" in name} == {"Q4_K", "Q6_K"}
    llm, greedy = LLM(file.path), SamplingParams(temperature=0, max_tokens=8)
    assert llm.engine.runner.backend.name == "fused"
    texts = [llm.generate(["low low lower"], greedy, speculation=how)[0].token_ids for how in ("none", "suffix")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_no_mixture_gives_gates_and_values_of_experts_unlike_types(tmp_path: Path) -> None:
    """So that no file of a usual mixture is refused for them."""
    path, _ = source(tmp_path, "qwen3_moe", **EXPERTS)
    for kind in MIXTURES:
        types = {name: tensor.type for name, tensor in quantised(path, tmp_path / "m.gguf", kind).tensors.items()}
        gates = [name for name in types if "ffn_gate_exps" in name]
        assert len(gates) == 4
        assert {name: types[name] for name in gates} == {
            name: types[name.replace("gate_exps", "up_exps")] for name in gates
        }

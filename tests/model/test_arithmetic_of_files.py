"""What a GGUF file is computed in unless the caller says otherwise: rows of 8 bits that meet its blocks, and bfloat16
beside norms and biases that keep their bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.config import ModelConfig, default_model
from outrider.kernels.formats import StoredWeight
from outrider.kernels.gguf_blocks import Blocks
from outrider.kernels.library import available_sets
from outrider.lab.measure.agreement import measure_rounding
from outrider.lab.prove.own_model import OwnModel
from outrider.loading import loader
from outrider.loading.loader import load_model
from tests.model import checkpoints
from tests.model.gguf_files import Kinds, Written
from tests.model.test_gguf_models import EXPERTS, SHAPE
from tests.model.test_quantization import TEXT, logits
from tests.model.test_rounded_rows_of_files import halves_among_blocks, write

pytest.importorskip("gguf")
needs_kernels = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def rounds_rows(llm: LLM) -> bool:
    return llm.engine.runner.loaded.rounds_rows


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kinds", "changes"),
    [("llama", ("Q4_K", "Q6_K"), {}), ("qwen2", ("Q5_0", "Q8_0"), {}), ("qwen3_moe", ("Q4_K", "Q8_0"), EXPERTS)],
    ids=["llama", "qwen2", "experts"],
)
def test_rows_that_meet_blocks_are_rounded_unasked(tmp_path: Path, family: str, kinds: Kinds, changes: Any) -> None:
    """As llama.cpp does it. `activations="none"` takes the weights alone."""
    path = write(tmp_path, family, kinds, **changes)
    usual, asked, plain = LLM(path), LLM(path, activations="int8"), LLM(path, activations="none")
    assert [rounds_rows(llm) for llm in (usual, asked, plain)] == [True, True, False]
    assert "activations=int8" in repr(usual)
    assert usual.identity.quantization == "int8 activations"
    assert plain.identity.quantization is None
    assert torch.equal(logits(usual), logits(asked))
    assert not torch.equal(logits(usual), logits(plain))
    assert "times as fast" in str(measure_rounding(usual, [[1, 2, 3, 4]])), "the other one has whole rows"
    assert measure_rounding(usual, [[1, 2, 3, 4]]).agreement.distance > 0


def test_rows_are_not_rounded_where_the_kernels_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "llama", ("Q8_0",))
    assert not rounds_rows(LLM(path, dtype="float64"))
    assert not rounds_rows(LLM(write(tmp_path, "llama", ("F32",), 2)))
    halves = LLM(write(tmp_path, "llama", halves_among_blocks, 3))
    assert not rounds_rows(halves)
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    assert not rounds_rows(LLM(path))


@pytest.mark.parametrize(
    ("family", "kinds", "changes"),
    [
        ("qwen2", ("Q5_0", "Q8_0"), {}),  # whose biases are float32
        ("qwen3", ("Q6_K",), {"tie_word_embeddings": True}),
        ("qwen3_moe", ("Q4_K", "Q8_0"), EXPERTS),
    ],
    ids=["biases", "tied", "experts"],
)
def test_without_kernels_weights_are_unfolded_once_where_they_fit(
    tmp_path: Path,
    family: str,
    kinds: Kinds,
    changes: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    path, unfolded = write(tmp_path, family, kinds, **changes), []
    make = Blocks.dequantise

    def noted(fmt: Blocks, stored: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
        unfolded.append(len(stored.data))
        return make(fmt, stored, dtype)

    found = {}
    for room in (True, False):
        monkeypatch.setattr(loader, "leaves_room", lambda size, device, room=room: room)
        llm = LLM(path, kv_cache_tokens=128)
        monkeypatch.setattr(Blocks, "dequantise", noted)
        unfolded.clear()
        found[room] = logits(llm)
        assert (max(unfolded) > len(TEXT)) is not room, "rows of embeddings alone are unfolded in a pass"
        monkeypatch.setattr(Blocks, "dequantise", make)
    assert torch.equal(*found.values()), "the numbers are the same"
    assert len([record for record in caplog.records if "every pass unfolds its weights" in record.message]) == 1


@needs_kernels
def test_drafts_of_files_round_their_rows_unasked_unless_the_target_is_asked_not_to(tmp_path: Path) -> None:
    target, draft = (write(tmp_path, "llama", ("Q8_0",), seed) for seed in (1, 2))
    way = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=3)
    for activations, rounded in ((None, True), ("none", False)):
        llm = LLM(target, activations=activations)
        want = llm.generate([[1, 2, 3]], GREEDY, speculation="none")[0].token_ids
        assert llm.generate([[1, 2, 3]], GREEDY, speculation=way)[0].token_ids == want
        assert llm.proposers.get(way.method).runner.loaded.rounds_rows is rounded


@needs_kernels
def test_proofs_take_the_arithmetic_that_is_usual(tmp_path: Path) -> None:
    path = write(tmp_path, "llama", ("Q4_K",))
    assert rounds_rows(OwnModel(path, None).llm)
    assert OwnModel(path, None, activations="none").llm.engine.runner.loaded.dtype == torch.float64
    assert OwnModel(default_model("target"), None).llm.engine.runner.loaded.dtype == torch.float64


def with_vectors(folder: Path, family: str, kinds: Kinds, values: dict[str, float]) -> tuple[str, Any]:
    """A file of a random model some of whose vectors, by the ends of their names, have one value everywhere."""
    source = checkpoints.save(family, folder / "source", seed=1, head_dim=64, **SHAPE)
    stock: Any = AutoModelForCausalLM.from_pretrained(source)
    for name, weight in stock.named_parameters():
        for end, value in values.items():
            if name.endswith(end):
                weight.data.fill_(value)
    stock.save_pretrained(source)
    return str(Written(source, folder / "model.gguf", kinds).path), stock


def test_biases_and_norms_keep_bits_that_bfloat16_does_not_hold(tmp_path: Path) -> None:
    path, stock = with_vectors(tmp_path, "qwen2", ("Q4_0",), {"q_proj.bias": 0.1, "layernorm.weight": 1.003})
    model = load_model(ModelConfig(model=path)).model
    assert model.dtype == torch.bfloat16
    for name, weight in stock.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            assert torch.equal(model.get_parameter(name).float(), weight.data.float()), name
    assert LLM(path).engine.runner.loaded.dtype == torch.bfloat16
    assert model(torch.tensor([[1, 2, 3, 4]])).logits.dtype == torch.bfloat16, "nothing else has become float32"


@needs_kernels
def test_the_kernels_multiply_with_all_bits_of_a_norm(tmp_path: Path) -> None:
    """bfloat16 has no number between 1 and 1.0078. Rows of 8 bits are the same numbers whatever factor they have in common,
    so the logits have the factor of the last norm."""
    said = []
    for factor in (1.0, 1.003):
        path, _ = with_vectors(tmp_path / str(factor), "llama", ("Q8_0",), {"model.norm.weight": factor})
        llm = LLM(path)
        assert llm.engine.runner.backend.name == "fused"
        said.append(logits(llm).float())
    torch.testing.assert_close(said[1], 1.003 * said[0], rtol=1e-5, atol=1e-6)

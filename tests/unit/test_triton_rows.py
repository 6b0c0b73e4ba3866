"""Norms and rotary embeddings for GPUs, run by Triton's interpreter, beside those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as interleaved
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from outrider import LLM, SamplingParams
from outrider.kernels.triton import rows
from outrider.kernels.triton.rows import NormForm, rms_norm, rotate, rotates
from outrider.model import row_kernels
from outrider.model.row_kernels import RowKernels
from tests.model import checkpoints
from tests.unit.interpreted import DEVICE, even_products

NORMS: dict[type, NormForm] = {
    LlamaRMSNorm: NormForm.ROUNDED,
    Olmo2RMSNorm: NormForm.EXACT,
    Gemma2RMSNorm: NormForm.ONE_MORE,
}
#: The interpreter cuts what a GPU rounds to bfloat16.
DTYPES = (torch.float32, torch.float16, *[torch.bfloat16] * (DEVICE.type == "cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_those_of_transformers(kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    norm = kind(200, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data = torch.randn(200).to(DEVICE, dtype)
    numbers = (5 * torch.randn(2, 7, 200)).to(DEVICE, dtype)
    with torch.inference_mode():
        want, got = norm(numbers), rms_norm(numbers, norm.weight, 1e-5, NORMS[kind])
        assert row_kernels._alike(got, want)
        assert torch.equal(rms_norm(numbers[1, 3:4], norm.weight, 1e-5, NORMS[kind]), got[1, 3:4])
        rounds = dtype is not torch.float32  # without, two of the forms are the same
        assert row_kernels._norm_form(norm) is (NORMS[kind] if rounds or kind is Gemma2RMSNorm else NormForm.ROUNDED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotations_are_those_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    query, key = (torch.randn(1, 5, heads, 24).to(DEVICE, dtype).transpose(1, 2) for heads in (6, 2))
    cos, sin = torch.randn(2, 1, 5, 24).to(DEVICE, dtype)
    assert rotates(query, key, cos, sin)
    got, want = rotate(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin)
    assert all(map(torch.equal, got, want))
    assert not rotates(query, key, cos[..., :12], sin[..., :12]), "a part of each head turns"
    assert not rotates(query, key.double(), cos, sin)


def test_other_rotations_stay_stock() -> None:
    like = torch.zeros(1, device=DEVICE)
    assert row_kernels._is_known_rotation(apply_rotary_pos_emb, like)
    assert not row_kernels._is_known_rotation(interleaved, like), "the pairs lie side by side"


@pytest.mark.by_change("src/outrider/kernels/triton/", "src/outrider/model/", "tests/unit/test_triton_rows.py")
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_passes_use_them_until_they_are_removed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass has a norm before and one behind, or more, and one rotation for each layer."""
    launched: list[str] = []
    for name in ("rms_norm", "rotate"):
        real = getattr(rows, name)
        monkeypatch.setattr(rows, name, lambda *a, _r=real, _n=name: (launched.append(_n), _r(*a))[1])
    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")
    path = checkpoints.save(family, tmp_path / family, layers=2)
    with even_products():
        llm = LLM(path, dtype="float32", device=DEVICE.type, attention_backend="paged", kv_cache_tokens=64)
        launched.clear()
        tokens = llm.generate([[3, 1, 4]], SamplingParams(temperature=0.0, max_tokens=1))[0].token_ids
    assert launched.count("rotate") == 2
    assert launched.count("rms_norm") == {"llama": 5, "gemma2": 9, "qwen3": 9}[family]
    assert tokens == checkpoints.greedy_by_transformers(path, [3, 1, 4], 1)
    model = llm.engine.runner.loaded.model
    llm.engine.runner.backend.uninstall()
    assert not any("forward" in vars(module) for module in model.modules())
    assert RowKernels(model)._replaced

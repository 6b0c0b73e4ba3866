"""The engine over the kernels for GPUs, which Triton's interpreter runs on a CPU, at tiny size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from outrider import LLM, SamplingParams
from outrider.kernels.triton import attention
from outrider.kernels.triton.attention import TritonAttention
from outrider.lab.doctor.examination import model_facts
from outrider.lab.prove.tiny import save_tiny_llama
from tests.model import checkpoints
from tests.unit.interpreted import DEVICE, even_products

PROMPTS = [[1, 5, 9, 2, 7, 7, 3, 11, 4], [3, 1, 4]]
GREEDY, SEEDED = (SamplingParams(temperature=t, seed=7, max_tokens=6, logprobs=0) for t in (0.0, 1.0))
#: A branching draft for every text.
TREE: dict[str, Any] = {"method": "token_recycling", "num_draft_tokens": 4}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Triton computes on the CPU; the list names what was launched."""
    launched: list[str] = []
    for holder, name in ((TritonAttention, "attend"), (attention, "write_rows")):
        real = getattr(holder, name)
        monkeypatch.setattr(holder, name, lambda *a, _r=real, _n=name, **k: (launched.append(_n), _r(*a, **k))[1])
    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")
    with even_products():
        yield launched


def load(path: str, **how: Any) -> LLM:
    settings = {"dtype": "float32", "attention_backend": "paged", "block_size": 4, "kv_cache_tokens": 64}
    return LLM(path, **{**settings, "device": DEVICE.type, **how})


def test_texts_are_those_of_stock_attention(
    tmp_path: Path, interpreted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_llama(tmp_path / "llama", seed=1, vocab_size=13)
    llm = load(path)
    texts = llm.generate(PROMPTS, GREEDY, speculation=TREE)
    assert {"attend", "write_rows"} == set(interpreted)
    assert model_facts(llm.engine.runner).kernels == "triton"
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    stock = load(path)
    assert model_facts(stock.engine.runner).kernels is None
    for got, want in zip(texts, stock.generate(PROMPTS, GREEDY), strict=True):
        assert got.token_ids == want.token_ids
        for here, there in zip(got.logprobs, want.logprobs, strict=True):
            assert {t: each.logprob for t, each in here.items()} == pytest.approx(
                {t: each.logprob for t, each in there.items()}, abs=1e-4
            )


@pytest.mark.by_change("src/outrider/kernels/triton/", "src/outrider/model/", "tests/model/test_triton_backend.py")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU refuses this mode")
def test_bits_and_so_seeds_hold_in_batch_invariant_mode(tmp_path: Path, interpreted: list[str]) -> None:
    """The load compares bits of whole passes with those of chunks, neighbours and trees; then seeded texts are equal."""
    path = save_tiny_llama(tmp_path / "llama", seed=1, vocab_size=13)
    llm = load(path, attention_backend="auto", batch_invariant=True)
    assert llm.engine.runner.backend.name == "row_by_row"
    plain, drafted = (llm.generate(PROMPTS, SEEDED, speculation=how) for how in (None, TREE))
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert "attend" in interpreted


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_windows_caps_and_sinks_pass_the_probe(family: str, tmp_path: Path, interpreted: list[str]) -> None:
    load(checkpoints.save(family, tmp_path / family, layers=2))
    assert "attend" in interpreted

"""Weight-only int8: the rounded model is the target, and speculation is lossless against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig, Suffix
from outrider.embedded import default_model
from outrider.errors import InvalidParameterError
from outrider.model.batch import Segment
from tests.model import checkpoints

TEXT = [(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(23)]


def logits(llm: LLM) -> torch.Tensor:
    runner = llm.engine.runner
    return runner.forward([Segment(TEXT, 0, runner.blocks.allocate(8))]).logits


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt_neox", "mixtral", "gpt_oss"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save(request.param, tmp_path_factory.mktemp("int8") / request.param, seed=2)


def test_kernels_compute_the_rounded_model(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "quantization": "int8"}
    fast = logits(LLM(path, **settings))
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    torch.testing.assert_close(fast, logits(LLM(path, **settings)), rtol=1e-4, atol=1e-4)
    whole = logits(LLM(path, dtype="float32"))
    assert 1e-4 < _distance(fast, whole) < 0.1, "rounded, and not by much"


@pytest.mark.parametrize(("dtype", "most"), [("float64", 1e-4), ("bfloat16", 0.1)])  # rounded once, or twice
def test_other_types_hold_the_rounded_weights(path: str, dtype: Any, most: float) -> None:
    rounded, near = (logits(LLM(path, dtype=d, quantization="int8")) for d in (dtype, "float32"))
    assert _distance(rounded, near) < most


def _distance(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Of most rows. Where a router is nearly undecided, what is rounded may send a row to another expert."""
    return float((logits - others).abs().amax(-1).median() / others.abs().max())


def test_speculation_writes_what_the_rounded_model_writes() -> None:
    llm = LLM(quantization="int8", dtype="bfloat16", batch_invariant=True, max_num_seqs=4)
    prompts = ["class Reader:\n    def ", "import os\n\n\ndef ", "for i in range(10):\n"]
    params = [SamplingParams(seed=seed, max_tokens=24, temperature=seed % 2) for seed in range(3)]
    want = [o.token_ids for o in llm.generate(prompts, params, speculation="none")]
    for way in (
        SpeculationConfig(method=DraftModel(model=default_model("draft")), num_draft_tokens=4),
        SpeculationConfig(method=Suffix(min_match=1)),
    ):
        assert [o.token_ids for o in llm.generate(prompts, params, speculation=way)] == want


def test_an_unknown_rounding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="quantization"):
        LLM(quantization="int3")  # type: ignore[arg-type]

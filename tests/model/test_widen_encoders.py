"""The wide copy of a T5 computes what its source computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.widen import widen
from tests.model import encoders

SOURCE = [(7 * i * i + 3 * i) % encoders.VOCAB_SIZE for i in range(23)]
TEXT = [(5 * i * i + i) % encoders.VOCAB_SIZE for i in range(31)]
GATED: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False, "tie_word_embeddings": False}


@pytest.mark.parametrize("changes", [{}, GATED])
def test_a_wide_copy_computes_the_same_function(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also behind the last bucket of its biases."""
    source = encoders.save(tmp_path / "narrow", **changes)
    size = widen(source, str(tmp_path / "wide"), 2, 4, torch.float64)
    want, got = (encoders.stock_logprobs(path, SOURCE, TEXT) for path in (source, str(tmp_path / "wide")))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max(), "weights are rounded to float32 on their way"
    from transformers import AutoModelForSeq2SeqLM

    assert size > 4 * AutoModelForSeq2SeqLM.from_pretrained(source).num_parameters()

"""The wide copy of a Qwen3.5 computes what its source computes, and so does its layer that predicts several tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import LLM
from outrider import widen as module
from outrider.lab.prove.tiny_heads import save_random_mtp
from outrider.widen import widen
from tests.model import checkpoints
from tests.model.test_target import Oracle
from tests.model.test_widen_heads import drafts

FACTOR, FFN = 2, 4
TEXT = [(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(23)]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two values for each key of its delta rules, and an output layer that is the embeddings."""
    folder = tmp_path_factory.mktemp("narrow")
    path = checkpoints.save("qwen3_5_text", folder, tie_word_embeddings=True)
    return save_random_mtp(folder, path, "qwen3_next", scale=0.15)


@pytest.fixture(scope="module")
def wide(narrow: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return widened(narrow, tmp_path_factory.mktemp("wide"))


def widened(narrow: str, folder: Path) -> str:
    widen(narrow, str(folder), FACTOR, FFN, torch.float64)
    return str(folder)


def test_a_wide_copy_computes_the_same_function(narrow: str, wide: str) -> None:
    source, copy = Oracle(narrow), Oracle(wide)
    want = source.logits(TEXT)
    difference = (copy.logits(TEXT) - want).abs().max()
    assert difference <= 2e-4 * want.abs().max(), "weights are rounded to float32 on their way"
    counts = [sum(p.numel() for p in each.model.parameters()) for each in (source, copy)]
    assert counts[1] > 3 * counts[0]


def test_its_layer_drafts_alike(narrow: str, wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, found = (
        drafts(LLM(folder, dtype="float64", speculation="none"), "mtp", None, monkeypatch, [TEXT, TEXT[:9]])
        for folder in (narrow, wide)
    )
    assert len({draft for draft in want if draft}) > 5, "otherwise the comparison would say nothing"
    assert found == want


def test_control_queries_that_are_taken_for_keys_are_seen(
    narrow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All channels of a delta rule in one block, so that the copies of queries lie where keys are read."""
    monkeypatch.setattr(module, "_block_rows", lambda _: (64,))
    want = Oracle(narrow).logits(TEXT)
    difference = (Oracle(widened(narrow, tmp_path)).logits(TEXT) - want).abs().max()
    assert difference > 1e-2 * want.abs().max()

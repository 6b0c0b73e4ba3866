"""The joint distribution of texts of a model with an encoder, with a control that must turn red."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.cache.state import SourceState
from outrider.kernels.decoder import PassRows
from outrider.lab.prove.engine import BOUND, EngineProof
from outrider.lab.prove.target_settings import ENCODER_SETTINGS
from outrider.lab.prove.tiny import save_tiny_t5
from outrider.model import fused
from outrider.model.context import ForwardContext, SeenPart

BY_NAME = {setting.name: setting for setting in ENCODER_SETTINGS}


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProof]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    folder: Path = tmp_path_factory.mktemp("encoder")
    yield EngineProof(save_tiny_t5(folder / "target", 1), save_tiny_t5(folder / "draft", 2))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", BY_NAME)
def test_joint_distribution(proof: EngineProof, name: str) -> None:
    proof.llm.stats.reset()
    assert proof.prove(BY_NAME[name], 3).measured <= BOUND
    stats = proof.llm.stats.finished
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_proposer_faults == 0


def test_control(proof: EngineProof, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows get the bias of the first distance, or see no more than the first token of a source where our kernels run."""
    stock, stock_rows = ForwardContext._biased, fused.source_rows

    def wrong(context: ForwardContext, index: int, part: SeenPart, bias: torch.Tensor) -> SeenPart:
        return stock(context, index, part, bias[:, :1])

    def wrong_rows(rows: PassRows, sources: Sequence[SourceState]) -> PassRows:
        found = stock_rows(rows, sources)
        return replace(found, start=[1] * len(found.start), positions=[0] * len(found.positions))

    monkeypatch.setattr(ForwardContext, "_biased", wrong)
    monkeypatch.setattr(fused, "source_rows", wrong_rows)
    assert proof.prove(BY_NAME["encoder, tree, traversal"], 3).measured > 1e-4

"""What the trainings of the tests share: a target whose texts are known, and its texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.train.markov import save_data, save_markov_target


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products of a few numbers wait for other threads longer than they take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_markov_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_data(tmp_path_factory.mktemp("data"), target)

"""Fixtures of the tests that spoil a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.model import checkpoints


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers; nobody writes to it."""
    return Path(checkpoints.save("llama", tmp_path_factory.mktemp("sound"), layers=2))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    shutil.copytree(sound, tmp_path / "model")
    return tmp_path / "model"

"""Checks that a bug in running states must turn red: joint distributions of a tiny model that has them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from outrider.prove.engine_distribution import BOUND, EngineProof
from outrider.prove.settings.running import RUNNING_SETTINGS
from outrider.prove.tiny import save_tiny_hybrid


def running_chain() -> None:
    """Chains of a draft model that has states too."""
    _proven("running state, chain")


def running_tree() -> None:
    """Trees, of which a path is kept."""
    _proven("running state, tree, traversal")


@cache
def _proof() -> EngineProof:
    folder = Path(tempfile.mkdtemp())
    return EngineProof(save_tiny_hybrid(folder / "target", 1), save_tiny_hybrid(folder / "draft", 2))


def _proven(name: str) -> None:
    (setting,) = (each for each in RUNNING_SETTINGS if each.name == name)
    assert _proof().prove(setting, 3).measured <= BOUND

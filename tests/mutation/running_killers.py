"""Checks that a bug in running states must turn red: joint distributions of a tiny model that has them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.prove.cache_truth import CacheAudit
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


def running_prefixes() -> None:
    """Texts that begin with what others have left, and go on from it more than once."""
    llm = LLM(save_tiny_hybrid(Path(tempfile.mkdtemp()) / "target", 1), dtype="float64", block_size=2)
    audit = CacheAudit(llm.engine)
    for prompt in [(0, 1, 2, 2, 1, 0, 1, 1, 2)] * 3 + [(0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 0, 1)]:
        request = llm.engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=4), llm.resolve("none"))
        audit.run()
        assert request.error is None
    assert llm.stats.finished.num_cached_tokens == 3 * 8
    assert audit.worst <= 1e-9


def _proven(name: str) -> None:
    (setting,) = (each for each in RUNNING_SETTINGS if each.name == name)
    assert _proof().prove(setting, 3).measured <= BOUND

"""Checks that a bug in running states must turn red: joint distributions of a tiny model that has them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.lab.prove.engine import BOUND, EngineProof
from outrider.lab.prove.own_model import CacheAudit
from outrider.lab.prove.target_settings import RUNNING_SETTINGS
from outrider.lab.prove.tiny import save_tiny_hybrid


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


def running_prefixes_of_layers_ahead() -> None:
    """Texts go on behind kept states, drafted for by layers that keep keys, values and a feature beside them."""
    from tests.model import test_hybrid_heads
    from tests.model.double import Double

    with pytest.MonkeyPatch.context() as patch, Double():
        test_hybrid_heads.test_texts_that_begin_with_kept_states_are_drafted_for_at_once(Path(tempfile.mkdtemp()), patch)


def kernels_running() -> None:
    """Texts that are read together in passes of the kernels, drafts for them, and what they leave to others."""
    from outrider.model import memory
    from tests.model import test_kept_states, test_running_states

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "STATE_SPACING", 8)
        path = test_running_states.saved("qwen3_next", Path(tempfile.mkdtemp()))
        llm = test_running_states.load(path, draft_model=path, kv_cache_tokens=80, state_cache_mib=1)
    assert llm.engine.runner.backend.name == "fused", "the probe of the load has refused them"
    test_kept_states.test_texts_that_are_read_together_leave_states_of_their_own(llm)
    audit, errors = test_running_states.audited(llm, 3)
    assert not errors
    assert audit.worst == 0


def kernels_running_failure() -> None:
    """A pass of the kernels that fails when all is computed."""
    from tests.model import test_running_states

    with pytest.MonkeyPatch.context() as patch:
        test_running_states.test_a_pass_that_fails_leaves_the_states_as_they_were(
            "qwen3_next", Path(tempfile.mkdtemp()), patch
        )


def _proven(name: str) -> None:
    (setting,) = (each for each in RUNNING_SETTINGS if each.name == name)
    assert _proof().prove(setting, 3).measured <= BOUND

"""Checks that a bug in heads that draft whole blocks must turn red."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from outrider import LLM, Ngram, SpeculationConfig
from outrider.engine.drafting.planning import as_requested
from outrider.lab.prove.tiny_heads import save_random_dflash
from outrider.propose import parallel
from outrider.propose.trees import growth
from tests.model import checkpoints, test_block_heads, test_gemma_heads

_NAMES = ("z-lab", "z-lab, windows")


def blocks_make_the_drafts() -> None:
    """Every row of every draft is what the reference says, behind rejected drafts and behind drafts of a lookup."""
    made, llm = _made(), _llm()
    params = test_block_heads.GREEDY.replace(max_tokens=10)
    for name in _NAMES:
        llm.engine.drafting.planner = as_requested
        with pytest.MonkeyPatch.context() as patch:
            watch = test_block_heads.watched(made, name, patch)
            outputs = llm.generate(test_block_heads.PROMPTS[:2], params, speculation=made.way(name))
            behind = (SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=1), made.way(name))
            llm.engine.drafting.planner = lambda seq, behind=behind: behind  # type: ignore[misc]
            outputs += llm.generate(test_block_heads.PROMPTS[:1], params, speculation=made.way(name))
        assert test_block_heads.faults(outputs) == 0
        assert watch.num_rows > 5
        assert watch.worst <= test_block_heads.BOUND


def gemma_layers_are_those_of_transformers() -> None:
    """Every row of a draft is what layers of Gemma 4 say under transformers."""
    made = test_gemma_heads.make(Path(tempfile.mkdtemp()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "add_level", lambda *args: growth.add_level(*args))
        test_gemma_heads.check_logits(made, "keys as values", "float64", patch)


@cache
def _made() -> test_block_heads.Made:
    folder = Path(tempfile.mkdtemp())
    path = checkpoints.save("llama", folder / "target", seed=3, layers=test_block_heads.LAYERS)
    heads = {name: save_random_dflash(folder / name, path, scale=0.1, **test_block_heads.HEADS[name]) for name in _NAMES}
    return test_block_heads.Made(path, test_block_heads.Oracle(path), heads)


@cache
def _llm() -> LLM:
    return test_block_heads.load(_made())

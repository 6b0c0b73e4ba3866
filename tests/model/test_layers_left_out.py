"""How much of a draft stands where the layers that are left out count for nothing, or for next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import SamplingParams, SpeculationConfig
from outrider.draft import Draft
from outrider.propose.own_layers import EarlyExit, LayerSkip
from outrider.propose.settings import Method
from outrider.results import RoundTrace
from tests.model import checkpoints
from tests.model.core import core, in_turn
from tests.model.test_shared_layers import BACKENDS, EXIT, GREEDY, LENGTH, PROMPTS, SKIP, TREE, load


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def scaled(folder: Path, layers: Sequence[int], factor: float) -> str:
    """A checkpoint in which both residual branches of some layers count only `factor` times; returns its path."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints.save("llama", folder / "whole", seed=5), dtype=torch.float64)
    with torch.no_grad():
        for layer in layers:
            model.model.layers[layer].self_attn.o_proj.weight *= factor
            model.model.layers[layer].mlp.down_proj.weight *= factor
    model.save_pretrained(folder / "scaled")
    return str(folder / "scaled")


#: The layers whose branches hardly count, and the method that drafts without them.
WITHOUT = {"early exit": ((2, 3), EarlyExit(layers=2)), "layer skip": ((1, 3), LayerSkip(skip=(1, 3)))}


@pytest.fixture(scope="module")
def easy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Method, float]:
    who, factor = request.param
    layers, method = WITHOUT[who]
    return scaled(tmp_path_factory.mktemp("easy"), layers, factor), method, factor


def rounds_of(outputs: Sequence[Any]) -> list[list[RoundTrace]]:
    return [list(o.rounds or ()) for out in outputs for o in out.outputs]


def full(found: Sequence[RoundTrace]) -> list[RoundTrace]:
    """The rounds with a draft of the whole length: neither max_tokens nor the memory has cut it."""
    return [r for r in found if len(Draft(r.token_ids, r.parents).paths) and Draft(r.token_ids, r.parents).depth == LENGTH]


EASY = [(who, factor) for who in WITHOUT for factor in (0.0, 1e-3)]
SHAPES = [(), TREE]
#: All on one backend, and on the others each once.
FEW = [*product(EASY, BACKENDS[:1], SHAPES), *in_turn(EASY, BACKENDS[1:], SHAPES)]


@pytest.mark.parametrize(
    ("easy", "backend", "tree"), core(product(EASY, BACKENDS, SHAPES), FEW), indirect=["easy", "backend"], ids=str
)
def test_what_hardly_counts_is_left_out_at_no_loss(
    easy: tuple[str, Method, float], backend: str, tree: tuple[int, ...]
) -> None:
    path, method, factor = easy
    llm = load(path, backend, kv_cache_tokens=96)
    shape: dict[str, Any] = {"tree": tree} if tree else {"num_draft_tokens": LENGTH}
    speculation = SpeculationConfig(method=method, **shape)
    params = SamplingParams(temperature=0, max_tokens=26)
    alone = rounds_of(llm.generate(PROMPTS[0], params, speculation=speculation, trace=True))[0]
    assert len(full(alone)) >= 5
    assert all(len(r.token_ids) > 0 for r in alone[1:-1]), "it drafts in every round but that of the prompt"
    llm.stats.reset()
    again = llm.generate([*PROMPTS, *PROMPTS], params, speculation=speculation, trace=True)
    stats = llm.stats.finished
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert stats.num_proposer_faults == 0
    texts = [alone, *rounds_of(again)]
    lengths = [len(r.accepted) + 1 for found in texts for r in full(found)]
    assert len(lengths) > 15
    if factor == 0.0:
        assert set(lengths) == {LENGTH + 1}
        assert all(len(r.accepted) == Draft(r.token_ids, r.parents).depth for found in texts for r in found), "cut ones too"
    assert sum(lengths) / len(lengths) >= 0.95 * (LENGTH + 1)


def test_without_these_layers_a_usual_model_says_something_else(tmp_path: Path) -> None:
    """The control: on a model that needs its deep layers, the same drafts are mostly refused."""
    llm = load(checkpoints.save("llama", tmp_path, seed=5), "fused")
    for speculation in (EXIT, SKIP):
        found = rounds_of(llm.generate(PROMPTS, GREEDY, speculation=speculation, trace=True))
        lengths = [len(r.accepted) + 1 for rounds in found for r in full(rounds)]
        assert sum(lengths) / len(lengths) < 0.6 * (LENGTH + 1)


@pytest.mark.parametrize("second", [{"num_draft_tokens": 3}, {"tree": (2, 1, 1)}], ids=["chain", "tree"])
def test_all_stands_of_what_is_drafted_behind_another_draft(tmp_path: Path, second: dict[str, Any]) -> None:
    """So the rows behind `request.path` stand where they should, and see it."""
    llm = load(scaled(tmp_path, (1, 2, 3), 0.0), "fused")
    turns = (
        SpeculationConfig(method=EarlyExit(layers=1), num_draft_tokens=2),
        SpeculationConfig(method=LayerSkip(skip=(2,)), **second),
    )
    llm.engine.drafting.planner = lambda seq: turns
    params = SamplingParams(temperature=0, max_tokens=40)
    found = rounds_of(llm.generate(PROMPTS, params, speculation="none", trace=True))
    for rounds in found:
        lengths = [len(r.accepted) for r in rounds if len(r.drafted_by) == 2 and r.token_ids]
        assert lengths[:-1] == [5] * (len(lengths) - 1)
        assert len(lengths) >= 5

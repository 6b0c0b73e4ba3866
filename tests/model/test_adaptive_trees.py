"""Trees that adapt in the real engine: what they measure, whose they are, and that nobody else notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.draft import Draft
from outrider.model.memory import SIZES, measure_passes
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.settings import Method, ProposerContext
from outrider.propose.trees.growth import Growth, add_level
from tests.model import checkpoints


@dataclass
class FlatProposer(Proposer):
    """A dataclass that compares by value, and so has no hash."""

    vocab_size: int

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growths = [Growth.of(request, request.budget, request.max_depth) for request in requests]
        while alive := [growth for growth in growths if growth.growing]:
            add_level(alive, torch.zeros(sum(len(growth.level) for growth in alive), self.vocab_size), noise)
        return [growth.draft() for growth in growths]


class Flat(Method):
    name: ClassVar[str] = "flat_of_the_tests"

    def build(self, context: ProposerContext) -> Proposer:
        return FlatProposer(context.target.vocab_size)


@pytest.mark.parametrize("tree", ["best_first", "sequoia"])
def test_a_proposer_of_any_class_has_trees_that_learn(tree: Any) -> None:
    llm = LLM()
    config = SpeculationConfig(method=Flat(), tree=tree)
    output = llm.generate("a", SamplingParams(max_tokens=12), speculation=config)[0]
    assert output.stats.num_proposer_faults == 0
    assert llm.proposers.get(Flat()) is llm.proposers.get(Flat())
    assert set(llm.engine.proposers.find(Flat()).trees) == {tree}


def test_passes_are_measured_apart_from_the_texts() -> None:
    llm = LLM(kv_cache_tokens=64, block_size=8)
    prompt = list(range(5, 45))
    llm.generate([prompt], SamplingParams(max_tokens=2))
    config = SpeculationConfig(method="draft_model", tree="best_first")
    output = llm.generate([prompt], SamplingParams(max_tokens=2), speculation=config)[0]
    assert output.stats.num_cached_tokens >= 32, "the prefix cache is as it was"
    llm.engine.check_integrity()


def test_a_model_with_two_sets_of_rotary_factors_is_measured_with_the_right_one(tmp_path: Path) -> None:
    llm = LLM(checkpoints.save("longrope", tmp_path, seed=1), dtype="float32")
    measured = measure_passes(llm.engine.runner)
    assert set(measured) <= set(SIZES)
    assert 1 in measured
    assert all(seconds > 0 for seconds in measured.values())

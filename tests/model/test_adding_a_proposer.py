"""The proposer of docs/adding_a_proposer.md, run as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.propose import registry

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_proposer.md"
PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Names defined by the page's first code block, which is one complete proposer."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


@pytest.fixture(scope="module")
def llm(page: dict[str, Any]) -> Iterator[LLM]:
    registry.register("bigram", page["bigram"])
    yield LLM(dtype="float64", speculation=SpeculationConfig(proposer="bigram", num_draft_tokens=4))
    del registry._factories["bigram"]


def test_it_is_about_fifty_lines(page: dict[str, Any]) -> None:
    block = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    assert len(block[1].splitlines()) <= 55


def test_its_drafts_are_accepted(llm: LLM) -> None:
    stats = llm.generate(PROMPT, SamplingParams(temperature=0.7, max_tokens=60))[0].stats
    assert stats.num_accepted_tokens > 0
    assert stats.num_proposer_faults == 0


@pytest.mark.parametrize("params", [SamplingParams(temperature=0, max_tokens=40), SamplingParams(seed=5, max_tokens=40)])
def test_it_changes_no_token(llm: LLM, params: SamplingParams) -> None:
    drafted = llm.generate(PROMPT, params)[0]
    assert drafted.stats.num_drafts > 0
    assert drafted.token_ids == llm.generate(PROMPT, params, speculation="none")[0].token_ids


def test_its_state_ends_with_the_request(llm: LLM) -> None:
    llm.generate(PROMPT, SamplingParams(max_tokens=5))
    proposer = llm.proposers.get(llm.speculation)
    assert proposer is not None
    assert not proposer.counts  # type: ignore[attr-defined]

"""The proposer of docs/how-to/write_a_proposer.md, run as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.lab.prove.running import Check
from outrider.lab.prove.suite import UNASKED, method_settings, num_method_checks, run_method_suite
from outrider.propose import settings

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write_a_proposer.md"
ASKED = {"method": "bigram", "shared": True}
PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"


def first_block() -> str:
    block = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    return block[1]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Names defined by the page's first code block, which is one complete method."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(first_block(), names)
    return names


@pytest.fixture(scope="module")
def bigram(page: dict[str, Any]) -> Iterator[Any]:
    yield settings.register(page["Bigram"])
    del settings._registered["bigram"]


@pytest.fixture(scope="module")
def llm(bigram: Any) -> LLM:
    return LLM(dtype="float64", speculation=SpeculationConfig(method=bigram(shared=True), num_draft_tokens=4))


def test_it_is_short() -> None:
    assert len(first_block().splitlines()) <= 75


@pytest.mark.parametrize("tree", [(), (3, 2)])
def test_its_drafts_are_accepted(llm: LLM, bigram: Any, tree: tuple[int, ...]) -> None:
    how = {"tree": tree} if tree else {"num_draft_tokens": 4}
    config = SpeculationConfig(method=bigram(), **how)
    params = SamplingParams(temperature=0.7, max_tokens=60)
    stats = llm.generate(PROMPT, params, speculation=config)[0].stats
    assert stats.num_accepted_tokens > 0
    assert stats.num_proposer_faults == 0


@pytest.mark.parametrize("params", [SamplingParams(temperature=0, max_tokens=40), SamplingParams(seed=5, max_tokens=40)])
def test_it_changes_no_token(llm: LLM, params: SamplingParams) -> None:
    drafted = llm.generate(PROMPT, params)[0]
    assert drafted.stats.num_drafts > 0
    assert drafted.token_ids == llm.generate(PROMPT, params, speculation="none")[0].token_ids


def test_samples_fork_and_state_ends_with_the_request(llm: LLM) -> None:
    outputs = llm.generate(PROMPT, SamplingParams(n=3, max_tokens=12))[0].outputs
    assert sum(output.stats.num_proposer_faults for output in outputs) == 0
    method = llm.speculation.method
    assert method is not None
    proposer: Any = llm.proposers.get(method)
    assert not proposer.own
    assert proposer.earlier[None]


def test_namespaces_are_kept_apart(llm: LLM) -> None:
    method = llm.speculation.method
    assert method is not None
    proposer: Any = llm.proposers.get(method)
    before = dict(proposer.earlier[None])
    llm.generate(PROMPT, SamplingParams(max_tokens=5), namespace="somebody")
    assert proposer.earlier[None] == before
    assert proposer.earlier["somebody"]


def test_the_page_states_how_many_checks_there_are(bigram: Any) -> None:
    assert f"all {num_method_checks(ASKED)} checks hold (joints of " in PAGE.read_text("utf-8")


def test_the_page_of_losslessness_lists_what_is_asked(bigram: Any) -> None:
    page = (PAGE.parents[1] / "explanation" / "losslessness.md").read_text("utf-8")
    table = page.split("## What the proof of a method asks")[1].split("##")[0]
    drafted = {"method": "draft_model", "model": "any"}
    names = {setting.name for asked in (ASKED, drafted, {**drafted, "tree": (2,)}) for setting in method_settings(asked)}
    assert [name for name in (*sorted(names), *UNASKED) if name not in table] == []


@pytest.mark.by_change(
    "src/outrider/lab/prove/", "docs/how-to/write_a_proposer.md", "tests/model/test_adding_a_proposer.py"
)
def test_some_of_its_checks_hold(bigram: Any) -> None:
    report = run_method_suite(ASKED, quick=True)
    assert report.passed, [check for check in report.checks if not check.passed]


@pytest.mark.slow
def test_the_page_states_its_proof(bigram: Any) -> None:
    report = run_method_suite(ASKED)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert f"all {len(report.checks)} checks hold ({report.horizon})" in PAGE.read_text("utf-8")


def test_the_proof_sees_a_law_that_is_not_true(bigram: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's proposer, claiming other probabilities than it drew from."""
    from dataclasses import replace

    from outrider.propose.trees.growth import Growth

    stock = Growth.draft

    def lying(self: Growth) -> Any:
        draft = stock(self)
        if draft.draft_probs is None:
            return draft
        blurred = draft.draft_probs * 0.5 + 0.5 / draft.draft_probs.shape[-1]
        return replace(draft, draft_probs=blurred)

    class First(Exception):
        """The first check is over, and the others are not waited for."""

    found: list[Check] = []

    def stop(check: Check) -> None:
        found.append(check)
        raise First

    monkeypatch.setattr(Growth, "draft", lying)
    with pytest.raises(First):
        run_method_suite({"method": "bigram"}, quick=True, on_check=stop)
    assert not found[0].passed
    assert "faults" in found[0].finding.detail
    assert found[0].finding.measured < 1e-12, "the engine takes the probabilities of the draws, and the text is right"

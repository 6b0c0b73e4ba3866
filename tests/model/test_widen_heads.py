"""Heads that are carried over to the wide copy of their target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import default_model
from outrider.engine.drafting import drafting
from outrider.errors import UnsupportedModelError
from outrider.heads.checkpoint import load_heads, save_heads
from outrider.heads.formats.published import read_head
from outrider.lab.measure import widen_heads as module
from outrider.lab.measure.widen_heads import wide_heads, widen_heads, widen_published
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle, save_random_heads
from outrider.widen import widen

pytestmark = pytest.mark.by_change(
    *("src/outrider/lab/measure/widen_heads.py", "src/outrider/widen.py", "src/outrider/heads/"),
    "tests/model/test_widen_heads.py",
)
PROMPTS = ["def main(", "The little dog"]
FACTOR = 2
#: Tokens that a head drafts: some of each kind.
DRAFTED = tuple(range(0, 4096, 3))
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "medusa, reduced": ("medusa", {"width": 100, "blocks": 2}),
    "medusa, inner layer": ("medusa", {"layer": 4, "normed": False}),
    "medusa, target's output": ("medusa", {"output": "target"}),
    "blockwise": ("blockwise", {"inner": 50}),
    "exit": ("exit", {}),
    "exit, target's norm and output": ("exit", {"layer": 5, "normed": True, "output": "target"}),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    """The embedded target and its wide copy."""
    folder = str(tmp_path_factory.mktemp("wide"))
    widen(default_model("target"), folder, FACTOR, 2, torch.float32)
    how: dict[str, Any] = {"dtype": "float64", "speculation": "none"}
    return LLM(default_model("target"), **how), LLM(folder, **how)


def drafts(
    llm: LLM, method: str, folder: str | None, patch: pytest.MonkeyPatch, prompts: Sequence[Any] = PROMPTS
) -> list[tuple[int, ...]]:
    """Every draft of some greedy texts, and the texts."""
    found, stock = list[tuple[int, ...]](), drafting.propose_all

    def watched(*args: Any) -> Any:
        steps = stock(*args)
        found.extend(step.draft.token_ids for step in steps)
        return steps

    with patch.context() as inner:
        inner.setattr(drafting, "propose_all", watched)
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = llm.generate(prompts, params, speculation={"method": method, "model": folder, "num_draft_tokens": 3})
    assert all(output.stats.num_proposer_faults == 0 for output in outputs)
    return [*found, *(output.token_ids for output in outputs)]


PUBLISHED: dict[str, tuple[str, Any]] = {
    "eagle3": ("eagle3", lambda folder, target: save_random_eagle(folder, target, "speculators", draft_tokens=DRAFTED)),
    "eagle3, target's output": (
        "eagle3",
        lambda folder, target: save_random_eagle(folder, target, "speculators", own_output=False, fc_norm=True),
    ),
    "dflash": ("dflash", save_random_dflash),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_heads_draft_alike(
    pair: tuple[LLM, LLM], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, save = PUBLISHED[name]
    source = default_model("target")
    narrow = save(tmp_path / "narrow", source)
    widen_published(source, narrow, str(tmp_path / "wide"), FACTOR)
    want = drafts(pair[0], method, narrow, monkeypatch)
    assert len({draft for draft in want if draft}) > 5, "otherwise the comparison would say nothing"
    assert drafts(pair[1], method, str(tmp_path / "wide"), monkeypatch) == want


def test_a_first_eagle_is_not_carried_over(tmp_path: Path) -> None:
    head = save_random_eagle(tmp_path / "head", default_model("target"), "safeailab1")
    with pytest.raises(UnsupportedModelError, match="heads of eagle1 continue the final states"):
        wide_heads(head)


@pytest.mark.parametrize("name", HEADS)
def test_both_draft_alike(pair: tuple[LLM, LLM], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, changes = HEADS[name]
    source = default_model("target")
    narrow = save_random_heads(tmp_path / "narrow", source, method, scale=0.05, **changes)
    widen_heads(source, narrow, str(tmp_path / "wide"), FACTOR)
    want = drafts(pair[0], method, narrow, monkeypatch)
    assert len({draft for draft in want if draft}) > 5, "otherwise the comparison would say nothing"
    assert drafts(pair[1], method, str(tmp_path / "wide"), monkeypatch) == want


def test_control_heads_that_are_not_divided_draft_otherwise(
    pair: tuple[LLM, LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = default_model("target")
    narrow = save_random_heads(tmp_path / "narrow", source, "blockwise", scale=0.05)
    widen_heads(source, narrow, str(tmp_path / "wide"), FACTOR)
    _, network, witness = load_heads(tmp_path / "wide")
    for head in range(3):
        network.get_parameter(f"downs.{head}.weight").mul_(FACTOR)
    save_heads(tmp_path / "wide", network, witness)
    want = drafts(pair[0], "blockwise", narrow, monkeypatch)
    assert drafts(pair[1], "blockwise", str(tmp_path / "wide"), monkeypatch) != want


def test_they_are_carried_over_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    narrow = save_random_heads(tmp_path / "narrow", default_model("target"), "medusa")
    folder = wide_heads(narrow)
    config = load_heads(folder).config
    assert config.target.hidden_size == 4 * load_heads(narrow).config.target.hidden_size
    head = save_random_eagle(tmp_path / "head", default_model("target"), "speculators", draft_tokens=DRAFTED)
    wide = wide_heads(head)
    assert read_head(wide).config.target_hidden_size == 4 * read_head(head).config.target_hidden_size
    for name in ("widen_heads", "widen_published"):
        monkeypatch.setattr(module, name, None)
    assert (wide_heads(narrow), wide_heads(head)) == (folder, wide)

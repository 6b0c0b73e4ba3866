"""What methods showed is kept beside the costs: for the next process, for these models alone, and never if it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.drafting import drafting
from outrider.govern import acceptance as governing
from outrider.govern.acceptance import KEPT, AcceptanceModel
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.model import keeping
from tests.model.core import core
from tests.model.test_auto import COPY, FREE, auto, steady


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return save_tiny_llama(tmp_path / "target", 1), save_tiny_llama(tmp_path / "draft", 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of what is kept. Costs are not measured, so that choices come again."""
    monkeypatch.setattr(drafting, "calibrate", lambda runner, drafts: FREE)
    monkeypatch.setattr(governing, "_SLOPE", 0.0)  # a target with random weights is sure of nothing, and both shall draft
    monkeypatch.setenv(keeping.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def opened(target: str, draft: str) -> LLM:
    llm = LLM(target, dtype="float64", speculation=auto("suffix", {"method": "draft_model", "model": draft}))
    llm.engine.drafting._choice._clock = steady
    return llm


def acceptance(llm: LLM) -> AcceptanceModel:
    return llm.engine.drafting._choice._sets.alive[0].governor.acceptance


def used(target: str, draft: str) -> None:
    """A process that wrote some texts."""
    with opened(target, draft) as llm:
        llm.generate([COPY] * 4, SamplingParams(max_tokens=80, seed=1))
        assert llm.stats.finished.num_drafts > 0


def tried(llm: LLM) -> dict[str, float]:
    return {name: acceptance(llm).learnt(name).stands.tried[0] for name in ("suffix", "draft_model")}


def test_a_later_process_begins_with_what_an_earlier_one_learnt(pair: tuple[str, str], folder: Path) -> None:
    with opened(*pair) as llm:
        assert tried(llm) == {"suffix": 0.0, "draft_model": 0.0}
    used(*pair)
    assert not list(folder.glob("*.tmp"))
    with opened(*pair) as llm:
        assert all(0.0 < drafts <= KEPT for drafts in tried(llm).values())


def test_it_holds_for_the_pair_and_the_settings_that_showed_it(pair: tuple[str, str], folder: Path, tmp_path: Path) -> None:
    used(*pair)
    other = save_tiny_llama(tmp_path / "other", 3)
    with opened(pair[0], other) as llm:
        assert tried(llm)["draft_model"] == 0.0
        assert tried(llm)["suffix"] > 0.0
    with opened(other, pair[1]) as llm:
        assert tried(llm) == {"suffix": 0.0, "draft_model": 0.0}


def test_nothing_is_kept_where_the_variable_says_so(
    pair: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keeping.VARIABLE, "off")
    used(*pair)
    assert not folder.exists()


def test_nothing_is_kept_of_scripted_costs(pair: tuple[str, str], folder: Path) -> None:
    """The proofs begin every path with a governor that has learnt nothing."""
    used(*pair)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with opened(*pair) as llm:
        llm.engine.drafting.script(FREE, steady)
        assert tried(llm) == {"suffix": 0.0, "draft_model": 0.0}
        llm.generate([COPY], SamplingParams(max_tokens=80, seed=1))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


#: Contents of a file that was kept.
DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda kept: kept.clear(),
    "no counts of what exists": lambda kept: kept["learnt"].pop("exists"),
    "a position too many": lambda kept: kept["learnt"]["stands"]["tried"].append(1.0),
    "more that stood than were tried": lambda kept: kept["learnt"]["stands"].update(stood=[1e5] * 12),
    "drafts of an age": lambda kept: kept["learnt"]["exists"].update(tried=[1e300] * 12),
    "no number": lambda kept: kept["learnt"]["stands"].update(gained=float("nan")),
    "a number in words": lambda kept: kept["learnt"]["stands"].update(gained="3"),
    "a truth for a number": lambda kept: kept["learnt"]["stands"]["stood"].__setitem__(0, True),
}


@pytest.mark.parametrize(
    "damage", core(DAMAGES, ("nothing", "a position too many", "no number"), "src/outrider/govern/", "src/outrider/engine/")
)
def test_what_cannot_be_true_is_ignored_and_written_anew(
    damage: str, pair: tuple[str, str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used(*pair)
    for path in folder.iterdir():
        kept = json.loads(path.read_text())
        DAMAGES[damage](kept)
        path.write_text(json.dumps(kept))
    with opened(*pair) as llm:
        assert caplog.text.count("it is ignored") == 2
        assert tried(llm) == {"suffix": 0.0, "draft_model": 0.0}
    used(*pair)
    with opened(*pair) as llm:
        assert all(drafts > 0.0 for drafts in tried(llm).values())


@pytest.mark.parametrize(
    "text", core(["", "{", "[]", "null", "\0" * 100], ["{", "null"], "src/outrider/govern/", "src/outrider/engine/")
)
def test_a_file_that_is_no_such_file_is_ignored(text: str, pair: tuple[str, str], folder: Path) -> None:
    used(*pair)
    for path in folder.iterdir():
        path.write_text(text)
    with opened(*pair) as llm:
        assert tried(llm) == {"suffix": 0.0, "draft_model": 0.0}

"""The demo's figures: each writer pays for its own tokens, and no speedup comes from a single pair."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from outrider.config import default_model
from outrider.lab.measure.figures import Spread
from outrider.lab.measure.writing import Run
from outrider.results import RequestStats

pytestmark = pytest.mark.by_change("examples/", "src/outrider/lab/measure/", "tests/model/test_demo.py")
DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(speed: float, drafts: RequestStats | None = None) -> Run:
    return Run((tuple(range(48)),), 48 / speed, (0.0,), 47, 47 / speed, drafts=drafts)


def shown(demo: ModuleType, plain: Sequence[Run], drafted: Sequence[Run]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(demo.closing_table(["plain decoding", "with a draft model"], plain, drafted))
    return console.export_text()


def test_one_slow_moment_does_not_make_the_speedup(demo: ModuleType) -> None:
    plain = [run(40), run(20), run(40)]  # in the second round something else was running
    drafted = [run(80, RequestStats(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=16))] * 3
    assert demo.speedups(plain, drafted) == Spread(median=2.0, low=2.0, high=4.0)
    text = shown(demo, plain, drafted)
    assert "2.00x (2.00-4.00)" in text
    assert "40.0 (20.0-40.0)" in text
    assert "2.60" in text
    assert "40%" in text


def test_each_side_of_the_race_pays_for_its_own_tokens(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of an engine goes on with all of its texts: with one engine each side would write at the other's cost."""
    writers = demo.load(default_model("target"), 3)
    passes = [0, 0]
    for place, writer in enumerate(writers):
        real = writer.llm.engine.step

        def step(place: int = place, real: object = real) -> None:
            passes[place] += 1
            real()  # type: ignore[operator]

        monkeypatch.setattr(writer.llm.engine, "step", step)
    plain, drafted = demo.race(writers)
    assert plain.num_tokens == drafted.num_tokens == demo.MAX_TOKENS
    assert passes[0] == demo.MAX_TOKENS
    assert passes[1] < demo.MAX_TOKENS


def test_rounds_alternate_and_count_drafts_on_one_side(believing: None, demo: ModuleType) -> None:
    turns: list[None] = []
    plain, drafted = demo.measure(demo.load(default_model("target"), 3), 2, lambda: turns.append(None))
    assert (len(plain), len(drafted), len(turns)) == (2, 2, 4)
    assert all(found.drafts is not None and found.drafts.num_drafts == 0 for found in plain)
    assert all(found.drafts is not None and found.drafts.num_drafts > 0 for found in drafted)
    assert {found.num_tokens for found in (*plain, *drafted)} == {demo.ROUND_TOKENS}

"""Long commands in pipes: they say how long they take, and a line tells now and then how far they are."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.errors import ContradictionError
from outrider.lab.bench.settings import BenchSettings
from outrider.lab.cli import progress as heartbeat
from outrider.lab.cli import train
from outrider.lab.cli.bench import _duration
from outrider.lab.cli.progress import shown_progress
from outrider.lab.measure import progress as pace
from outrider.lab.prove.running import Check, Finding, Report
from outrider.lab.train.checkpoint import Measurement


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that a thread does soon."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_pipe_gets_lines_and_a_terminal_a_bar(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    paper = io.StringIO()
    with shown_progress(Console(file=paper, force_terminal=terminal, width=80)) as progress:
        progress.expect("cost of passes", 7)
        progress.advance()
        progress.advance()
        if terminal:
            time.sleep(0.2)
        else:
            until(lambda: " cost of passes: 2 of 7" in paper.getvalue())
    assert (" cost of passes: 2 of 7" in paper.getvalue()) is not terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(pace, "perf_counter", lambda: now[0])
    return now


def test_the_time_that_is_left_runs_down_and_grows_with_a_turn_that_takes_long(clock: list[float]) -> None:
    steps = pace.Progress()
    steps.expect("steps", 40, 10)  # a training that goes on where it was broken off
    assert steps.left() is None
    clock[0] = 50
    steps.reach(20)  # fifty seconds for ten steps, and twenty are left
    assert steps.left() == 100
    clock[0] = 53
    assert steps.left() == 97
    clock[0] = 160  # one turn that takes as long as twenty of the others: each takes ten seconds and more
    assert steps.left() == pytest.approx(160 / 11 * 19)
    steps.reach(40)
    assert steps.left() is None


def test_turns_that_fall_away_or_come_again_change_the_time_that_is_left(clock: list[float]) -> None:
    beat = heartbeat.Heartbeat(lambda _: None)
    beat.expect("replaying", 12)
    clock[0] = 30
    for _ in range(3):
        beat.advance()
    assert beat.left() == 90
    beat.change(-6)
    assert beat.left() == 30
    beat.change(2)
    assert beat.left() == 50


def test_a_bar_in_a_terminal_says_the_time_that_is_left(clock: list[float]) -> None:
    paper = io.StringIO()
    with shown_progress(Console(file=paper, force_terminal=True, width=80)) as progress:
        progress.expect("replaying", 9)
        clock[0] = 60
        progress.advance()
        clock[0] = 61
        progress.change(-2)
    assert "1/7" in paper.getvalue()
    assert "about 5:59 left" in paper.getvalue()


def test_a_training_in_a_pipe_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    parts: list[str] = []

    def heard() -> bool:
        parts.append(capsys.readouterr().err)
        return "2 of 8" in "".join(parts)

    with train.watching(8) as watcher:
        begun = Measurement(step=0, tokens=0, seconds=0.0, loss=0.0, lr=0.1, acceptance=(0.5,), tau=1.5)
        watcher.on_measurement(begun)
        watcher.on_step(1, 2.5)
        watcher.on_step(2, 2.5)
        until(heard)
        watcher.on_measurement(begun.model_copy(update={"step": 2, "loss": 2.5}))
    heard()
    told = "".join(parts)
    assert "step 0: acceptance 0.500, tau 1.50" in told
    assert "step 2: loss 2.500, acceptance 0.500, tau 1.50" in told
    assert "loss 0.000" not in told
    assert "step 2, loss 2.500: 2 of 8, about" in told


def test_nothing_is_said_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "EVERY", 0.01)
    said: list[str] = []
    with heartbeat.Heartbeat(said.append):
        until(lambda: bool(said))
    count = len(said)
    time.sleep(0.05)
    assert count == len(said) > 0


def report(*horizons: int | None) -> Report:
    return Report(tuple(Check(f"c{i}", Finding(0.0, 0.0, "", horizon=reach), 0.1) for i, reach in enumerate(horizons)))


@pytest.mark.parametrize(("horizons", "said"), [
    ((3, None, 3), "joints of 3 tokens"), ((2, 5, 3), "joints of 2 to 5 tokens"), ((None,), ""),
])  # fmt: skip
def test_a_result_says_how_far_it_looked(horizons: tuple[int | None, ...], said: str) -> None:
    assert report(*horizons).horizon == said
    assert report(*horizons).as_dict()["horizon"] == said


def test_proofs_say_how_many_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.lab.prove.suite.run_suite", lambda *_, **__: report(3))
    found = CliRunner().invoke(app, ["prove"])
    assert "checks: some ten minutes on two cores (--quick takes less than one)" in found.stderr
    assert found.stdout.rstrip().endswith("passed: all 1 checks hold (joints of 3 tokens)")
    quick = CliRunner().invoke(app, ["prove", "--quick", "--json"])
    assert "ten minutes" not in quick.stderr
    assert quick.stdout.startswith('{"passed": true')


@pytest.mark.parametrize(("settings", "said"), [
    (BenchSettings(), "five minutes"), (BenchSettings(peers=("all",)), "ten minutes"),
    (BenchSettings(quick=True), "a minute"),
])  # fmt: skip
def test_benchmarks_say_how_long(settings: BenchSettings, said: str) -> None:
    assert said in _duration(settings)


def test_full_and_quick_contradict() -> None:
    with pytest.raises(ContradictionError, match="quick"):
        BenchSettings(full=True, quick=True)

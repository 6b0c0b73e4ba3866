"""What is believed of times of passes, and how the load of a machine is told."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.lab.measure import machine, row_costs
from outrider.lab.measure.machine import Load, LoadWatch
from outrider.lab.measure.row_costs import RowCosts
from outrider.lab.measure.writing import doubt_about_rows, possible_speedup

QUIET, BUSY, UNKNOWN = Load(0.0, 2, 2), Load(1.4, 2, 2), Load(None, 2, 2)
FLAT = {1: 20.0, 2: 19.0, 8: 19.4, 16: 20.0, 32: 30.0}  # as memory-bound passes are at rest
STEEP = {1: 20.0, 2: 22.0, 8: 30.0, 16: 40.0}
TURNED = {1: 30.0, 2: 22.0, 8: 30.0, 16: 40.0}


@pytest.mark.parametrize(("speedup", "tokens", "possible"), [
    (2.48, 1.96, False), (2.30, 1.01, False), (1.0, 1.0, True), (1.04, 1.0, True), (0.64, 1.96, True), (None, 1.0, True),
    (29.88, None, True),
])  # fmt: skip
def test_nothing_is_faster_by_more_than_its_tokens_a_pass(
    speedup: float | None, tokens: float | None, possible: bool
) -> None:
    assert possible_speedup(speedup, tokens) is possible


@pytest.mark.parametrize(("seconds", "load", "on_processor", "says"), [
    (FLAT, QUIET, True, None),
    (FLAT, UNKNOWN, True, None),
    (FLAT, BUSY, True, "16 rows seemed to cost no more than one while other work kept 1.4 of 2 cores busy"),
    (FLAT, BUSY, False, None),  # a GPU does not care, and 16 rows cost it nothing
    (STEEP, BUSY, True, None),
    (TURNED, QUIET, True, "a pass of 2 rows was faster than one of a single row"),
    (TURNED, QUIET, False, "a pass of 2 rows was faster"),
    ({8: 1.0, 16: 1.0}, BUSY, True, None),
])  # fmt: skip
def test_rows_that_cost_nothing_at_a_loaded_machine_are_not_believed(
    seconds: Mapping[int, float], load: Load, on_processor: bool, says: str | None
) -> None:
    found = doubt_about_rows(seconds, load, on_processor=on_processor)
    assert found is None if says is None else says in (found or "")


@pytest.mark.parametrize(("others", "cores", "threads", "disturbs"), [
    (0.1, 2, 2, False), (0.3, 2, 2, True), (5.0, 8, 2, False), (6.5, 8, 2, True), (None, 2, 2, False),
])  # fmt: skip
def test_other_work_disturbs_where_our_threads_must_wait(
    others: float | None, cores: int, threads: int, disturbs: bool
) -> None:
    assert Load(others, cores, threads).disturbs is disturbs


class Timer:
    """Passes whose times are made up: the first measurements of a single row are slow."""

    device = torch.device("cpu")

    def __init__(self, slow: int) -> None:
        self.calls, self._slow = 0, slow

    def compute(self, num_tokens: int) -> None:
        pass

    def seconds(self, start: int, rows: int, *, logits: bool) -> float:
        if rows > 1:
            return 2.0
        self.calls += 1
        return 9.0 if self.calls <= self._slow else 1.0


def timed(timer: Any) -> RowCosts:
    return row_costs.row_costs(timer, [8], [1, 16], 64, 3)


def test_times_that_cannot_be_true_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadWatch, "load", lambda self: QUIET)
    assert timed(calm := Timer(0)) == RowCosts({8: {1: 1.0, 16: 2.0}}, None)
    assert calm.calls == 4
    assert timed(once := Timer(4)) == RowCosts({8: {1: 1.0, 16: 2.0}}, None)
    assert once.calls == 8
    found = timed(always := Timer(100))
    assert always.calls == 12
    assert found.doubt is not None
    assert "a pass of 16 rows was faster" in found.doubt


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not tell its load")
def test_the_work_of_another_process_counts_and_ours_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both cores work for a second, one of them for us."""
    clock = iter((0.0, 1.0))
    busy, own = iter((100.0, 101.9)), iter((50.0, 50.9))
    monkeypatch.setattr(machine, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(machine, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    assert str(LoadWatch().load()) == "other work kept 1.0 of 2 cores busy"


def test_our_own_work_is_counted() -> None:
    before, end = machine._own_seconds(), time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert machine._own_seconds() - before >= 0.03


def test_processes_that_we_have_started_are_ours() -> None:
    work = "import time\nwhile time.process_time() < .2: pass\nprint(flush=True); input()"
    before = machine._own_seconds()
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        if not machine._children("self"):
            pytest.skip("this system does not list the processes that one has started")
        assert machine._own_seconds() - before > 0.15
        child.communicate(b"\n")
    assert machine._own_seconds() - before > 0.15


def test_a_system_that_does_not_tell_leaves_the_load_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_STAT", tmp_path / "none")
    assert LoadWatch().load().others is None
    assert str(LoadWatch().load()) == "the load of the machine is not known"


def test_idle_time_and_guests_do_not_count_as_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ticks = machine.os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"cpu  {3 * ticks} {ticks} {ticks} {900 * ticks} {50 * ticks} 0 0 {ticks} 77 77\n")
    monkeypatch.setattr(machine, "_STAT", tmp_path / "stat")
    assert machine._busy_seconds() == 6.0

"""What speculation is worth by calculation, against published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.lab.economics import Economics, PassCost, expected_tokens

#: Leviathan et al. 2023, table 1: acceptance, draft length, speed where a draft costs nothing.
LEVIATHAN = ((0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86))
#: The same table: acceptance, draft length, arithmetic over that of plain decoding where a draft's costs nothing.
LEVIATHAN_OPERATIONS = ((0.6, 2, 1.53), (0.7, 3, 1.58), (0.8, 2, 1.23), (0.8, 5, 1.63), (0.9, 2, 1.11), (0.9, 10, 1.60))
#: What is often said of acceptance and speed: four draft tokens of a draft that costs a twentieth.
POPULAR = ((0.5, 1.5), (0.6, 1.8), (0.7, 2.2), (0.8, 2.8), (0.9, 3.4))


@pytest.mark.parametrize(("acceptance", "length", "speed"), LEVIATHAN)
def test_the_published_speed_of_a_free_draft(acceptance: float, length: int, speed: float) -> None:
    found = Economics.of_ratio(0.0).round(acceptance, length)
    assert found.speedup == pytest.approx(speed, abs=0.0051)
    assert found.tokens == found.speedup


@pytest.mark.parametrize(("acceptance", "length", "operations"), LEVIATHAN_OPERATIONS)
def test_the_published_arithmetic(acceptance: float, length: int, operations: float) -> None:
    """Where arithmetic limits, a pass of n rows takes n times as long, and the speed is one over the table's figure."""
    bound = Economics(PassCost(0.0, 1.0), PassCost(0.0))
    assert 1.0 / bound.round(acceptance, length).speedup == pytest.approx(operations, abs=0.0051)


@pytest.mark.parametrize(("acceptance", "speedup"), POPULAR)
def test_the_popular_figures(acceptance: float, speedup: float) -> None:
    assert Economics.of_ratio(0.05).round(acceptance, 4).speedup == pytest.approx(speedup, abs=0.15)


@pytest.mark.parametrize(("acceptance", "length", "speedup"), [(0.7, 6, 2.35), (0.8, 8, 3.09), (0.9, 13, 4.67)])
def test_the_best_length(acceptance: float, length: int, speedup: float) -> None:
    best = Economics.of_ratio(0.05).best(acceptance, 32)
    assert best.num_draft_tokens == length
    assert best.speedup == pytest.approx(speedup, abs=0.0051)


def test_a_draft_pays_exactly_where_its_acceptance_is_above_its_cost() -> None:
    """Leviathan et al. 2023, corollary 3.9."""
    for cost in (0.1, 0.3, 0.6):
        assert Economics.of_ratio(cost).best(cost - 0.01, 8).num_draft_tokens == 0
        assert Economics.of_ratio(cost).best(cost + 0.01, 8).num_draft_tokens > 0


def test_positions_may_differ() -> None:
    assert expected_tokens([0.5, 0.4]) == 1.0 + 0.5 + 0.2
    assert expected_tokens([]) == 1.0
    assert expected_tokens([0.7] * 3) == pytest.approx((1 - 0.7**4) / (1 - 0.7))


def test_larger_batches_leave_less_room_for_drafts() -> None:
    target = PassCost.of(14.0, 1000.0, teraflops=100.0)  # 14 ms to read, 0.14 ms a row
    draft = PassCost.of(0.7, 1000.0, teraflops=100.0)
    economics = Economics(target, draft)
    assert economics.cost_ratio(1) == pytest.approx(0.05)
    lengths = [economics.best(0.7, 16, batch).num_draft_tokens for batch in (1, 8, 32, 64, 100)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 6
    assert lengths[-1] == 0  # a row costs what it brings and more
    assert economics.round(0.7, 4, 100).speedup < 1.0


def test_long_contexts_give_room_again() -> None:
    """The KV of a text is read once for all its rows."""
    short, long = (PassCost.of(14.0, 1000.0, teraflops=100.0, kv_gb=gb) for gb in (0.0, 1.0))
    draft = PassCost.of(0.7, 1000.0)
    assert Economics(long, draft).best(0.7, 16, 64).speedup > Economics(short, draft).best(0.7, 16, 64).speedup


def planned(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"], catch_exceptions=False)
    rows: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return rows


def test_the_command_says_the_same(tmp_path: Path) -> None:
    rows = planned("-k", "4")
    assert [row["asked_speedup"] for row in rows] == [Economics.of_ratio(0.05).round(a, 4).speedup for a, _ in POPULAR]
    sized = planned("--target-gb", "14", "--draft-gb", "0.7", "--bandwidth", "1000", "-a", "0.7", "-b", "1", "-b", "8")
    assert [(row["batch"], row["best_length"]) for row in sized] == [(1, 6), (8, 6)]
    shown = CliRunner().invoke(app, ["plan", "-a", "0.7", "-a", "0.03"]).stdout
    assert "2.35x" in shown
    assert "0 (plain)" in shown


def test_the_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    planned("-b", "1", "-b", "4", "--out", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("acceptance", ("-a", "1.0")),
        ("acceptance", ("-a", "nan")),
        ("batch", ("-b", "0")),
        ("cost_ratio", ("-c", "-1")),
        ("longest", ("--longest", "0")),
        ("num_draft_tokens", ("-k", "0")),
        ("bandwidth", ("--target-gb", "14", "--draft-gb", "1")),
        ("target_gb", ("--bandwidth", "40", "--draft-gb", "1")),
        ("draft_gb", ("--target-gb", "14", "--bandwidth", "40")),
        ("bandwidth", ("--bandwidth", "0")),
        ("kv_gb", ("--kv-gb", "-1")),
        ("host", ("--host", "nan")),
    ],
)
def test_what_cannot_be_planned(field: str, arguments: tuple[str, ...]) -> None:
    error = CliRunner().invoke(app, ["plan", *arguments]).exception
    assert isinstance(error, InvalidParameterError)
    assert error.field == field


def test_a_ratio_and_a_size_contradict() -> None:
    sizes = ("--target-gb", "14", "--draft-gb", "1", "--bandwidth", "40")
    assert isinstance(CliRunner().invoke(app, ["plan", "-c", "0.1", *sizes]).exception, ContradictionError)


def test_a_plot_without_a_kind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    error = CliRunner().invoke(app, ["plan", "--out", str(tmp_path / "plot.txt")]).exception
    assert isinstance(error, InvalidParameterError)
    assert error.field == "out"

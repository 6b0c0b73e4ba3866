"""Turns, figures and marks with contestants that are made up, and the folder that keeps results."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from rich.console import Console

from outrider.errors import EngineAnswerError, InvalidParameterError
from outrider.lab.bench import plots, report
from outrider.lab.bench.plan import Cell
from outrider.lab.bench.results import CellResult, ModelResult, PrefillResult, Results, WayResult, reads_too_fast, summarise
from outrider.lab.bench.session import Store
from outrider.lab.measure import machine
from outrider.lab.measure.figures import Spread
from outrider.lab.measure.writing import Contestant, EncodedTask, Run, interleave
from outrider.results import RequestStats

MACHINE = {
    "cpu": "made up", "instruction_set": "none", "threads": 1, "device": "cpu", "outrider": "0", "torch": "0",
    "transformers": "0", "python": "0",
}  # fmt: skip
MODEL = ModelResult(
    pass_seconds={128: {1: 0.1, 2: 0.12, 4: 0.2}, 1000: {1: 0.1, 2: 0.2, 4: 0.4}},
    prefill=[PrefillResult(start=0, rows=100, seconds=0.5, operations=10**9)],
    weight_bytes=500,
    num_parameters=250,
)
TASKS = [[EncodedTask(f"t{i}", (1, 2), 8)] for i in range(3)]


def run(
    speed: float, *, drafts: RequestStats | None = None, tokens: Sequence[int] = range(21), per_pass: float = 4.0
) -> Run:
    """A text of 21 tokens, 20 of them decoded at `speed` after a second of prompt."""
    seconds, passes = 20 / speed, 1 + round(20 / per_pass)
    return Run((tuple(tokens),), 1 + seconds, (1.0,), 20, seconds, (seconds / 20,) * 20, passes, drafts, {"forward": 1.0})


def cell(**changes: Any) -> Cell:
    fixed: dict[str, Any] = {
        "model": "m", "dtype": "float32", "workload": "json", "sampling": "greedy", "batch": 1, "num_prompts": 3,
        "max_tokens": 8, "ways": ("plain", "ngram k=3"), "tasks": "abc",
    }  # fmt: skip
    return Cell(**{**fixed, **changes})


def way(name: str, speed: float = 10.0, *, repeated: float = 0.0, **more: Any) -> WayResult:
    spread = Spread(median=speed, low=speed, high=speed)
    fixed: dict[str, Any] = {"tokens_per_second": spread, "whole_tokens_per_second": spread, "num_tokens": 8}
    return WayResult(name=name, repeated_8grams=repeated, loops=repeated > 0.1, **{**fixed, **more})


def test_turns_alternate() -> None:
    order: list[str] = []

    def writer(name: str) -> Contestant:
        def write(tasks: Sequence[EncodedTask]) -> Run:
            order.append(f"{name}{tasks[0].name}")
            return run(1.0)

        return Contestant(name, write)

    turns: list[str] = []
    runs = interleave(TASKS, [writer("A"), writer("B")], lambda contestant: turns.append(contestant.name))
    assert order == ["At0", "Bt0", "Bt1", "At1", "At2", "Bt2"]  # who is always last would be hurt by a slowing machine
    assert turns == ["A", "B", "B", "A", "A", "B"]
    assert {name: len(found) for name, found in runs.items()} == {"A": 3, "B": 3}


def test_those_who_do_not_go_on_keep_their_runs_and_the_end_may_be_early() -> None:
    contestants = [Contestant(name, lambda _: run(1.0)) for name in "AB"]
    names: list[list[str]] = [["A"], []]
    found = interleave(TASKS, contestants, who_goes_on=lambda runs: names[len(runs["A"]) - 1])
    assert {name: len(runs) for name, runs in found.items()} == {"A": 2, "B": 1}


def speeds(plain: Sequence[float], drafted: Sequence[float], *, per_pass: float) -> tuple[dict[str, list[Run]], int]:
    """The runs of two ways with these speeds, turn by turn, and how many turns they took."""
    left = {"plain": list(plain), "b": list(drafted)}
    turns: list[str] = []

    def writer(name: str) -> Contestant:
        gained = 1.0 if name == "plain" else per_pass
        return Contestant(name, lambda _: run(left[name].pop(0), per_pass=gained), plain=name == "plain")

    more: list[int] = []
    found = interleave(TASKS, [writer("plain"), writer("b")], lambda each: turns.append(each.name), on_again=more.append)
    assert len(turns) == 2 * len(TASKS) + sum(more), "who shows how far it is must know of turns that come again"
    return found, len(turns) // 2


def test_a_round_that_cannot_be_true_is_measured_again() -> None:
    """1.96 tokens a pass make nothing 2.48 times as fast."""
    runs, rounds = speeds([10, 4, 10, 10], [15, 10, 16, 17], per_pass=2.0)
    assert rounds == 4
    contestants = [Contestant("plain", lambda _: run(1), plain=True), Contestant("b", lambda _: run(1))]
    found = summarise(contestants, runs, 1, MODEL, None, 30)[1]
    assert found.speedup == Spread(median=1.6, low=1.5, high=1.7)
    assert not found.disturbed


def test_rounds_that_stay_impossible_are_not_believed() -> None:
    runs, rounds = speeds([4] * 9, [10] * 9, per_pass=2.0)
    assert rounds == 9  # each three times
    contestants = [Contestant("plain", lambda _: run(1), plain=True), Contestant("b", lambda _: run(1))]
    found = summarise(contestants, runs, 1, MODEL, None, 30)[1]
    assert found.disturbed
    assert found.speedup is None
    assert found.whole_speedup is None
    assert report.speed_row(CellResult(cell=cell(), ways=[found]), found)[2] == "disturbed"


@pytest.mark.parametrize(("most", "times"), [(2.0, 3), (2.05, 3), (2.2, 9)])
def test_a_speedup_may_reach_the_tokens_of_a_pass(most: float, times: int) -> None:
    assert speeds([10] * 9, [10 * most] * 9, per_pass=2.0)[1] == times


def test_a_peer_may_be_faster_than_its_tokens_a_pass() -> None:
    """It is measured against our plain decoding, and not against its own."""
    runs = {"plain": [run(10, per_pass=1.0)], "rival: x": [run(100, per_pass=1.0)]}
    contestants = [Contestant("plain", lambda _: run(1), plain=True), Contestant("rival: x", lambda _: run(1), "rival")]
    found = summarise(contestants, runs, 1, MODEL, None, 30)[1]
    assert found.speedup is not None
    assert found.speedup.median == 10


def test_weights_are_not_read_faster_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, contestants = {"plain": [run(100)]}, [Contestant("plain", lambda _: run(1), plain=True)]
    monkeypatch.setattr(machine, "_largest_cache", lambda: 499)
    slow, fast = 100 * 500 / 2.41, 100 * 500 / 0.9
    assert summarise(contestants, runs, 1, MODEL, slow, 30)[0].bandwidth_share is None
    assert summarise(contestants, runs, 1, MODEL, fast, 30)[0].bandwidth_share == pytest.approx(0.9)
    assert reads_too_fast(runs, 1, MODEL, slow)
    assert not reads_too_fast(runs, 1, MODEL, fast)
    assert not reads_too_fast(runs, 2, MODEL, slow)
    monkeypatch.setattr(machine, "_largest_cache", lambda: 500)  # where they stay
    assert not reads_too_fast(runs, 1, MODEL, slow)


def test_what_was_disturbed_is_not_kept(tmp_path: Path) -> None:
    found = results()
    name, kept = next(iter(found.models.items()))
    (key, first), *_ = found.cells.items()
    doubtful = first.model_copy(update={"ways": [*first.ways, way("b", disturbed=True)]})
    found.cells["doubtful"] = doubtful
    found.models["other"] = kept.model_copy(update={"doubt": "16 rows seemed to cost no more than one"})
    Store(tmp_path).save(found)
    again = Store(tmp_path).open(MACHINE)
    assert "doubtful" not in again.cells
    assert key in again.cells
    assert "other" not in again.models
    assert again.models[name] == kept
    assert any("b seemed faster than can be" in said for said in found.remarks)
    assert any("passes of other were disturbed: 16 rows" in said for said in found.remarks)


def test_a_peer_that_fails_drops_out_and_the_others_go_on() -> None:
    calls: list[str] = []

    def fail(tasks: Sequence[EncodedTask]) -> Run:
        calls.append(tasks[0].name)
        if tasks[0].name == "t1":
            raise EngineAnswerError("rival", "crashed", "None.")
        return run(1.0)

    dropped: list[str] = []
    contestants = [Contestant("plain", lambda _: run(1.0)), Contestant("rival: x", fail, "rival")]
    runs = interleave(TASKS, contestants, on_dropout=lambda c, error: dropped.append(f"{c.name}: {error.problem}"))
    assert calls == ["t0", "t1"]
    assert dropped == ["rival: x: crashed"]
    assert list(runs) == ["plain"]
    assert len(runs["plain"]) == 3
    assert [found.name for found in summarise(contestants, runs, 1, MODEL, None, 30)] == ["plain"]


def test_speedups_are_ratios_within_a_round() -> None:
    runs = {"plain": [run(10), run(100), run(1000)], "b": [run(20), run(150), run(3000)]}
    contestants = [Contestant(name, lambda _: run(1)) for name in runs]
    plain, other = summarise(contestants, runs, 1, MODEL, 1e5, 30)
    assert other.speedup == Spread(median=2.0, low=1.5, high=3.0)
    assert plain.speedup is None
    assert plain.tokens_per_second is not None
    assert plain.tokens_per_second.median == 100
    assert plain.bandwidth_share == pytest.approx(100 * 500 / 1e5)
    assert other.bandwidth_share is None
    assert other.whole_speedup is not None
    assert other.whole_speedup.low == pytest.approx((1 + 20 / 1000) / (1 + 20 / 3000))
    assert plain.time_to_first_token == Spread(median=1.0, low=1.0, high=1.0)


def test_eta_stands_beside_its_limit() -> None:
    counts = RequestStats(
        num_drafts=10, num_draft_tokens=30, num_accepted_tokens=15, drafted_per_position=[10, 10, 10],
        accepted_per_position=[10, 5, 0], tried_per_position=[10, 10],
    )  # fmt: skip
    runs = {"plain": [run(10)], "b": [run(18, drafts=counts)]}
    contestants = [Contestant(name, lambda _: run(1)) for name in runs]
    found = summarise(contestants, runs, 1, MODEL, None, 30)[1]
    assert found.tau == 2.5
    assert found.rows == 4.0
    assert found.eta == pytest.approx(1.8 / 2.5)
    assert found.eta_limit == pytest.approx(0.5)
    longer = summarise(contestants, runs, 1, MODEL, None, 900)[1]
    assert longer.eta_limit == pytest.approx(0.25)  # rows cost more behind the context that is nearest
    assert found.acceptance == 0.75
    assert found.expected_tokens == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3)
    assert summarise(contestants, runs, 8, MODEL, None, 30)[1].eta_limit is None  # nobody measured a pass of 32 rows


def test_greedy_text_that_loops_is_marked_and_nothing_else() -> None:
    looping, fine = way("ngram k=3", repeated=0.11), way("ngram k=3", repeated=0.10)

    def mark(found: WayResult, **changes: Any) -> str:
        return report.speed_row(CellResult(cell=cell(**changes), ways=[found]), found)[-1]

    assert mark(looping) == "11% loops"
    assert mark(fine) == "10%"
    assert mark(looping, sampling="T=1") == "11%"
    assert mark(fine, sampling="replay", workload="replay/x") == "10% replay"


def test_a_text_in_a_loop_is_found_by_its_tokens() -> None:
    contestants = [Contestant("plain", lambda _: run(1))]
    assert summarise(contestants, {"plain": [run(10, tokens=[3] * 21)]}, 1, MODEL, None, 30)[0].loops
    assert not summarise(contestants, {"plain": [run(10)]}, 1, MODEL, None, 30)[0].loops


def test_a_peer_shows_its_best_mode_and_its_plain_decoding() -> None:
    ways = [way("plain"), way("r: plain", 8, peer="r"), way("r: k=1", 9, peer="r"), way("r: k=2", 12, peer="r")]
    assert [found.name for found in CellResult(cell=cell(), ways=ways).shown] == ["plain", "r: plain", "r: k=2"]


def results() -> Results:
    products = {"bfloat16": 2e10, "float32": 1e10}
    found = Results(
        machine=MACHINE, products=products, models={"m, float32": MODEL}, notes=["rival did not take part: not installed"]
    )
    speedup = Spread(median=1.5, low=1.2, high=1.7)
    for batch in (1, 4):
        drafted = way("ngram k=3", 15, repeated=0.3, speedup=speedup, whole_speedup=speedup, tau=2.0,
                      acceptance_by_position=[0.5, None], tries_by_position=[30, 0])  # fmt: skip
        key = cell(batch=batch).key
        found.cells[key] = CellResult(cell=cell(batch=batch), ways=[way("plain"), drafted], dropouts=["other fell over"])
    return found


def test_pages_say_everything() -> None:
    assert [report._in_billions(peak) for peak in (4e8, 2e10, 2e12)] == ["0.4", "20", "2,000"]
    found = results()
    page = report.markdown(found, list(found.cells.values()), "outrider bench", ["speedup.png"])
    for said in (
        "30% loops",
        "1.50x (1.20-1.70)",
        "not installed",
        "other fell over",
        "`outrider bench`",
        "(speedup.png)",
        "made up",
        "n=4",
        "| m, float32 | 128 | 100 | 1.20 | 2.00 |",
        "| m, float32 | 1000 | 100 | 2.00 | 4.00 |",
        "| m, float32 | 1000 | 100 | 200 | 400 |",
        "| m, float32 | 0 | 100 | 500 | 200 | 2 | 20% |",
        "multiplies two matrices of up to 2048 x 2048 at 20 GFLOP/s in bfloat16 and 10 GFLOP/s in float32",
    ):
        assert said in page
    text = printed(found, 120)
    assert "30% loops" in text
    assert "50/-" in text


def test_workloads_stand_beside_each_other() -> None:
    found = results()
    alone = report.markdown(found, list(found.cells.values())[:1], "outrider bench")
    assert "Speedup by workload" not in alone
    cells = []
    for workload, speedup in (("qa", 1.5), ("coding", 2.0)):
        drafted = way("draft k=3", speedup=Spread(median=speedup, low=1.0, high=3.0))
        cells.append(CellResult(cell=cell(workload=workload), ways=[way("plain"), drafted, way("silent")]))
    page = report.markdown(found, cells, "outrider bench")
    assert f"## Speedup by workload: {cells[0].cell.group}" in page
    assert "| way | mean | qa | coding |" in page
    assert "| draft k=3 | 1.75 | 1.50 | 2.00 |" in page
    assert "| silent |" not in page.partition("Speedup by workload")[2].partition("##")[0]


def printed(found: Results, width: int) -> str:
    """The tables of a terminal."""
    console = Console(width=width, record=True, file=io.StringIO())
    for view in report.tables(found, list(found.cells.values()), width):
        console.print(view)
    return console.export_text()


@pytest.mark.parametrize("width", [50, 80])
def test_a_narrow_terminal_cuts_no_number_off(width: int) -> None:
    whole, narrow = printed(results(), 200), printed(results(), width)
    assert "\u2026" not in narrow
    assert max(map(len, narrow.splitlines())) <= width
    assert {word for word in whole.split() if any(map(str.isdigit, word))} <= set(narrow.split())
    assert len(narrow.splitlines()) > len(whole.splitlines()), "some columns went below"


def test_the_first_token_and_the_whole_request_stand_beside_the_speed_of_decoding() -> None:
    found = way("r: plain", 50, peer="r").model_copy(
        update={
            "whole_tokens_per_second": Spread(median=7.5, low=7, high=8),
            "whole_speedup": Spread(median=1.25, low=1, high=2),
            "time_to_first_token": Spread(median=3.0, low=2, high=4),
        }
    )
    row = dict(zip(report.SPEED, report.speed_row(CellResult(cell=cell(), ways=[found]), found), strict=True))
    assert (row["first ms"], row["whole tokens/s"], row["whole"]) == ("3000", "7.5", "1.25x")


def test_a_stretched_model_is_named() -> None:
    found = results()
    found.models["m, float32"] = MODEL.model_copy(update={"positions": 4096})
    assert "m, float32 (stretched to 4096)" in report.markdown(found, [], "outrider bench")


def test_the_peak_is_that_of_the_type_or_of_float32_where_that_is_more() -> None:
    emulated = Results(machine=MACHINE, products={"bfloat16": 1e9, "float32": 1e10})
    assert [emulated.product_peak(name) for name in ("bfloat16", "int8", "float32", "float64")] == [1e10] * 4
    native = Results(machine=MACHINE, products={"bfloat16": 2e10, "float32": 1e10})
    assert [native.product_peak(name) for name in ("bfloat16", "int8", "float32")] == [2e10, 2e10, 1e10]
    assert Results(machine=MACHINE).product_peak("float32") is None


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/results.json")), ids=str
)
def test_results_of_earlier_versions_are_read(file: Path) -> None:
    found = Results.model_validate_json(file.read_text("utf-8"))
    assert all(128 in model.pass_seconds for model in found.models.values())
    page = report.markdown(found, list(found.cells.values()), "outrider bench")
    assert all(name in page for name in found.models)


def test_one_round_has_no_range() -> None:
    once, several = Spread(median=1.5, low=1.5, high=1.5), Spread(median=1.5, low=1.2, high=1.7)
    assert [report._times(once), report._times(several)] == ["1.50x", "1.50x (1.20-1.70)"]
    assert [report._spread(once), report._spread(several)] == ["1.5", "1.5 (1.2-1.7)"]


def test_every_kind_of_table_has_its_legend_once_and_below() -> None:
    found = results()
    views = report.tables(found, list(found.cells.values()), 200)
    page = report.markdown(found, list(found.cells.values()), "outrider bench")
    for legend in report.LEGENDS.values():
        assert len(legend) < 500
        assert page.count(legend) == 1
        assert sum(legend in str(view.caption) for view in views) == 1
    assert report.MARKS["loops"] in page, "a text of these results loops"
    assert report.MARKS["replay"] not in page
    assert report.MARKS["disturbed"] not in page


def test_bars_have_their_values_and_the_colours_of_the_pages() -> None:
    figure = plots.speedup(results())
    assert figure is not None
    (panel,) = figure.axes
    assert [text.get_text() for text in panel.texts] == ["1.50"]
    assert panel.patches[0].get_facecolor()[:3] == to_rgb(plots.PALETTE[0])
    lines = plots.throughput(results())
    assert lines is not None
    assert {text.get_text() for text in lines.axes[0].texts} == {"10", "15"}
    assert len(lines.axes[0].collections) == 2, "a band for the range of each line"


def test_every_line_has_values_and_a_colour_of_the_pages() -> None:
    told = {
        plots.row_costs: {"1.20", "2.00", "4.00"},
        plots.prefill: {"200"},
        plots.acceptance: {"0.50"},
        plots.throughput: {"10", "15"},
    }
    for plot, values in told.items():
        figure = plot(results())
        assert figure is not None
        assert {text.get_text() for panel in figure.axes for text in panel.texts} == values, plot.__name__
        drawn = [line for panel in figure.axes for line in panel.lines if line.get_marker() != "None"]
        assert drawn
        assert {to_rgb(line.get_color()) for line in drawn} <= set(map(to_rgb, (*plots.PALETTE, plots._PLAIN))), (
            plot.__name__
        )


def test_plots_are_drawn_for_what_there_is(tmp_path: Path) -> None:
    names = plots.draw(results(), tmp_path)
    assert names == ["speedup.png", "row_costs.png", "prefill.png", "acceptance.png", "throughput.png"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}
    assert plots.draw(Results(machine=MACHINE), tmp_path / "nothing") == []


def test_the_folder_remembers_and_sets_another_machine_aside(tmp_path: Path) -> None:
    store, found = Store(tmp_path), results()
    store.save(found)
    again = store.open(MACHINE)
    assert again.cells == found.cells
    assert again.models == found.models
    assert again.notes == []  # every run says its own
    other = store.open({**MACHINE, "torch": "1"})
    assert other.cells == {}
    assert "results-1.json" in other.notes[0]
    assert json.loads((tmp_path / "results-1.json").read_text("utf-8"))["machine"] == MACHINE


@pytest.mark.parametrize("text", ["{", "[]", '{"machine": {}, "unknown": 1}', "\xff"])
def test_a_folder_with_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_bytes(text.encode("latin1"))
    with pytest.raises(InvalidParameterError, match="not the results"):
        Store(tmp_path).open(MACHINE)
    assert (tmp_path / "results.json").read_bytes() == text.encode("latin1")


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidParameterError, match="unusable"):
        Store(tmp_path / "file").open(MACHINE)

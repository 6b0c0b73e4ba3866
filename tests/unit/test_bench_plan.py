"""The cells and ways that a run measures, and what it refuses before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ContradictionError, InputError, InvalidParameterError
from outrider.lab.bench.plan import Cell, CellPlan
from outrider.lab.bench.settings import BenchSettings
from outrider.lab.measure.decoding_config import parse_ways, precision, rounding
from outrider.lab.measure.tasks import LONG_WORKLOADS, WORKLOADS
from outrider.propose.draft_model import DraftModel
from outrider.propose.row_heads import Medusa
from outrider.propose.suffix import Suffix


def plan(draft_model: str | None = "draft", **settings: Any) -> CellPlan:
    return CellPlan(BenchSettings(**settings), "m", draft_model)


def loads(cells: list[Cell]) -> set[tuple[str, str, int]]:
    return {(cell.workload, cell.sampling, cell.batch) for cell in cells}


def test_the_usual_run_touches_everything_in_small() -> None:
    found = loads(plan().cells("float32"))
    assert {workload for workload, _, _ in found} == {*WORKLOADS, "replay/copy"}
    assert {sampling for _, sampling, _ in found} == {"greedy", "T=1", "replay"}
    assert {batch for _, _, batch in found} == {1, 8}
    assert len(found) == len(WORKLOADS) + 3


def test_what_is_asked_for_is_crossed_and_nothing_else_is_measured() -> None:
    found = plan(workloads=("json", "free_text"), batches=(1, 2), samplings=("greedy",)).cells("float32")
    assert loads(found) == {(w, "greedy", b) for w in ("json", "free_text") for b in (1, 2)}


def test_a_quick_run_is_one_load_of_short_texts() -> None:
    (cell,) = plan(quick=True).cells("float32")
    assert (cell.workload, cell.sampling, cell.batch) == (WORKLOADS[0], "T=1", 1)
    assert (cell.num_prompts, cell.max_tokens) == (2, 16)
    asked = plan(quick=True, workloads=("json",), batches=(1, 4), max_tokens=9).cells("float32")
    assert loads(asked) == {("json", "T=1", 1), ("json", "T=1", 4)}
    assert {cell.max_tokens for cell in asked} == {9}


def test_a_full_run_is_the_whole_matrix(tmp_path: Path) -> None:
    matrix = plan(full=True, out=tmp_path)
    cells = matrix.cells("float32")
    assert matrix.dtypes == ("float32", "bfloat16")
    assert len(cells) == len(WORKLOADS) * 2 * 7 + 1
    assert len({cell.key for cell in cells}) == len(cells)


def test_replay_has_no_draft_model_and_no_peers() -> None:
    cells = plan(replay="copy", workloads=("json",)).cells("float32", ["peer 1"])
    replay = next(cell for cell in cells if cell.replay)
    assert not any(name.startswith("draft_model") for name in replay.ways)
    assert replay.peers == ()
    assert replay.ways[0] == "plain"
    sampled = next(cell for cell in cells if cell.sampling == "T=1" and cell.batch == 1)
    assert sampled.peers == ("peer 1",)
    assert any(name.startswith("draft_model") for name in sampled.ways)


def test_peers_write_in_batches_too() -> None:
    cells = plan(workloads=("json",), batches=(1, 4), samplings=("T=1",)).cells("f", ["p"])
    assert {cell.batch: cell.peers for cell in cells} == {1: ("p",), 4: ("p",)}


@pytest.mark.by_change("src/outrider/lab/measure/", "src/outrider/lab/bench/")
def test_one_name_stands_for_all_workloads_with_long_prompts() -> None:
    assert list(plan(workloads=("json", "long", "long_diffs")).tasks) == ["json", *LONG_WORKLOADS]
    assert not set(LONG_WORKLOADS) & set(plan().tasks)  # a usual run is short


def test_settings_are_checked_before_torch_is_there() -> None:
    script = """if True:
        import sys
        from outrider.lab.bench.settings import BenchSettings
        from outrider.errors import InputError
        for wrong in ({"peers": ("psychic",)}, {"workloads": ("x",)}, {"batches": (65,)}, {"contexts": (0,)}):
            try:
                BenchSettings(**wrong)
            except InputError:
                continue
            raise AssertionError(wrong)
        assert not {"torch", "transformers"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_key_changes_with_what_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    keys = set()
    for text, more in (("a", {}), ("b", {}), ("a", {"ways": ("ngram:3",)}), ("a", {"max_tokens": 9})):
        file.write_text(f'{{"prompt": "{text}"}}', "utf-8")
        keys.add(plan(prompts=file, batches=(1,), samplings=("T=1",), **more).cells("f")[0].key)
    assert len(keys) == 4


def test_rounds_take_every_prompt_and_begin_again() -> None:
    cell = plan(workloads=("json",), batches=(3,), samplings=("T=1",), num_prompts=4).cells("f")[0]
    assert list(cell.rounds("abcd")) == [["a", "b", "c"], ["d", "a", "b"]]  # type: ignore[type-var]


def test_ways_by_name() -> None:
    ways = {way.name: way.config for way in parse_ways(["suffix-tree", "draft_model:4", "ngram:7", "plain"], "d")}
    assert next(iter(ways)) == "plain"
    assert ways["suffix tree k=16"].method == Suffix(branches=True)
    assert ways["draft_model k=4"].method == DraftModel(model="d")
    assert ways["ngram k=7"].num_draft_tokens == 7
    assert len(parse_ways(["ngram:3", "ngram:3"], None)) == 2


def test_a_way_may_bring_its_own_folder(tmp_path: Path) -> None:
    heads, other = tmp_path / "my.heads", tmp_path / "other-draft"
    for folder in (heads, other):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    names = [f"medusa={heads}:3", f"exit={heads}:2,1:3", f"draft_model={other}:4", "draft_model:4", f"draft_model={other}"]
    ways = {way.name: way.config for way in parse_ways(names, "d")}
    assert ways["medusa my.heads k=3"].method == Medusa(model=str(heads))
    assert ways["exit my.heads (2,1) k=3"].tree == (2, 1)
    assert ways["draft_model other-draft k=4"].method == DraftModel(model=str(other))
    assert ways["draft_model k=4"].method == DraftModel(model="d")
    assert len(ways) == 6


def test_trees_are_ways() -> None:
    names = ["draft_model:3,2,1", "draft_model:best_first:8", "draft_model:sequoia", "layer_skip:best_first"]
    ways = {way.name: way.config for way in parse_ways(names, "d")}
    assert ways["draft_model (3,2,1) k=15"].tree == (3, 2, 1)
    assert (ways["draft_model best-first k=8"].tree, ways["draft_model best-first k=8"].num_draft_tokens) == (
        "best_first",
        8,
    )
    assert ways["draft_model sequoia k=12"].tree == "sequoia"
    assert ways["layer_skip best-first k=12"].name == "layer_skip"


def test_drafts_that_follow_the_forced_text_take_no_part_in_a_replay() -> None:
    names = ["draft_model:2", "early_exit", "layer_skip", "ngram", "suffix-tree", "token_recycling", "lookahead"]
    assert {way.config.name for way in parse_ways(names, "d") if way.replays} == {
        "none", "ngram", "suffix", "token_recycling", "lookahead",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *("psychic", "ngram:0", "ngram:x", "", "ngram:3:4", "none", "plain:2", "plain=x", "draft_model:2"),
        *("medusa", "exit=/no:2"),
    ],
)
def test_ways_that_cannot_be_taken(name: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        parse_ways([name], None)
    assert caught.value.field == "way"


def test_a_precision_says_how_weights_and_rows_are_rounded() -> None:
    names = ("float32", "int8", "int4-g32-asym", "int4-g32+a8", "auto+a8")
    assert BenchSettings(dtypes=names).dtypes == names
    assert [rounding(name) for name in names] == [None, "int8", "int4-g32-asym", "int4-g32", None]
    assert precision("auto+a8") == {"dtype": "auto", "activations": "int8"}
    assert precision("int4-g32") == {"dtype": "bfloat16", "quantization": "int4-g32"}
    assert precision("int4-g32+a8") == {"dtype": "bfloat16", "quantization": "int4-g32", "activations": "int8"}
    recipe = plan(None).ways[0].recipe("m", "int8+a8", greedy=False)
    assert 'quantization="int8", activations="int8"' in recipe.python
    assert "--quantization int8 --activations int8" in recipe.command


def test_without_a_draft_model_the_others_are_measured() -> None:
    assert not any(way.name.startswith("draft_model") for way in plan(None).ways)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"workloads": ("poetry",)}, InvalidParameterError, "poetry"),
        ({"batches": (0,)}, InvalidParameterError, "Use 1 to 64"),
        ({"batches": (65,)}, InvalidParameterError, "Use 1 to 64"),
        ({"samplings": ("T=2",)}, InvalidParameterError, "greedy or T=1"),
        ({"dtypes": ("int3",)}, InvalidParameterError, "int3"),
        ({"dtypes": ("float16+a8",)}, InvalidParameterError, r"int4\+a8, or"),
        ({"dtypes": ("int4-g32+a4",)}, InvalidParameterError, r"int4\+a8, or"),
        ({"max_tokens": 1}, InvalidParameterError, "2 or more"),
        ({"num_prompts": 0}, InvalidParameterError, "1 or more"),
        ({"contexts": (0,)}, InvalidParameterError, "1 to 131072"),
        ({"chunks": (5000,)}, InvalidParameterError, "1 to 4096"),
        ({"peers": ("psychic",)}, InvalidParameterError, "no such peer"),
        ({"wide": True, "model": "m"}, ContradictionError, "embedded"),
        ({"full": True}, ContradictionError, "--out"),
    ],
)
def test_settings_that_cannot_be_measured(settings: dict[str, Any], error: type[InputError], says: str) -> None:
    with pytest.raises(error, match=says):
        BenchSettings(**settings)

"""The advice of a run, for results that are made up."""

from __future__ import annotations

import io
import json
import shlex
from typing import Any

import pytest
from rich.console import Console

import outrider
from outrider.cli.options import method_settings
from outrider.config import default_model
from outrider.lab.bench import report
from outrider.lab.bench.plan import Cell
from outrider.lab.bench.report import advise
from outrider.lab.bench.results import Advice, CellResult, Outcome, Results, WayResult
from outrider.lab.measure.decoding_config import parse_ways
from outrider.lab.measure.figures import Spread
from outrider.propose.defaults import SpeculationDefaults
from outrider.propose.draft_model import DraftModel
from outrider.propose.settings import PLAIN, SpeculationConfig

#: What a line of Python that is pasted may name beside LLM.
PASTED = ("SpeculationConfig", "DraftModel", "Ngram", "Suffix")
NAMES = ("draft_model:4", "ngram:3", "suffix-tree:16")
MACHINE = {
    "cpu": "made up", "instruction_set": "none", "threads": 1, "device": "cpu", "outrider": "0", "torch": "0",
    "transformers": "0", "python": "0",
}  # fmt: skip


def way(name: str, *speedup: float, drafted: bool = True, repeated: float = 0.0) -> WayResult:
    """Speedup as median, low, high; none for plain decoding."""
    spread = Spread(median=10, low=9, high=11)
    return WayResult(
        name=name,
        tokens_per_second=spread,
        whole_tokens_per_second=spread,
        speedup=Spread(**dict(zip(("median", "low", "high"), speedup, strict=True))) if speedup else None,
        num_tokens=96,
        tau=2.0 if drafted and speedup else None,
        repeated_8grams=repeated,
        loops=repeated > 0.1,
    )


def cell(*ways: WayResult, **changes: Any) -> CellResult:
    fixed: dict[str, Any] = {
        "model": "/m", "dtype": "float32", "workload": "json", "sampling": "T=1", "batch": 1, "num_prompts": 3,
        "max_tokens": 32, "ways": tuple(w.name for w in ways), "tasks": "abc",
    }  # fmt: skip
    about = Cell(**{**fixed, **changes})
    recipes = {
        known.name: known.recipe(about.model, about.dtype, greedy=about.sampling == "greedy")
        for known in parse_ways(NAMES, "/d")
    }
    return CellResult(cell=about, ways=[way("plain"), *ways], recipes=recipes)


def only(*cells: CellResult) -> Advice:
    (advice,) = advise(cells)
    return advice


def test_a_clear_gain_names_the_way_the_range_and_what_to_paste() -> None:
    found = only(cell(way("draft_model k=4", 1.77, 1.42, 2.38), way("ngram k=3", 1.2, 0.9, 1.6)))
    assert found.outcome is Outcome.PAYS
    assert found.group == "/m, float32, T=1, batch 1"
    assert found.text == (
        "draft_model k=4 pays: it writes 1.77 times as fast as plain decoding (1.42 to 2.38 over 3 rounds)."
    )
    assert found.python is not None
    assert found.python.startswith('LLM("/m", dtype="float32", speculation=SpeculationConfig(')
    assert "num_draft_tokens=4" in found.python
    assert found.command is not None
    assert found.command.startswith("outrider generate /m --dtype float32 ")
    assert found.command.endswith(' --num-draft-tokens 4 --prompt "..."')


def test_what_surely_pays_comes_before_what_may_pay_more() -> None:
    found = only(cell(way("draft_model k=4", 1.5, 0.9, 2.4), way("ngram k=3", 1.2, 1.1, 1.3)))
    assert (found.outcome, found.way) == (Outcome.PAYS, "ngram k=3")


def test_a_range_that_holds_1_is_no_gain() -> None:
    found = only(cell(way("draft_model k=4", 1.06, 0.91, 1.2), way("ngram k=3", 0.8, 0.7, 0.9)))
    assert found.outcome is Outcome.UNCLEAR
    assert "draft_model k=4, is 1.06 times" in found.text
    assert "its range holds 1 (0.91 to 1.20 over 3 rounds)" in found.text
    assert "--num-prompts 16" in found.text


def test_what_was_disturbed_is_no_headline() -> None:
    disturbed = way("draft_model k=4").model_copy(update={"disturbed": True, "tau": 2.0})
    found = only(cell(disturbed))
    assert found.outcome is Outcome.DISTURBED
    assert found.text.startswith("No advice: other work disturbed the measurement.")
    assert found.python is None
    beside = only(cell(disturbed, way("ngram k=3", 1.3, 1.2, 1.4)))
    assert beside.way == "ngram k=3"
    assert "Not believed, since other work disturbed it: draft_model k=4." in beside.text


def test_a_single_round_proves_nothing() -> None:
    found = only(cell(way("draft_model k=4", 4.01, 4.01, 4.01), num_prompts=1))
    assert found.outcome is Outcome.UNCLEAR
    assert "in a single round. So few rounds cannot tell." in found.text
    slower = only(cell(way("draft_model k=4", 0.7, 0.7, 0.7), num_prompts=1))
    assert slower.outcome is Outcome.UNCLEAR
    assert slower.text.startswith(
        "Nothing is certain: draft_model k=4 was 0.70 times as fast as plain decoding in a single"
    )
    assert slower.python is not None
    assert '"none"' in slower.python  # what was faster is what is pasted


def test_a_range_that_holds_1_does_not_say_to_decode_plainly() -> None:
    found = only(cell(way("draft_model k=4", 0.95, 0.8, 1.1)))
    assert found.outcome is Outcome.UNCLEAR
    assert "its range holds 1 (0.80 to 1.10 over 3 rounds). So few rounds cannot tell." in found.text
    assert "Decode plainly" not in found.text


def test_where_no_way_to_draft_took_part_there_is_no_advice() -> None:
    found = only(cell())
    assert (found.outcome, found.way, found.python) == (Outcome.ABSENT, None, None)
    assert found.text == "No advice: no way to draft took part."
    replayed = only(cell(sampling="replay", workload="replay/copy"))
    assert replayed.outcome is Outcome.ABSENT
    assert "--way ngram:3" in replayed.text
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(report.conclusion([found]))
    assert "no way to draft took part" in console.export_text()


def test_where_everything_is_slower_the_advice_is_to_decode_plainly() -> None:
    found = only(
        cell(way("draft_model k=4", 0.68, 0.65, 0.71), way("ngram k=3", 0.87, 0.82, 0.93), batch=8, num_prompts=16)
    )
    assert found.outcome is Outcome.PLAIN
    assert found.text == (
        "Decode plainly: the best way to draft, ngram k=3, is 0.87 times as fast as plain decoding (0.82 to 0.93 over "
        "2 rounds)."
    )
    assert found.python is not None
    assert '"none"' in found.python
    assert found.command is not None
    assert " none " in found.command


def test_who_never_drafted_is_named() -> None:
    silent = way("suffix tree k=16", 1.3, 1.2, 1.4, drafted=False)  # whatever its figure is, no draft made it
    found = only(cell(way("ngram k=3", 1.2, 1.1, 1.3), silent))
    assert (found.way, found.never_drafted) == ("ngram k=3", ["suffix tree k=16"])
    assert found.text.endswith("Never drafted: suffix tree k=16.")
    nobody = only(cell(silent))
    assert (nobody.outcome, nobody.way) == (Outcome.PLAIN, None)
    assert nobody.text == "Decode plainly: no way to draft found anything to draft. Never drafted: suffix tree k=16."
    half = only(cell(silent), cell(way("suffix tree k=16", 1.3, 1.2, 1.4), workload="free_text"))
    assert half.never_drafted == []


def test_greedy_text_that_loops_is_no_headline() -> None:
    looping = cell(way("ngram k=3", 3.1, 2.9, 3.3, repeated=0.4), sampling="greedy")
    found = only(looping)
    assert (found.outcome, found.way, found.python, found.command) == (Outcome.LOOPS, None, None, None)
    assert "3.1" not in found.text
    fine = cell(way("ngram k=3", 1.2, 1.1, 1.3), sampling="greedy", workload="free_text")
    both = only(looping, fine)
    assert both.speedup == Spread(median=1.2, low=1.1, high=1.3)
    assert both.text.endswith("Not counted, since the greedy text repeats itself: json.")
    assert "--temperature 0 " in (both.command or "")
    sampled = only(cell(way("ngram k=3", 3.1, 2.9, 3.3, repeated=0.4)))
    assert sampled.outcome is Outcome.PAYS  # only greedy text is drawn into a loop by the model itself


def test_workloads_are_taken_together_and_the_clear_ones_named() -> None:
    found = only(
        cell(way("ngram k=3", 1.3, 1.1, 1.5)),
        cell(way("ngram k=3", 0.9, 0.8, 1.1), workload="free_text"),
        cell(way("ngram k=3", 1.2, 0.9, 1.4), workload="code"),
    )
    assert found.speedup == Spread(median=1.2, low=0.8, high=1.5)
    assert found.outcome is Outcome.UNCLEAR
    assert "(0.80 to 1.50 over 9 rounds of all workloads). It surely pays in json alone." in found.text


def test_every_precision_sampling_and_batch_has_its_own() -> None:
    gain = way("ngram k=3", 1.3, 1.1, 1.5)
    found = advise([cell(gain), cell(gain, batch=8), cell(gain, dtype="int8"), cell(gain, workload="free_text")])
    assert [advice.group for advice in found] == [
        "/m, float32, T=1, batch 1", "/m, float32, T=1, batch 8", "/m, int8, T=1, batch 1",
    ]  # fmt: skip


def test_peers_are_no_way_of_ours() -> None:
    rival = way("rival: k=3", 9.0, 8.0, 10.0).model_copy(update={"peer": "rival"})
    assert only(cell(way("ngram k=3", 1.3, 1.1, 1.5), rival)).way == "ngram k=3"


def test_the_page_the_terminal_and_the_numbers_say_the_same() -> None:
    cells = [cell(way("ngram k=3", 1.3, 1.1, 1.5)), cell(way("ngram k=3", 0.8, 0.7, 0.9), batch=4, num_prompts=16)]
    found = Results(machine=MACHINE, cells={c.cell.key: c for c in cells}, advice=advise(cells))
    page = report.markdown(found, cells, "outrider bench")
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(report.conclusion(found.advice), soft_wrap=True)
    shown = console.export_text()
    kept = json.loads(found.model_dump_json())["advice"]
    assert len(kept) == 2
    for advice in kept:
        for said in (advice["group"], advice["text"], advice["python"], advice["command"]):
            assert said in page
            assert said in shown
    assert Results.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("draft_model", [default_model("draft"), "/d", None])
def test_the_way_auto_is_what_an_llm_chooses_from_by_itself(draft_model: str | None) -> None:
    way = parse_ways(["auto"], draft_model)[-1]
    embedded = default_model("draft") if draft_model == default_model("draft") else None
    given = None if embedded is not None else draft_model
    assert way.config == SpeculationDefaults.of(None, given, embedded).config
    assert way.name == "auto"
    for model, named in (("embedded", None), ("wide", "DRAFT")) if embedded else (("m", draft_model),):
        recipe = way.recipe(model, "bfloat16", greedy=False)
        assert (f'draft_model="{named}"' in recipe.python) is (named is not None)
        assert (f"--draft-model {named}" in recipe.command) is (named is not None)
        assert default_model("draft") not in recipe.python + recipe.command


@pytest.mark.parametrize("name", ["plain", *NAMES, "draft_model:2,1", "draft_model:best_first:6"])
@pytest.mark.parametrize("model", ["embedded", "wide", "/folder/it's mine"])
def test_what_is_pasted_is_the_way(name: str, model: str) -> None:
    draft_model = default_model("draft") if model != "/folder/it's mine" else "/d"
    chosen = parse_ways([name], draft_model)[-1]
    recipe = chosen.recipe(model, "int8", greedy=True)

    def llm(*target: str, dtype: str, quantization: str, speculation: SpeculationConfig | str) -> SpeculationConfig:
        assert (dtype, quantization) == ("bfloat16", "int8")
        assert target == {"embedded": (), "wide": ("MODEL",)}.get(model, (model,))
        return SpeculationConfig.of(speculation)

    config = eval(recipe.python, {"LLM": llm} | {name: getattr(outrider, name) for name in PASTED})
    named = {"embedded": None, "wide": "DRAFT"}.get(model, "/d") if name.startswith("draft_model") else None
    if isinstance(chosen.config.method, DraftModel):
        assert config == chosen.config.replace(method=DraftModel(model=named))
    else:
        assert config == (chosen.config if chosen.config.enabled else PLAIN)
    words = shlex.split(recipe.command)
    assert words[:2] == ["outrider", "generate"]
    assert words[words.index("--temperature") + 1] == "0"
    assert "/folder/it's mine" in words or model != "/folder/it's mine"
    assert ("--draft-model" in words) is (named is not None)
    tree = config.tree if isinstance(config.tree, str) else ",".join(map(str, config.tree))
    assert words[words.index("--tree") + 1] == tree if config.tree else "--tree" not in words
    if "--method" in words and config.method is not None:  # as the command reads it
        assert SpeculationConfig.of(method_settings(words[words.index("--method") + 1])).method == config.method


def test_where_nothing_is_recommended_there_is_nothing_to_paste() -> None:
    assert len(report.pasted(only(cell(way("suffix tree k=16", 1.3, 1.1, 1.5))))) == 2
    assert report.pasted(only(cell(way("ngram k=3", 3.1, 2.9, 3.3, repeated=0.4), sampling="greedy"))) == []


def test_results_kept_before_there_were_recipes_have_advice() -> None:
    old = cell(way("ngram k=3", 1.3, 1.1, 1.5)).model_copy(update={"recipes": {}})
    found = only(old)
    assert (found.outcome, found.python, found.command) == (Outcome.PAYS, None, None)

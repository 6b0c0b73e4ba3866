"""The engine chooses who drafts: what it writes, when it drafts, what it says, and what it does where it may not choose."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from outrider import LLM, SamplingParams, SpeculationConfig, StructuredOutputs
from outrider.config import default_model
from outrider.engine.drafting import calibration, choices
from outrider.engine.drafting.choosing import MethodChoice
from outrider.errors import InvalidParameterError
from outrider.govern.costs import CostTable, StepTimes, StepWork
from outrider.govern.governor import Governor
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.model import keeping, memory
from outrider.model.memory import device_name, measure_context, measure_passes
from outrider.propose import draft_model
from outrider.propose.base import Proposer
from outrider.propose.compositions import Auto
from outrider.propose.settings import Method
from outrider.server.metrics import EngineState, ServerMetrics
from tests.model.core import core

#: Rows cost nothing, so that whatever stands pays.
FREE = CostTable(dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128), 1.0), 0.0, {"draft_model": {1: 0.01, 64: 0.01}})
COPY = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def steady(work: StepWork, times: StepTimes) -> StepTimes:
    return StepTimes(0.01 if work.texts else 0.0001, 1.0, 0.01)


@pytest.fixture(autouse=True)
def _no_costs_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keeping.VARIABLE, "off")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    torch.set_num_threads(1)
    return save_tiny_llama(tmp_path / "target", 1), save_tiny_llama(tmp_path / "draft", 2)


def auto(*members: object) -> SpeculationConfig:
    return SpeculationConfig(method=Auto(methods=members))


def chosen_for(pair: tuple[str, str], **options: object) -> LLM:
    llm = LLM(pair[0], dtype="float64", speculation=auto("suffix", {"method": "draft_model", "model": pair[1]}), **options)
    llm.engine.drafting.script(FREE, steady)
    return llm


@pytest.mark.parametrize("params", [{"seed": 3}, {"temperature": 0.0}], ids=["seeded", "greedy"])
def test_it_writes_what_plain_decoding_writes(pair: tuple[str, str], params: dict[str, float]) -> None:
    with chosen_for(pair) as llm:
        sampling = SamplingParams(max_tokens=60, **params)
        prompts = [COPY, COPY[1:], [0]]
        chosen = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
        drafts = llm.stats.finished.num_drafts
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling, speculation="none")]
        assert chosen == plain
        assert drafts > 0
        llm.engine.check_integrity()


def test_nothing_is_drafted_before_the_first_token_and_every_round_says_why(pair: tuple[str, str]) -> None:
    with chosen_for(pair) as llm:
        (output,) = llm.generate([COPY], SamplingParams(max_tokens=40, seed=1), trace=True)
        first, *others = output.outputs[0].rounds
        assert not first.token_ids
        assert first.reason == "plain, until the first token is written"
        assert any(each.token_ids for each in others)
        assert all(each.reason for each in others)
        assert sum(llm.stats.chosen.values()) == len(others)


def test_an_idle_lookup_is_charged_for_its_draft_and_for_what_becomes_of_it(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock says 0.01 s for each of the two."""
    charged: dict[str, list[float]] = {}
    real = Governor.observe_shadow_seconds

    def observe(governor: Governor, method: str, num_texts: int, seconds: float) -> None:
        charged.setdefault(method, []).append(seconds)
        real(governor, method, num_texts, seconds)

    monkeypatch.setattr(Governor, "observe_shadow_seconds", observe)
    with chosen_for(pair) as llm:
        rows_never_pay = CostTable({1: 1.0, 2: 99.0, 128: 9999.0}, 0.0, FREE.drafts)
        llm.engine.drafting.script(rows_never_pay, steady)
        llm.generate([COPY] * 4, SamplingParams(max_tokens=60, seed=1))
    assert charged["suffix"] == pytest.approx([0.02] * len(charged["suffix"]))
    assert charged["draft_model"] == pytest.approx([0.01] * len(charged["draft_model"]))


def test_texts_that_rest_are_seldom_asked_after(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step without drafts takes beside a plain one is lost, and no bucket pays for it."""
    asked, real = [0], MethodChoice._running
    with chosen_for(pair, max_num_seqs=8) as llm:
        llm.engine.drafting.script(CostTable({1: 1.0, 2: 99.0, 128: 9999.0}, 0.0, FREE.drafts), steady)
        llm.generate([COPY] * 8, SamplingParams(max_tokens=5, seed=1))

        def running(self: MethodChoice, *args: object) -> object:
            asked[0] += 1
            return real(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(MethodChoice, "_running", running)
        llm.stats.reset()
        llm.generate([COPY] * 8, SamplingParams(max_tokens=80, seed=1))
        assert llm.stats.chosen == {("none", 0): llm.stats.chosen["none", 0]}
        assert asked[0] <= 6 * llm.stats.num_steps, "eight texts in every second step, and now and then for a plan"


def test_choices_and_their_reasons_are_counted(pair: tuple[str, str]) -> None:
    with chosen_for(pair) as llm:
        llm.generate([COPY], SamplingParams(max_tokens=40, seed=1))
        text = ServerMetrics("m").text(llm.between_steps(lambda engine: EngineState.of(engine, llm.health)), {}).decode()
        chosen, reasons = llm.stats.chosen, llm.stats.reasons
    for (method, length), count in chosen.items():
        assert f'outrider:choices_total{{method="{method}",model_name="m",num_draft_tokens="{length}"}} {count}.0' in text
    for reason, count in reasons.items():
        assert f'outrider:choice_reasons_total{{model_name="m",reason="{reason}"}} {count}.0' in text
    assert reasons["pays"] > 0
    assert sum(reasons.values()) == sum(chosen.values())


def test_other_requests_of_the_batch_draft_as_they_ask(pair: tuple[str, str]) -> None:
    with chosen_for(pair) as llm:
        asked = [None, "none", "ngram"]
        outputs = llm.generate([COPY] * 3, SamplingParams(max_tokens=30, seed=2), speculation=asked, trace=True)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        assert not any(each.reason for output in outputs[1:] for each in output.outputs[0].rounds)
        assert outputs[1].stats.num_drafts == 0
        assert outputs[2].stats.num_drafts > 0


def test_where_rows_depend_on_their_pass_a_seeded_text_is_decoded_plainly(pair: tuple[str, str]) -> None:
    settings = auto("suffix")
    with LLM(pair[0], dtype="float32", attention_backend="gather", speculation=settings) as llm:
        llm.engine.drafting.script(FREE, steady)
        prompts, cold = [COPY, COPY], SamplingParams(max_tokens=20, temperature=0.0)
        seeded, free = llm.generate(prompts, [SamplingParams(max_tokens=20, seed=1), SamplingParams(max_tokens=20)])
        assert seeded.stats.num_drafts == 0
        assert free.stats.num_drafts > 0
        assert llm.generate(COPY, cold)[0].stats.num_drafts == 0
        assert llm.generate(COPY, cold, speculation="suffix")[0].stats.num_drafts > 0  # a method was named


def test_samples_of_one_prompt_and_texts_that_end_early(pair: tuple[str, str]) -> None:
    with chosen_for(pair, block_size=2) as llm:
        outputs = llm.generate([COPY] * 4, [SamplingParams(max_tokens=n, n=2, seed=n) for n in (1, 2, 7, 30)])
        assert [len(sample.token_ids) for output in outputs for sample in output.outputs] == [1, 1, 2, 2, 7, 7, 30, 30]
        assert not llm.engine.drafting._choice._of
        assert not llm.engine.drafting._choice._scores._pending
        llm.engine.check_rest()


class Broken(Method):
    """A method of the tests whose proposer always raises."""

    name: ClassVar[str] = "always_broken"
    grows_from_probabilities: ClassVar[bool] = False

    def build(self, context: object) -> Proposer:
        return Proposer()


def test_a_method_that_always_fails_is_soon_left_alone(pair: tuple[str, str]) -> None:
    with LLM(pair[0], dtype="float64", speculation=auto(Broken())) as llm:
        llm.engine.drafting.script(FREE, steady)
        (output,) = llm.generate([COPY], SamplingParams(max_tokens=100, seed=1))
        assert output.error is None
        assert output.stats.num_proposer_faults == 3
        assert llm.stats.chosen["none", 0] > 40


def test_the_methods_that_it_takes_by_itself(pair: tuple[str, str]) -> None:
    with LLM(pair[0], dtype="float64", speculation="auto") as llm:
        method = llm.speculation.method
        assert isinstance(method, Auto)
        assert [each.name for each in method.methods] == ["suffix", "token_recycling"]
        assert llm.resolve("auto") == llm.speculation
    with LLM(pair[0], dtype="float64", draft_model=pair[1]) as llm:
        method = llm.resolve("auto").method
        assert isinstance(method, Auto)
        assert [each.name for each in method.methods] == ["draft_model", "suffix", "then"]
        (output,) = llm.generate([COPY], SamplingParams(max_tokens=20, seed=1), speculation="auto")
        assert (
            output.outputs[0].token_ids == llm.generate(COPY, SamplingParams(max_tokens=20, seed=1))[0].outputs[0].token_ids
        )


def test_a_method_that_cannot_be_used_is_refused_at_once(pair: tuple[str, str]) -> None:
    with pytest.raises(InvalidParameterError):
        LLM(pair[0], dtype="float64", speculation=auto({"method": "draft_model", "model": "/no/such/folder"}))


#: A second row costs so much that nobody drafts, and models read at next to no cost.
STEEP = CostTable({1: 1.0, 2: 50.0, 64: 50.0}, 0.0, {"draft_model": {1: 1e-5, 64: 1e-5}})


def test_no_row_of_a_draft_is_computed_before_the_first_token(pair: tuple[str, str]) -> None:
    settings = auto({"method": "draft_model", "model": pair[1]})
    with LLM(pair[0], dtype="float64", speculation=settings) as llm:
        llm.engine.drafting.script(FREE, steady)
        proposer = llm.proposers.get(settings.method.methods[0].method)
        before = proposer.runner.num_passes
        llm.generate([COPY], SamplingParams(max_tokens=1, seed=1))
        assert llm.stats.num_rows == len(COPY)
        assert proposer.runner.num_passes == before
        llm.generate([COPY], SamplingParams(max_tokens=8, seed=1))
        assert proposer.runner.num_passes > before


@pytest.mark.parametrize("rows", [16, 128])
def test_an_idle_model_reads_in_parts_and_is_scored_where_the_text_is_new(
    rows: int, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is the target, so that every token of a greedy text would have stood."""
    for module in (draft_model, choices, choices):
        monkeypatch.setattr(module, "CATCH_UP_ROWS", rows)
    found: list[list[float]] = []
    stock = Governor.observe_overlaps

    def spy(self: Governor, request: int, method: str, overlaps: list[float]) -> None:
        found.append(overlaps)
        stock(self, request, method, overlaps)

    monkeypatch.setattr(Governor, "observe_overlaps", spy)
    with LLM(pair[0], dtype="float64", speculation=auto({"method": "draft_model", "model": pair[0]})) as llm:
        llm.engine.drafting.script(STEEP, steady)
        (output,) = llm.generate([COPY * 2], SamplingParams(max_tokens=60, temperature=0.0))
    assert output.stats.num_drafts == 0
    scores = [score for overlaps in found for score in overlaps]
    assert len(scores) >= 25
    assert scores == [1.0] * len(scores)


@pytest.mark.parametrize("params", [{"seed": 4}, {"seed": 4, "top_k": 3}, {"temperature": 0.0}], ids=str)
def test_it_is_told_how_probable_every_token_was(
    params: dict[str, float], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    monkeypatch.setattr(choices.ShadowScores, "note", lambda self, seq, probs: told.extend(probs))
    with LLM(pair[0], dtype="float64", speculation=auto({"method": "draft_model", "model": pair[0]})) as llm:
        llm.engine.drafting.script(STEEP, steady)
        (output,) = llm.generate([COPY], SamplingParams(max_tokens=30, ignore_eos=True, **params), trace=True)
    rounds = output.first.rounds or ()
    want = [each.target for found in rounds for each in found.rows[0].likely if each.token_id == found.token_id]
    assert told == pytest.approx(want[1:])
    assert len(told) == 29, "all but the first token"


@pytest.mark.parametrize("params", [{"seed": 4, "top_k": 3}, {"temperature": 0.0}], ids=str)
def test_it_is_told_how_sure_the_target_was_of_every_token(
    params: dict[str, float], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    monkeypatch.setattr(Governor, "observe_target", lambda self, request, chances: told.extend(chances))
    with chosen_for(pair) as llm:
        sampling = SamplingParams(max_tokens=90, ignore_eos=True, logprobs=1, **params)
        (output,) = llm.generate([COPY], sampling, trace=True)
    likeliest = [exp(max(each.logprob for each in at.values())) for at in output.first.logprobs or ()]
    rounds, want = output.first.rounds or (), list[float]()
    for found in rounds[1:]:
        if found.round < 16 or found.round % 4 == 3:
            first = found.position - len(COPY)
            want += likeliest[first : first + len(found.accepted) + 1]
    assert told == pytest.approx(want)
    assert any(found.accepted for found in rounds), "rows of drafts are looked at, too"
    told.clear()
    with LLM(pair[0], dtype="float64", speculation=auto({"method": "suffix"})) as llm:
        llm.generate([COPY], sampling)
    assert not told, "of lookups it says nothing, and a look takes time"


def test_what_calls_and_structures_teach_is_not_taken_for_what_other_texts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []
    begin = Governor.begin
    monkeypatch.setattr(Governor, "begin", lambda self, request, of: (kinds.append(of), begin(self, request, of))[0])
    structure = StructuredOutputs(regex="[a-z]{3}")
    with LLM(default_model("draft"), speculation=auto({"method": "suffix"})) as llm:
        for given, namespace in ((None, "a"), (structure, "a"), (None, "a"), (structure, "b")):
            llm.generate(["x = "], SamplingParams(max_tokens=3, structured_outputs=given), namespace=namespace)
    assert kinds[0] == kinds[2]
    assert len(set(kinds)) == 3


def test_what_was_learnt_is_kept_for_a_few_sets_of_methods(pair: tuple[str, str]) -> None:
    with LLM(pair[0], dtype="float64", speculation="none") as llm:
        for longest in range(1, 30):
            settings = auto({"method": "suffix", "num_draft_tokens": longest})
            llm.generate([COPY], SamplingParams(max_tokens=3, seed=1), speculation=settings)
        assert len(llm.engine.drafting._choice._sets.alive) == choices.MOST_SETS
        assert llm.engine.drafting._choice._sets.alive[-1].candidates == settings.candidates
        llm.engine.check_rest()


def test_a_context_that_makes_passes_longer_is_measured(pair: tuple[str, str]) -> None:
    with LLM(pair[0], dtype="float64", speculation="none") as llm:
        runner = llm.engine.runner
        measured = measure_context(runner, measure_passes(runner))
        assert 0.0 <= measured < 1e-3
        assert measure_context(runner, {1: 100.0, 64: 100.0}) == 0.0  # it would take too long


# -- calibration -------------------------------------------------------------------------------------------------------


def test_passes_of_few_rows_are_timed_in_every_round(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a round takes long, the other sizes are timed once, and a pause of the machine lasts in what is kept."""
    timed: Counter[int] = Counter()
    seconds = memory.PassTimer.seconds

    def count(timer: memory.PassTimer, start: int, num_rows: int, *, logits: bool) -> float:
        timed[num_rows] += 1
        return seconds(timer, start, num_rows, logits=logits)

    monkeypatch.setattr(memory.PassTimer, "seconds", count)
    monkeypatch.setattr(memory, "_PATIENCE", 0.0)
    with LLM(pair[0], dtype="float64", speculation="none") as llm:
        assert set(measure_passes(llm.engine.runner)) == set(timed)
    assert [timed[size] for size in (1, 2, 4, 8, 12, 16, 24)] == [5, 5, 5, 5, 5, 1, 1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(keeping.VARIABLE, str(tmp_path / "costs"))
    return tmp_path / "costs"


def loaded(pair: tuple[str, str]) -> None:
    with LLM(pair[0], dtype="float64", speculation=auto({"method": "draft_model", "model": pair[1]})):
        return


def test_costs_are_measured_once_and_kept(pair: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(pair)
    (path,) = folder.iterdir()
    table = json.loads(path.read_text())["table"]
    assert table["passes"].keys() == table["drafts"]["draft_model"].keys()
    assert all(seconds > 0.0 for seconds in table["passes"].values())
    monkeypatch.setattr(calibration, "measure_passes", lambda runner: pytest.fail("measured again"))
    monkeypatch.setattr(calibration, "measure_context", lambda runner, passes: pytest.fail("measured again"))
    loaded(pair)


def test_costs_of_another_device_are_not_believed(
    pair: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"the GPU {device}")
    assert device_name(torch.device("cuda:1")) == "the GPU cuda:1"
    loaded(pair)
    monkeypatch.setattr(calibration, "device_name", lambda device: "another one")
    loaded(pair)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"table": {}}',
        '{"table": {"passes": {"1": 1}, "context_seconds": -1, "drafts": {}}}',
        '{"table": {"passes": {"1": -1}}}',
    ],
)
def test_a_file_that_is_no_table_is_measured_anew(
    text: str, pair: tuple[str, str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(pair)
    (path,) = folder.iterdir()
    path.write_text(text)
    loaded(pair)
    assert "it is ignored" in caplog.text
    assert json.loads(path.read_text())["table"]["passes"]


#: Damages of a table that is well formed: what it says cannot be.
DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a context that costs an age": lambda table: table.update(context_seconds=1e300),
    "a context that costs more than its pass": lambda table: table.update(context_seconds=2.0 * table["passes"]["1"] + 1.0),
    "passes of absurd numbers of rows": lambda table: table.update(passes={str(10**30): 1.0}),
    "passes of other numbers of rows": lambda table: table.update(passes={"3": 0.1, "5": 0.1}),
    "a pass of an age": lambda table: table["passes"].update({"8": 1e200}),
    "a pass of no time": lambda table: table["passes"].update({"8": 1e-300}),
    "rows that cost a thousand times their number": lambda table: table["passes"].update({"4": 5e3 * table["passes"]["1"]}),
    "times in words": lambda table: table["passes"].update({"1": "0.01"}),
    "a truth for a time": lambda table: table["passes"].update({"1": True}),
    "a draft model that is missing": lambda table: table.update(drafts={}),
    "a draft model of an age": lambda table: table["drafts"]["draft_model"].update({"1": 1e250}),
}


#: One of each kind: a number, a key, a type, and what is missing.
FEW_DAMAGES = ("a pass of an age", "passes of other numbers of rows", "a truth for a time", "a draft model that is missing")


@pytest.mark.parametrize(
    "damage",
    core(
        DAMAGES, FEW_DAMAGES, "src/outrider/govern/", "src/outrider/model/", "src/outrider/loading/", "src/outrider/engine/"
    ),
)
def test_a_table_that_cannot_be_true_is_measured_anew(
    damage: str, pair: tuple[str, str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And requests are answered as if nothing had happened."""
    loaded(pair)
    (path,) = folder.iterdir()
    kept = json.loads(path.read_text())
    DAMAGES[damage](kept["table"])
    path.write_text(json.dumps(kept))
    with LLM(pair[0], dtype="float64", speculation=auto({"method": "draft_model", "model": pair[1]})) as llm:
        (output,) = llm.generate([COPY], SamplingParams(max_tokens=12, seed=1))
    assert output.error is None
    assert "it is ignored" in caplog.text
    assert json.loads(path.read_text()) != kept


#: What the engine asks of a governor.
QUESTIONS = (
    "begin",
    "finish",
    "decide",
    "rests",
    "rest",
    "shadows",
    "observe_draft",
    "observe_step",
    "observe_shadow_seconds",
    "observe_own_seconds",
)


@pytest.mark.parametrize(
    "question", core(QUESTIONS, ("begin", "decide", "observe_step"), "src/outrider/govern/", "src/outrider/engine/")
)
def test_what_a_governor_raises_costs_the_choice_and_no_request(
    question: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Governor, *args: object, **more: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(Governor, question, broken)
    sampling = SamplingParams(max_tokens=40, seed=1)
    with chosen_for(pair) as llm:
        chosen = llm.generate([COPY, COPY[1:]], sampling)
        assert all(output.error is None for output in chosen)
        assert "ZeroDivisionError" in caplog.text
        assert llm.stats.chosen["none", 0] > 0
        plain = llm.generate([COPY, COPY[1:]], sampling, speculation="none")
        assert [output.outputs[0].token_ids for output in chosen] == [output.outputs[0].token_ids for output in plain]
        llm.engine.check_rest()
        assert not llm.engine.drafting._choice._of


def test_a_governor_that_stumbled_once_chooses_again(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    stock, calls = Governor.observe_step, [0]

    def stumbles(self: Governor, work: StepWork, times: StepTimes) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise OverflowError("too large")
        stock(self, work, times)

    monkeypatch.setattr(Governor, "observe_step", stumbles)
    with chosen_for(pair) as llm:
        llm.generate([COPY], SamplingParams(max_tokens=40, seed=1))
        llm.stats.reset()
        (output,) = llm.generate([COPY], SamplingParams(max_tokens=40, seed=1))
        assert output.stats.num_drafts > 0


def test_a_calibration_that_fails_costs_the_choice_and_no_request(
    pair: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(runner: object) -> None:
        raise RuntimeError("no memory for the rows")

    monkeypatch.setattr(calibration, "measure_passes", broken)
    with LLM(pair[0], dtype="float64", speculation=auto("suffix")) as llm:
        (output,) = llm.generate([COPY], SamplingParams(max_tokens=12, seed=1))
    assert output.error is None
    assert "no memory for the rows" in caplog.text
    assert not list(folder.glob("*.json"))


def test_a_calibration_that_is_broken_off_leaves_nothing(
    pair: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: str, target: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(keeping.os, "replace", interrupted)
    loaded(pair)
    assert not list(folder.glob("*.json"))
    monkeypatch.undo()


def test_a_folder_that_cannot_be_written_does_no_harm(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(keeping.VARIABLE, str(tmp_path / "file" / "below"))
    loaded(pair)

"""The engine chooses among methods of which some are heads: what it measures of them, how long it lets them draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.govern import acceptance
from outrider.govern.costs import CostTable, StepTimes, StepWork
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle, save_random_heads, save_random_peagle
from outrider.model import keeping
from tests.model import checkpoints

COPY = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
#: Methods whose drafts take one pass, however long they are. Each token of Medusa has an output layer of its own.
AT_ONCE = {"dflash", "peagle", "blockwise"}
#: Rows cost nothing, so that whatever stands pays.
FREE = CostTable(dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 1.0))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A target with heads of DFlash, EAGLE-3, P-EAGLE, blockwise decoding and Medusa."""
    folder = tmp_path_factory.mktemp("auto_heads")
    target = checkpoints.save("llama", folder / "target", seed=3)
    block = save_random_dflash(folder / "block", target, block_size=8, scale=0.1)
    eagle = save_random_eagle(folder / "eagle", target, "speculators", eagle_aux_hidden_state_layer_ids=[1, 2], scale=0.1)
    parallel = save_random_peagle(folder / "parallel", target, eagle_aux_hidden_state_layer_ids=[1, 2], scale=0.1)
    return (
        target,
        block,
        eagle,
        parallel,
        *(save_random_heads(folder / name, target, name) for name in ("blockwise", "medusa")),
    )


def chosen_for(paths: tuple[str, ...]) -> LLM:
    target, block, eagle, parallel, blockwise, medusa = paths
    methods: list[Any] = [
        {"method": "dflash", "model": block, "num_draft_tokens": 7},
        {"method": "eagle3", "model": eagle},
        {"method": "peagle", "model": parallel},
        {"method": "blockwise", "model": blockwise},
        {"method": "medusa", "model": medusa},
        {"method": "ngram", "min_match": 1},
    ]
    return LLM(target, dtype="float64", block_size=4, speculation={"method": "auto", "methods": methods})


@pytest.mark.parametrize("params", [{"seed": 3}, {"temperature": 0.0}], ids=["seeded", "greedy"])
def test_it_writes_what_plain_decoding_writes(
    paths: tuple[str, ...], params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keeping.VARIABLE, "off")
    monkeypatch.setattr(acceptance, "_SLOPE", 0.0)  # a target with random weights is sure of nothing, and all shall draft

    def steady(work: StepWork, times: StepTimes) -> StepTimes:
        drafts = 0.001 * sum(1 if each.method in AT_ONCE else each.levels for each in work.drafts)
        return StepTimes(drafts, 1.0, 0.01)

    with chosen_for(paths) as llm:
        llm.engine.drafting.script(FREE, steady)
        sampling = SamplingParams(max_tokens=60, **params)
        chosen = llm.generate([COPY, COPY[1:], [0]], sampling)
        lengths = {name: {rows for one, rows in llm.stats.chosen if one == name} for name in ("dflash", "eagle3")}
        plain = llm.generate([COPY, COPY[1:], [0]], sampling, speculation="none")
        assert [output.token_ids for output in chosen] == [output.token_ids for output in plain]
        assert sum(output.stats.num_proposer_faults for output in chosen) == 0
        known = llm.engine.drafting._choice._sets.alive[-1].governor.candidates
        assert {name for name in known if known[name].in_one_pass} == AT_ONCE
        assert {name for name in known if known[name].scored} == {"ngram"}
        assert max(lengths["dflash"]) <= 7
        assert max(lengths["eagle3"]) <= 5
        assert llm.stats.finished.num_accepted_tokens > 0
        llm.engine.check_integrity()
        llm.engine.check_rest()


def test_passes_are_measured_and_drafts_of_heads_as_they_come(
    paths: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keeping.VARIABLE, str(tmp_path / "costs"))
    with chosen_for(paths) as llm:
        (file,) = (tmp_path / "costs").iterdir()
        table = json.loads(file.read_text())["table"]
        assert all(seconds > 0.0 for seconds in table["passes"].values())
        assert table["drafts"] == {}
        params = SamplingParams(max_tokens=60, temperature=0.0)
        chosen, plain = llm.generate(COPY, params)[0], llm.generate(COPY, params, speculation="none")[0]
        assert chosen.token_ids == plain.token_ids


def test_a_head_that_does_not_pay_is_tried_now_and_then(paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds all of the text at all times, so that nothing is read by which it could be scored while it is idle."""
    monkeypatch.setenv(keeping.VARIABLE, "off")

    def steady(work: StepWork, times: StepTimes) -> StepTimes:
        return StepTimes(0.05 * sum(each.levels for each in work.drafts), 1.0, 0.01)

    head = {"method": "eagle3", "model": paths[2]}
    with LLM(paths[0], dtype="float64", block_size=4, speculation={"method": "auto", "methods": [head]}) as llm:
        llm.engine.drafting.script(FREE, steady)
        params, reasons = SamplingParams(max_tokens=60, seed=3), llm.stats.reasons
        chosen = [llm.generate(prompt, params)[0].token_ids for prompt in (COPY, COPY[1:], [0])]
        assert chosen == [llm.generate(prompt, params, speculation="none")[0].token_ids for prompt in (COPY, COPY[1:], [0])]
        assert reasons["loss"] > 60
        assert 2 <= reasons["trial"] <= 180 / 8

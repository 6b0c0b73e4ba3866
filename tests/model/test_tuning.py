"""`outrider tune` on real models: what shadows say is what the engine does, and the command with its files."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.cache.memory import StateMemory
from outrider.cache.state import SequenceState
from outrider.cli.app import app
from outrider.config import default_model
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.heads.checkpoint import load_heads, save_heads
from outrider.lab.measure import writing
from outrider.lab.measure.decoding_config import DecodingConfig, parse_ways
from outrider.lab.measure.writing import EncodedTask, Run, write
from outrider.lab.prove.tiny import save_tiny_hybrid, save_tiny_llama
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_heads
from outrider.lab.tune.shadow import Shadow, ShadowScorer, score_text
from outrider.lab.tune.tuner import Tuner
from outrider.propose.settings import PLAIN
from outrider.records import DataSettings, Manifest, Record, TargetFacts, write_shard
from tests.model import checkpoints
from tests.model.checkpoints import VOCAB_SIZE
from tests.model.test_assistants import mended_configurations, save_assistant

pytestmark = pytest.mark.by_change(
    *("src/outrider/lab/tune/", "src/outrider/lab/measure/", "src/outrider/lab/cli/tune.py", "tests/model/test_tuning.py")
)
PROMPT = (0, 1, 1, 0)
RECORDED = (0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return save_tiny_llama(folder / "target", 5, speaks=True), save_tiny_llama(folder / "draft", 2, speaks=True)


@pytest.fixture(scope="module")
def llm(pair: tuple[str, str]) -> LLM:
    return LLM(pair[0], speculation="none", dtype="float64", prefix_caching=False, max_num_seqs=4)


def shadow(llm: LLM, config: SpeculationConfig, texts: list[EncodedTask], temperature: float) -> Shadow:
    assert config.method is not None
    found = ShadowScorer(llm.engine, texts, temperature).score(config, llm.proposers.get(config.method))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["ngram:3", "suffix:5", "suffix-tree:5"])
def test_the_shadow_of_a_lookup_takes_the_passes_of_a_replay(llm: LLM, name: str) -> None:
    text = EncodedTask("t", PROMPT, len(RECORDED), RECORDED)
    way = parse_ways([name], None)[-1]
    run = write(llm, [text], way, 0.0)
    found = shadow(llm, way.config, [text], 1.0)
    assert run.drafts is not None
    assert found.num_draft_tokens == run.drafts.num_draft_tokens > 0
    assert found.passes == (run.num_passes or 0) - 1  # the first is that of the prompt
    assert found.num_tokens == len(RECORDED) - 1


def test_the_shadow_of_a_greedy_draft_takes_the_passes_of_the_engine() -> None:
    """With the embedded pair, whose drafts stand here and there."""
    draft = {"method": "draft_model", "model": default_model("draft")}
    with LLM(speculation="none", dtype="float64", prefix_caching=False) as embedded:
        prompt = embedded.prompts.encode("def parse(line):\n")[1]
        for shape in ({"num_draft_tokens": 3}, {"tree": [2, 1]}, {"tree": [2, 2]}):
            config = SpeculationConfig.of({**draft, **shape})
            run = write(embedded, [EncodedTask("t", prompt, 32)], DecodingConfig("x", config), 0.0)
            found = shadow(embedded, config, [EncodedTask("t", prompt, 32, run.token_ids[0])], 0.0)
            assert run.drafts is not None
            assert 3 < run.drafts.num_accepted_tokens < run.drafts.num_draft_tokens
            assert found.passes == pytest.approx((run.num_passes or 0) - 1)
            assert found.num_draft_tokens == pytest.approx(run.drafts.num_draft_tokens)


def test_the_shadow_of_a_drawn_draft_expects_the_passes_of_the_engine(llm: LLM, pair: tuple[str, str]) -> None:
    """Given each text, the mean of its passes is expected exactly; over many texts the differences cancel."""
    config = SpeculationConfig.of({"method": "draft_model", "model": pair[1], "num_draft_tokens": 3, "rule": "token"})
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    outputs = llm.generate([list(PROMPT)] * 120, params, speculation=config)
    differences = []
    for output in outputs:
        (written,) = output.outputs
        text = EncodedTask("t", PROMPT, 32, written.token_ids)
        expected = shadow(llm, config, [text], 1.0).passes
        differences.append(written.stats.num_target_passes - 1 - expected)
    error = stdev(differences) / sqrt(len(differences))
    assert error < 0.5
    assert abs(fmean(differences)) < 5 * error
    assert max(map(abs, differences)) > 0.01  # there was chance in it


def test_the_target_is_a_perfect_draft_of_itself(llm: LLM, pair: tuple[str, str]) -> None:
    config = SpeculationConfig.of({"method": "draft_model", "model": pair[0], "num_draft_tokens": 4})
    run = write(llm, [EncodedTask("t", PROMPT, 21)], DecodingConfig("plain", PLAIN), 1.0)
    text = EncodedTask("t", PROMPT, 21, run.token_ids[0])
    assert shadow(llm, config, [text], 1.0).passes == pytest.approx(4.0)


def test_what_a_lookup_saw_in_a_shadow_does_not_help_it_later(llm: LLM) -> None:
    config = SpeculationConfig.of({"method": "suffix", "shared": True, "num_draft_tokens": 5})
    texts = [EncodedTask(name, PROMPT, len(RECORDED), RECORDED) for name in "ab"]
    first, again = (shadow(llm, config, texts, 1.0) for _ in range(2))
    assert first.passes == again.passes
    assert first.passes < 2 * shadow(llm, config, texts[:1], 1.0).passes  # within it the second text knows the first


def test_what_a_text_says_does_not_depend_on_where_it_is_cut(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = EncodedTask("t", PROMPT, len(RECORDED), RECORDED)
    whole = score_text(llm.engine.runner, text, SamplingParams())
    monkeypatch.setattr("outrider.lab.tune.shadow._CHUNK", 3)
    cut = score_text(llm.engine.runner, text, SamplingParams())
    assert len(whole.probs) == len(RECORDED)
    assert cut.probs == pytest.approx(whole.probs)
    assert cut.ranks == whole.ranks


def test_what_is_kept_of_a_text_with_running_states_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, room_for = list[SequenceState](), StateMemory.room_for

    def noted(memory: StateMemory, *arguments: Any) -> SequenceState:
        states.append(room_for(memory, *arguments))
        return states[-1]

    monkeypatch.setattr(StateMemory, "room_for", noted)
    text = EncodedTask("t", PROMPT, len(RECORDED), RECORDED)
    with LLM(save_tiny_hybrid(tmp_path / "hybrid", 5), speculation="none", dtype="float64") as hybrid:
        whole = score_text(hybrid.engine.runner, text, SamplingParams())
        states.clear()
        monkeypatch.setattr("outrider.lab.tune.shadow._CHUNK", 3)
        cut = score_text(hybrid.engine.runner, text, SamplingParams())
    assert cut.probs == pytest.approx(whole.probs)
    (state,) = states
    assert state.num_computed == len(PROMPT) + len(RECORDED) - 1
    assert [len(record.tape[0]) for record in state.running.records.values()] == [0]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "token_recycling"},
        {"method": "lookahead"},
        {"method": "early_exit"},
        {"method": "draft_model", "tree": "best_first"},
        {"method": "draft_model", "tree": [2, 1]},
        {"method": "draft_model", "min_confidence": 0.4},
    ],
)
def test_what_text_alone_does_not_tell_is_not_predicted(
    tmp_path: Path, pair: tuple[str, str], settings: dict[str, Any]
) -> None:
    target = save_tiny_llama(tmp_path / "deep", 5, num_layers=2)
    if settings["method"] == "draft_model":
        settings = {**settings, "model": pair[1]}
    with LLM(target, speculation="none", dtype="float64") as deep:
        config = SpeculationConfig.of(settings)
        assert config.method is not None
        scorer = ShadowScorer(deep.engine, [EncodedTask("t", PROMPT, len(RECORDED), RECORDED)], 1.0)
        assert scorer.score(config, deep.proposers.get(config.method)) is None


class TestCommand:
    """`outrider tune`."""

    ways: ClassVar[tuple[str, ...]] = ("--way", "draft_model:2", "--way", "suffix:4", "--way", "auto")

    @pytest.fixture(autouse=True)
    def _costs(self, believing: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OUTRIDER_COSTS", "off")

    def tune(self, pair: tuple[str, str], out: Path, *options: str) -> Any:
        fixed = ("tune", pair[0], "--draft-model", pair[1], "--dtype", "float64", "--max-tokens", "16", "--out", str(out))
        return CliRunner().invoke(app, [*fixed, *self.ways, *options])

    def traffic(self, folder: Path, *lines: str) -> str:
        path = folder / "traffic.jsonl"
        path.write_text("\n".join(lines), "utf-8")
        return str(path)

    def test_traffic_is_replayed_and_predicted(self, pair: tuple[str, str], tmp_path: Path) -> None:
        good = [json.dumps({"prompt": text}) for text in ('a"a', 'aa"', '"')]
        path = self.traffic(tmp_path, *good, "no JSON", '{"prompt": 3}')
        result = self.tune(pair, tmp_path / "out", "--traffic", path, "--concurrency", "2", "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert [row["name"] for row in found["rows"]] == ["plain", "draft_model k=2", "suffix k=4", "auto"]
        assert all(row["measured"]["median"] > 0 for row in found["rows"])
        assert [row["predicted"] is None for row in found["rows"]] == [False, False, False, True]
        assert [line.split(":")[0] for line in found["bad_lines"]] == ["line 4", "line 5"]
        assert "traffic.jsonl, line 4" in result.stderr
        assert (found["num_texts"], found["concurrency"]) == (3, 2)
        assert found["recommendation"]["measured"]
        assert {path.name for path in (tmp_path / "out").iterdir()} >= {"results.csv", "results.json"}
        kept = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
        assert kept["rows"] == found["rows"]

    def test_an_old_head_and_a_new_one_are_compared_on_what_was_kept(self, pair: tuple[str, str], tmp_path: Path) -> None:
        old, new = (save_random_heads(tmp_path / name, pair[0], "medusa", 1) for name in ("old", "new"))
        config, network, witness = load_heads(old)
        for weight in network.parameters():
            weight.data.zero_()
        save_heads(old, network, witness)
        facts = TargetFacts(name=pair[0], vocab_size=3, hidden_size=config.target.hidden_size, num_layers=1)
        records = [Record(bytes([i] * 16), 0, True, 2, torch.tensor([0, 1] * 9)) for i in range(2)]
        shard = write_shard(tmp_path / "data", "shard-00000.safetensors", records)
        Manifest(target=facts, settings=DataSettings()).with_shard(shard).save(tmp_path / "data")
        ways = ("--way", f"medusa={old}:2", "--way", f"medusa={new}:2")
        words = ("tune", pair[0], "--dtype", "float64", "--out", str(tmp_path / "out"), "--data", str(tmp_path / "data"))
        result = CliRunner().invoke(app, [*words, *ways, "--json"])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert [row["name"] for row in found["rows"]] == ["plain", "medusa old k=2", "medusa new k=2"]
        assert all(row["measured_tokens"] >= 1 for row in found["rows"])
        assert found["recommendation"]["name"] in ("plain", "medusa old k=2", "medusa new k=2")
        assert (tmp_path / "out" / "profile.json").exists()

    def test_heads_that_judge_places_and_assistants_are_tuned(self, tmp_path: Path) -> None:
        llama = save_tiny_llama(tmp_path / "llama", 5, num_layers=3, speaks=True)
        head = save_random_dflash(tmp_path / "head", llama, "deepspec", scale=0.7, block_size=3)
        gemma = checkpoints.save("gemma4_text", tmp_path / "gemma", seed=3)
        with mended_configurations():
            assistant = save_assistant(tmp_path / "assistant", gemma)
        for target, method, draft, size in (
            (llama, "dspark", head, (3, 8)), (gemma, "gemma4_assistant", assistant, (VOCAB_SIZE, 32)),
        ):  # fmt: skip
            facts = TargetFacts(name=target, vocab_size=size[0], hidden_size=size[1], num_layers=3)
            records = [Record(bytes([i] * 16), 0, True, 2, torch.tensor([0, 1] * 9)) for i in range(2)]
            shard = write_shard(tmp_path / method, "shard-00000.safetensors", records)
            Manifest(target=facts, settings=DataSettings()).with_shard(shard).save(tmp_path / method)
            words = ("tune", target, "--dtype", "float64", "--out", str(tmp_path / "out"), "--data", str(tmp_path / method))
            result = CliRunner().invoke(app, [*words, "--way", f"{method}={draft}:2", "--json"])
            assert result.exit_code == 0, result.output
            plain, row = json.loads(result.stdout)["rows"]
            assert (plain["name"], row["name"].split()[0]) == ("plain", method)
            assert row["measured"]["median"] > 0
            assert row["predicted"] is None

    def test_a_log_is_scored_and_nothing_is_generated(
        self, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("outrider.lab.tune.tuner.interleave", None)
        answer = "".join('"a'[token] for token in RECORDED)
        path = self.traffic(tmp_path, json.dumps({"prompt": "a", "answer": answer}), json.dumps({"prompt": "a"}))
        result = self.tune(pair, tmp_path / "out", "--log", path)
        assert result.exit_code == 0, result.output
        found = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
        assert all(row["measured"] is None for row in found["rows"])
        assert [row["predicted"] is None for row in found["rows"]] == [False, False, False, True]
        assert not found["recommendation"]["measured"]
        assert "predicted" in result.stdout
        assert "line 2" in result.stderr

    def test_gains_that_cannot_be_are_neither_recommended_nor_kept(
        self, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = writing.write

        def loaded(llm: LLM, tasks: Any, way: DecodingConfig, temperature: float) -> Run:
            found = real(llm, tasks, way, temperature)
            return replace(found, decode_seconds=30.0 if way.plain else 1.0)

        monkeypatch.setattr(writing, "write", loaded)
        monkeypatch.setattr(writing, "SLACK", 1.05)
        result = self.tune(pair, tmp_path / "out")
        assert result.exit_code == 1, result.output
        assert "Nothing is recommended: draft_model k=2, suffix k=4, auto gained more than their" in result.stdout
        assert "--profile" not in result.stdout
        assert not (tmp_path / "out" / "profile.json").exists()
        rows = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))["rows"]
        assert [(row["disturbed"], row["measured"] is None) for row in rows] == [(False, False)] + 3 * [(True, True)]

    def test_predictions_from_times_that_cannot_be_are_not_kept(
        self, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flat = ({1: 1.0, 64: 1.0}, "16 rows seemed to cost no more than one")
        monkeypatch.setattr("outrider.lab.tune.tuner.pass_seconds", lambda *_: flat)
        answer = "".join('"a'[token] for token in RECORDED)
        result = self.tune(
            pair, tmp_path / "out", "--log", self.traffic(tmp_path, json.dumps({"prompt": "a", "answer": answer}))
        )
        assert result.exit_code == 1, result.output
        assert "16 rows seemed to cost no more than one" in result.stdout
        rows = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))["rows"]
        assert {row["predicted"] for row in rows} == {None}
        assert rows[1]["predicted_tokens"] > 1  # which no clock tells
        assert not (tmp_path / "out" / "profile.json").exists()

    def test_a_way_that_cannot_be_had_is_left_out_with_the_reason(self, pair: tuple[str, str], tmp_path: Path) -> None:
        other = save_tiny_llama(tmp_path / "other", 3, vocab_size=5)
        result = self.tune(pair, tmp_path / "out", "--way", f"draft_model={other}:3", "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert "draft_model other k=3" not in [row["name"] for row in found["rows"]]
        assert any("draft_model other k=3 was left out" in remark for remark in found["remarks"])

    def test_an_interrupt_leaves_what_was_there(
        self, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = tmp_path / "out" / "results.json"
        kept.parent.mkdir()
        kept.write_text("earlier", "utf-8")

        def interrupted(self: Tuner) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Tuner, "_recommend", interrupted)
        assert self.tune(pair, tmp_path / "out").exit_code != 0
        assert [path.name for path in kept.parent.iterdir()] == ["results.json"]
        assert kept.read_text("utf-8") == "earlier"

    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            (("--concurrency", "0"), InvalidParameterError),
            (("--temperature", "-1"), InvalidParameterError),
            (("--traffic", "/no/such/file"), InvalidParameterError),
            (("--traffic", "a", "--log", "b"), ContradictionError),
            (("--traffic", "a", "--data", "b"), ContradictionError),
            (("--data", "/no/such/folder"), InvalidParameterError),
            (("--way", "no_such_way"), InvalidParameterError),
            (("--out", "/dev/null/out"), InvalidParameterError),
        ],
    )
    def test_bad_input_is_a_typed_error(
        self, pair: tuple[str, str], tmp_path: Path, options: tuple[str, ...], kind: type[Exception]
    ) -> None:
        result = self.tune(pair, tmp_path / "out", *options)
        assert isinstance(result.exception, kind), result.output

"""The instrument on a model so small that every path can be walked: replay, resume, memory, and the verb with its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from outrider.cache.pool import LayerReach
from outrider.cli.app import app
from outrider.config import ModelConfig, default_model
from outrider.engine.drafting.proposers import MAX_IDLE
from outrider.errors import EngineAnswerError, InvalidParameterError, InvalidPromptError
from outrider.lab.bench.costs import Arithmetic, CostPlan, prefill
from outrider.lab.bench.results import ModelResult, PrefillResult
from outrider.lab.bench.session import Session, _positions
from outrider.lab.bench.settings import BenchSettings
from outrider.lab.measure import machine
from outrider.lab.measure.decoding_config import parse_ways
from outrider.lab.measure.row_costs import row_costs
from outrider.lab.measure.writing import EncodedTask, Run, write
from outrider.lab.peers.base import Peer, PeerMode, PeerModels, PeerRun
from outrider.lab.peers.known import PEERS
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle
from outrider.llm import LLM
from outrider.loading.configuration import read_context
from outrider.model import memory
from outrider.model.memory import PassTimer
from outrider.params import SamplingParams
from outrider.propose.settings import Method, ProposerContext
from outrider.widen import stretched, wide_module, widen

pytestmark = pytest.mark.by_change(
    *("src/outrider/lab/bench/", "src/outrider/lab/measure/", "src/outrider/lab/cli/bench.py", "tests/model/test_bench.py")
)
ANSWER = (0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0)
PROMPTS = "\n".join(json.dumps({"prompt": text}) for text in ('a"a', 'aa"', '"'))
RECORDED = json.dumps({"prompt": "a", "answer": "".join('"a'[token] for token in ANSWER)})
read_bandwidth, product_peak = machine.read_bandwidth, machine.product_peak


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), 5, speaks=True)


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    return LLM(tiny, speculation="none", prefix_caching=False, max_num_seqs=4)


@pytest.mark.parametrize("name", ["plain", "ngram:3", "suffix:5", "suffix-tree:5"])
def test_a_replay_is_followed_to_the_letter(llm: LLM, name: str) -> None:
    way = parse_ways([name], None)[-1]
    found = write(llm, [EncodedTask("t", (1, 0, 1), 11, ANSWER)], way, 0.0)
    assert found.token_ids == (ANSWER,)
    assert (found.num_passes == len(ANSWER)) is way.plain
    assert found.drafts is not None
    assert len(ANSWER) == (found.num_passes or 0) + found.drafts.num_accepted_tokens


@pytest.mark.core
def test_the_clock_adds_up(llm: LLM) -> None:
    tasks = [EncodedTask(f"t{i}", (1, 0, 1), 9) for i in range(3)]
    found = write(llm, tasks, parse_ways(["ngram:2"], None)[-1], 1.0)
    assert [len(ids) for ids in found.token_ids] == [9, 9, 9]  # no end of text shortens anybody's
    assert found.decode_seconds is not None
    assert found.seconds == pytest.approx(min(found.first_token_seconds) + found.decode_seconds)
    assert found.decode_tokens == 24
    assert len(found.gaps) == (found.num_passes or 0) - 3
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert not llm.engine.has_work


def test_a_prompt_that_fails_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(InvalidPromptError):
        write(llm, [EncodedTask("a", (1,), 4), EncodedTask("b", (99,), 4)], parse_ways([], None)[0], 1.0)
    assert not llm.engine.has_work


def test_costs_of_rows_are_measured_where_they_fit_behind_every_context(llm: LLM) -> None:
    free = llm.engine.runner.blocks.num_free
    costs = row_costs(PassTimer(llm.engine.runner, 64), (8, 40), (1, 4, 32, 500), 64, 2).seconds
    assert {context: list(found) for context, found in costs.items()} == {8: [1, 4, 32], 40: [1, 4]}
    assert all(seconds > 0 for found in costs.values() for seconds in found.values())
    assert llm.engine.runner.blocks.num_free == free


def test_a_pass_that_is_timed_leaves_the_text_as_it_was(llm: LLM) -> None:
    timer = PassTimer(llm.engine.runner, 64)
    timer.compute(40)

    def logits() -> torch.Tensor:
        return timer._runner.forward([timer._segment(40, 8, 0)]).logits

    before = logits()
    timer.seconds(5, 30, logits=False)
    timer.compute(20)
    assert torch.allclose(logits(), before, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[0], before[1])  # the tokens differ, so a wrong one would be noticed


def test_parts_of_a_prompt_are_timed_and_their_arithmetic_is_counted(llm: LLM) -> None:
    arithmetic = Arithmetic.of(llm.engine.runner.loaded.model)
    assert arithmetic is not None
    found = prefill(PassTimer(llm.engine.runner, 64), [(0, 16), (40, 8)], arithmetic, 2)
    assert [(part.start, part.rows) for part in found] == [(0, 16), (40, 8)]
    assert all(part.seconds > 0 for part in found)
    assert [part.operations for part in found] == [arithmetic.operations(0, 16), arithmetic.operations(40, 8)]


@pytest.mark.parametrize("start", [3, 300])
def test_the_arithmetic_of_a_row_is_what_torch_counts(start: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model("target"), dtype=torch.float32, attn_implementation="eager")
    arithmetic = Arithmetic.of(model)
    assert arithmetic is not None
    with torch.inference_mode():
        past = model(torch.ones(1, start, dtype=torch.long)).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=past)
    assert arithmetic.operations(start, 1) == pytest.approx(counter.get_total_flops(), rel=1e-4)


def test_a_row_attends_as_far_as_its_layer_reaches() -> None:
    reaches = (LayerReach(), LayerReach(window=4), LayerReach(chunk=4))
    arithmetic = Arithmetic(row_weights=1000, head_weights=50, pair_operations=(10,) * len(reaches), reaches=reaches)
    keys = (6 + 7 + 8) + (4 + 4 + 4) + (2 + 3 + 4)  # of the rows at 5, 6 and 7
    assert arithmetic.operations(5, 3) == 2 * (3 * 1000 + 50) + 10 * keys


def test_what_does_not_fit_is_refused_and_a_full_run_measures_what_is_missing(tmp_path: Path) -> None:
    for asked, field in (({"contexts": (64,)}, "context"), ({"chunks": (65,)}, "chunk")):
        with pytest.raises(InvalidParameterError, match="the context of the model is 64 tokens") as caught:
            CostPlan.of(BenchSettings(**asked), 64)
        assert caught.value.field == field
    small = CostPlan.of(BenchSettings(), 64)
    assert (small.contexts, small.parts) == ((32,), ((0, 32),))  # a small model has a smaller context than the usual one
    asked = CostPlan.of(BenchSettings(contexts=(8, 40), chunks=(16, 32)), 64)
    assert asked.parts == ((0, 16), (0, 32), (8, 16), (8, 32), (40, 16))
    known = ModelResult(
        pass_seconds={8: {}, 40: {}},
        prefill=[PrefillResult(start=start, rows=rows, seconds=1, operations=None) for start, rows in asked.parts],
        weight_bytes=None,
        num_parameters=1,
    )
    assert asked.covered(known)
    assert not asked.covered(known.model_copy(update={"pass_seconds": {8: {}}}))
    assert not asked.covered(known.model_copy(update={"prefill": known.prefill[1:]}))
    assert not asked.covered(None)


def test_a_stretched_copy_computes_the_same_and_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(default_model("target"), source)
    before = read_context(ModelConfig(model=str(source)))
    longer = stretched(str(source), 2 * before)
    assert (read_context(ModelConfig(model=longer)), read_context(ModelConfig(model=str(source)))) == (2 * before, before)
    assert stretched(str(source), 2 * before) == longer
    texts = []
    for folder in (str(source), longer):
        with LLM(folder, dtype="float32", speculation="none", kv_cache_tokens=64) as llm:
            texts.append(llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=8))[0].token_ids)
    assert texts[0] == texts[1]


def test_the_wide_target_is_stretched_only_where_a_context_asks_for_it() -> None:
    def positions(**asked: Any) -> int | None:
        return _positions(BenchSettings(**asked), 2048)

    assert positions(wide=True) is None
    assert positions(wide=True, contexts=(128, 1900)) is None
    assert positions(wide=True, contexts=(2000,)) == 4096
    assert positions(wide=True, contexts=(128, 16_000), chunks=(512,)) == 32_768
    assert positions(wide=True, chunks=(2048,)) is None
    assert positions(contexts=(16_000,)) is None  # which is refused for other targets


def test_what_a_token_reads(llm: LLM) -> None:
    model = llm.engine.runner.loaded.model
    everything = sum(w.numel() * w.element_size() for w in model.parameters())
    table = model.get_input_embeddings().weight
    assert memory.weight_bytes(model) == everything - table.numel() * table.element_size()
    tied = LLM(dtype="bfloat16", speculation="none", kv_cache_tokens=64).engine.runner
    read = sum(w.numel() * w.element_size() for w in tied.loaded.model.parameters())
    assert memory.weight_bytes(tied.loaded.model) == read
    packed = tied.backend.weight_bytes(tied.loaded.model)
    assert packed is None or 0.99 * read < packed <= read * 1.02
    rounded = LLM(dtype="bfloat16", speculation="none", quantization="int8", kv_cache_tokens=64).engine.runner
    assert packed is None or (rounded.backend.weight_bytes(None) or 0) < 0.52 * packed


def test_the_machine_reads_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e7 < read_bandwidth(torch.device("cpu"), 2**20, repeats=2) < 1e13
    assert 1e7 < product_peak(torch.device("cpu"), torch.float32, 64, repeats=2) < 1e14
    monkeypatch.setattr(machine, "_PATIENCE", 0.0)
    assert 1e7 < product_peak(torch.device("cpu"), torch.float32, 64, repeats=10**9) < 1e14, "it does not go on for ever"


@pytest.mark.parametrize(("patience", "sides"), [(1e9, [8, 8, 64, 64]), (0.0, [8, 8])])
def test_slow_products_are_of_small_matrices(patience: float, sides: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without products of bf16 would take half a minute for one of the usual size."""
    made: list[int] = []
    stock = torch.rand

    def rand(*shape: int, **how: Any) -> torch.Tensor:
        made.append(shape[0])
        return stock(*shape, **how)

    monkeypatch.setattr(machine, "_PATIENCE", patience)
    monkeypatch.setattr(torch, "rand", rand)
    assert product_peak(torch.device("cpu"), torch.float32, 64, repeats=2) > 0.0
    assert made == sides
    peak = machine.MemoryWatch(torch.device("cpu")).peak()
    assert peak.cuda is None
    assert peak.resident is None or peak.resident > 2**24


def settings(tiny: str, folder: Path, **more: Any) -> BenchSettings:
    (folder / "prompts.jsonl").write_text(PROMPTS, "utf-8")
    fixed: dict[str, Any] = {
        "model": tiny, "prompts": folder / "prompts.jsonl", "ways": ("ngram:2",), "samplings": ("T=1",), "batches": (1, 2),
        "dtypes": ("float64",), "max_tokens": 5, "num_prompts": 2, "full": True, "out": folder / "out",
    }  # fmt: skip
    return BenchSettings(**{**fixed, **more})


@pytest.fixture(autouse=True)
def _small_reads(believing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(machine, "product_peak", lambda *_: 1e11)


def test_a_full_run_goes_on_where_it_stopped(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.lab.measure import writing

    written: list[int] = []
    interruptions = iter([True])
    real = writing.write

    def counting(*arguments: Any) -> Run:
        written.append(len(arguments[1]))
        if len(written) == 8 and next(interruptions, False):
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(writing, "write", counting)
    with pytest.raises(KeyboardInterrupt):
        Session(settings(tiny, tmp_path)).run()
    assert written == [1] * 6 + [2] * 2  # the first cell, and into the second
    resumed = Session(settings(tiny, tmp_path))
    assert len(resumed.run().cells) == 2
    assert set(written[8:]) == {2}
    assert [found.cell.batch for found in resumed.measured] == [1, 2]
    written.clear()
    assert len(Session(settings(tiny, tmp_path)).run().cells) == 2
    assert written == []
    Session(settings(tiny, tmp_path, ways=("ngram:3",))).run()  # another comparison
    assert written
    written.clear()
    Session(settings(tiny, tmp_path, full=False)).run()  # who asks for less than everything wants it measured now
    assert written


def test_a_bandwidth_that_cannot_be_is_measured_again(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy moment read a byte a second."""
    read = iter([1.0, 1e12])
    monkeypatch.setattr(machine, "read_bandwidth", lambda *_: next(read))
    monkeypatch.setattr(machine, "_largest_cache", lambda: 0)
    monkeypatch.setattr("outrider.lab.bench.results.SLACK", 1.05)
    found = Session(settings(tiny, tmp_path, batches=(1,))).run()
    (cell,) = found.cells.values()
    assert found.bandwidth == 1e12
    assert 0 < (cell.ways[0].bandwidth_share or 0) < 1
    slow = iter([1.0] * 9)
    monkeypatch.setattr(machine, "read_bandwidth", lambda *_: next(slow))
    found = Session(settings(tiny, tmp_path, batches=(1,), out=tmp_path / "other")).run()
    assert next(iter(found.cells.values())).ways[0].bandwidth_share is None
    assert len(list(slow)) == 6
    assert any("faster than torch reads memory" in said for said in found.remarks)


def test_many_methods_do_not_put_each_other_out(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposer that is built anew in every round has forgotten what its trees have learnt, and loads its model again."""
    built: list[Method] = []
    real = ProposerContext.build
    monkeypatch.setattr(ProposerContext, "build", lambda self, method: built.append(method) or real(self, method))
    ways = ("ngram:2", "suffix:2", "suffix-tree:2", "lookahead:7", "token_recycling:4", "auto")
    Session(settings(tiny, tmp_path, ways=ways, num_prompts=3, batches=(1,))).run()
    assert len(built) > MAX_IDLE
    assert len(built) == len(set(map(repr, built)))


class _Rival(Peer):
    """Writes zeros, a thousand tokens a second; one of its modes crashes from the second text that counts on: a disturbed
    round is measured again."""

    name = "rival"
    asked: ClassVar[list[tuple[str, int]]] = []
    given: ClassVar[list[tuple[str | None, str | None]]] = []

    def __init__(self, models: PeerModels) -> None:
        self.version, self.models = "7", models
        self.given.append((models.draft, models.head))

    def __exit__(self, *exception: object) -> None:
        self.asked.append(("closed", 0))

    @staticmethod
    def missing() -> str | None:
        return None

    @staticmethod
    def building(models: PeerModels) -> Any:
        raise NotImplementedError

    @property
    def precision(self) -> str:
        return "weights of lead"

    def modes(self, *, full: bool, batch: int = 1) -> list[PeerMode]:
        assert batch in (1, 2)
        return [PeerMode("plain", "plain"), PeerMode("ngram k=2", "ngram", 2), PeerMode("ngram k=9", "ngram", 9)]

    def generate(self, mode: PeerMode, prompts: Any, *, max_tokens: int, temperature: float, seed: Any) -> PeerRun:
        self.asked.append((mode.name, max_tokens))
        if mode.num_draft_tokens == 9 and self.asked.count((mode.name, max_tokens)) >= 2:
            raise EngineAnswerError("rival", "fell over", "None.")
        accepted = 2 * len(prompts) if mode.kind == "ngram" else 0
        texts, first = ((0,) * max_tokens,) * len(prompts), (0.001,) * len(prompts)
        return PeerRun(
            texts, max_tokens / 1000, first, (max_tokens - 1) * len(prompts), (max_tokens - 1) / 1000, 4, accepted
        )


def test_peers_are_told_what_a_draft_is(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of EAGLE-3 is no draft model, and a head of another kind is nothing that they read."""
    monkeypatch.setitem(PEERS, "rival", _Rival)
    deep = save_tiny_llama(tmp_path / "deep", 5, num_layers=4, speaks=True)
    head = save_random_eagle(tmp_path / "head", deep, "safeailab", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    usual: dict[str, Any] = {"ways": ("plain",), "peers": ("rival",), "batches": (1,), "out": None, "full": False}
    for draft in (tiny, head, save_random_dflash(tmp_path / "block", deep)):
        Session(settings(deep, tmp_path, draft_model=draft, **usual)).run()
    assert _Rival.given[-3:] == [(tiny, None), (None, head), (None, None)]


def test_peers_take_turns_and_who_cannot_is_named(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(_Rival):
        name = "absent"

        @staticmethod
        def missing() -> str | None:
            return "lead not installed; run: pip install lead"

    for name in reversed(list(PEERS)):  # undone backwards, which restores their order
        monkeypatch.delitem(PEERS, name)
    monkeypatch.setitem(PEERS, "rival", _Rival)
    monkeypatch.setitem(PEERS, "absent", Absent)
    found = Session(settings(tiny, tmp_path, peers=("all",), max_tokens=6)).run()
    one, two = found.cells.values()
    assert one.cell.peers == ("rival 7",)
    assert [way.name for way in one.ways] == ["plain", "ngram k=2", "rival: plain", "rival: ngram k=2"]
    drafting = one.ways[-1]
    assert drafting.tokens_per_second is not None
    assert drafting.tokens_per_second.median == pytest.approx(1000)
    assert drafting.tau == pytest.approx(6 / 4)
    assert drafting.speedup is not None
    assert drafting.loops is False  # texts of six tokens hold no 8-gram
    assert [way.name for way in two.ways] == [way.name for way in one.ways]  # two texts at a time, by peers too
    batched = two.ways[-2].tokens_per_second
    assert batched is not None
    assert batched.median == pytest.approx(2000)
    assert two.ways[-1].tau == pytest.approx(6 / 4)
    said = "\n".join(found.remarks)
    for part in ("absent did not take part", "pip install lead", "rival: ngram k=9 dropped out", "weights of lead"):
        assert part in said
    assert _Rival.asked[-1] == ("closed", 0)
    again = Session(settings(tiny, tmp_path, peers=("all",), max_tokens=6)).run()
    assert "rival: ngram k=9 dropped out" in "\n".join(again.remarks)  # also of cells that are not measured again


def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(tiny: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for more, error, says in (
        ({"ways": ("psychic",)}, InvalidParameterError, "psychic"),
        ({"ways": ("draft_model:2",)}, InvalidParameterError, "no draft model"),
        ({"max_tokens": 62}, InvalidPromptError, "in a context of 64"),
        ({"contexts": (64,)}, InvalidParameterError, "the context of the model is 64"),
        ({"device": "cuda:77"}, InvalidParameterError, "cuda:77"),
        ({"draft_model": str(empty)}, InvalidParameterError, "the folder is empty"),
        ({"model": str(empty)}, InvalidParameterError, "the folder is empty"),
    ):
        with pytest.raises(error, match=says):
            Session(settings(tiny, tmp_path, **more))  # which is not run


def test_the_verb_writes_tables_page_numbers_and_plots(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(PROMPTS, "utf-8")
    (tmp_path / "mail.jsonl").write_text(RECORDED, "utf-8")
    out = tmp_path / "out"
    files = ["--prompts", str(tmp_path / "mine.jsonl"), "--replay", str(tmp_path / "mail.jsonl"), "--out", str(out)]
    ways = ["--draft-model", tiny, "--way", "draft_model:2", "--way", "ngram:2", "--context", "8", "--context", "40"]
    ways += ["--chunk", "4", "--chunk", "16"]
    loads = ["--sampling", "greedy", "--sampling", "T=1", "-b", "1", "-b", "2", "-n", "3", "--max-tokens", "14"]
    command = ["bench", tiny, *ways, *loads, "--dtype", "float64", *files]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    written = {path.name for path in out.iterdir()}
    images = {f"{name}.{kind}" for name in ("speedup", "row_costs", "prefill", "throughput") for kind in ("png", "svg")}
    assert {"results.json", "results.md", *images} <= written
    found = json.loads((out / "results.json").read_text("utf-8"))
    cells = [value["cell"] for value in found["cells"].values()]
    assert {(c["workload"], c["sampling"], c["batch"]) for c in cells} == {
        *(("mine", sampling, batch) for sampling in ("greedy", "T=1") for batch in (1, 2)), ("replay/mail", "replay", 1),
    }  # fmt: skip
    for value in found["cells"].values():
        drafted = [way for way in value["ways"] if way["name"] == "draft_model k=2"]
        assert bool(drafted) is (value["cell"]["sampling"] != "replay")
        for way in drafted:  # the target drafts for itself: every token stands
            assert way["acceptance"] == pytest.approx(1.0)
            assert way["tau"] == pytest.approx(way["expected_tokens"])
    (costs,) = found["models"].values()
    assert {context: len(seconds) for context, seconds in costs["pass_seconds"].items()} == {"8": 10, "40": 9}
    assert {(part["start"], part["rows"]) for part in costs["prefill"]} == {(at, n) for at in (0, 8, 40) for n in (4, 16)}
    page = (out / "results.md").read_text("utf-8")
    for text in (shown.stdout, page):
        assert "replay leaves draft models out" in text
        assert "replay/mail" in text
        assert "loops" in text
        assert found["advice"]
        for said in found["advice"]:
            for line in (said["text"], said["python"], said["command"]):
                assert line is None or line in text
    as_json = CliRunner().invoke(app, [*command[:-2], "--json"])
    assert set(json.loads(as_json.stdout)["cells"]) == set(found["cells"])


@pytest.mark.core
def test_bad_usage_is_one_clear_line(tiny: str, tmp_path: Path) -> None:
    from outrider.errors import InputError

    for arguments in (
        ["--workload", "poetry"],
        ["--batch", "65"],
        ["--prompts", str(tmp_path / "no")],
        ["--peers", "x"],
        ["--device", "cuda:77"],
    ):
        result = CliRunner().invoke(app, ["bench", tiny, *arguments])
        assert isinstance(result.exception, InputError), result.output


def test_a_wide_copy_computes_the_same_function(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = default_model("target")
    widen(source, str(tmp_path), 2, 2, torch.float32)
    ids = torch.tensor([[5, 90, 17, 300]])
    with torch.inference_mode():
        narrow, wide = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits for path in (source, str(tmp_path))
        )
    assert torch.allclose(narrow, wide, atol=2e-3)


def test_layers_that_are_added_to_a_wide_copy_change_nothing() -> None:
    ids = torch.tensor([[5, 90, 17, 300]])
    with torch.inference_mode():
        wide, deep = (
            wide_module(default_model("draft"), 3, 2, torch.float32, layers=layers)(ids).logits for layers in (None, 6)
        )
    assert torch.equal(wide, deep)

"""Every family through every backend that drives it writes what stock transformers writes, and a wrong mask is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, Ngram, SamplingParams, SpeculationConfig, Suffix
from outrider.cache.pool import LayerReach, StateKind
from outrider.errors import UnsupportedModelError
from outrider.kernels.library import available_sets
from outrider.loading import hf_modules
from outrider.model import attention, context
from outrider.model.batch import Segment
from outrider.model.runner import ModelRunner
from outrider.propose.own_layers import EarlyExit
from tests.model import checkpoints
from tests.model.core import core

PROMPT = [(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(23)]  # longer than window and chunk
NGRAM = SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=4)
EXIT = SpeculationConfig(method=EarlyExit(layers=2), num_draft_tokens=3)
BRANCHES = SpeculationConfig(method=Suffix(min_match=1, branches=True), num_draft_tokens=4)
TREE = (-1, 0, 0, 1, 2, 2, 4)  # two branches, with uncles


#: One family for each way of the backends: windows, both kinds of layers with capped scores, added positions, sinks and
#: experts, keys and values of two widths, factors that change with the length, attention that cannot be replaced, and
#: layers that read keys and values of others.
FEW = ("mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3", "longrope", "falcon", "gemma4_text")
#: Where a change may concern one family and no other.
OF_FAMILIES = ("src/outrider/model/", "src/outrider/kernels/", "tests/model/checkpoints.py")


@pytest.fixture(scope="module", params=core(checkpoints.FAMILIES, FEW, *OF_FAMILIES))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return checkpoints.save(request.param, folder / request.param)


#: "paged_stock" is "paged" without our kernels, as on a GPU.
BACKENDS = ["fused", "paged", "paged_stock", "gather"]


def load(path: str, backend: str) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        if backend == "paged_stock":
            patch.setenv("OUTRIDER_KERNELS", "off")
        name: Any = backend.removesuffix("_stock")
        return LLM(path, dtype="float64", attention_backend=name, block_size=4, max_num_batched_tokens=9, max_num_seqs=4)


#: Families whose attention cannot be replaced; "auto" finds the other backend.
GATHER_ONLY = ("falcon",)


def skip_what_does_not_fit(path: str, backend: str) -> None:
    if backend == "fused" and not (available_sets() and checkpoints.is_described(Path(path).name)):
        pytest.skip("no description for the kernels, or no kernels")
    if backend not in ("fused", "gather") and Path(path).name in GATHER_ONLY:
        with pytest.raises(UnsupportedModelError):
            load(path, backend)
        assert load(path, "auto").engine.runner.backend.name == "gather"
        pytest.skip("refused, and gather is chosen instead")


@pytest.fixture(scope="module")
def stock_text(path: str) -> tuple[int, ...]:
    """What the stock model writes behind the prompt."""
    return checkpoints.greedy_by_transformers(path, PROMPT, 20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_what_transformers_writes(path: str, stock_text: tuple[int, ...], backend: str) -> None:
    """Row by row and with trees; the next test drafts chains, too."""
    skip_what_does_not_fit(path, backend)
    llm = load(path, backend)
    params = SamplingParams(temperature=0, max_tokens=20)
    for speculation in ("none", BRANCHES):
        assert llm.generate(PROMPT, params, speculation=speculation)[0].token_ids == stock_text


def test_seeded_drafts_write_the_plain_text(path: str) -> None:
    """Chains, and layers of the target's own."""
    llm, params = load(path, "auto"), SamplingParams(seed=7, max_tokens=20)
    plain = llm.generate(PROMPT, params, speculation="none")[0].token_ids
    for speculation in (NGRAM, EXIT):
        assert llm.generate(PROMPT, params, speculation=speculation)[0].token_ids == plain
    assert llm.stats.finished.num_proposer_faults == 0


@torch.inference_mode()
def path_logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Logits after the last token, from a fresh plain chain."""
    table = runner.blocks.allocate(runner.blocks.blocks_for(len(tokens)))
    logits = runner.forward([Segment(tokens, 0, table, logits_from=len(tokens) - 1)]).logits[0]
    runner.blocks.free(table)
    return logits


def tree_error(runner: ModelRunner) -> float:
    """Largest difference between a tree's rows, computed beside a chain, and plain chains of each path."""
    rows = [3, 9, 14, 27, 33, 2, 50]
    table = runner.blocks.allocate(runner.blocks.blocks_for(len(PROMPT) + len(rows)))
    other = runner.blocks.allocate(runner.blocks.blocks_for(12))
    runner.forward([Segment(PROMPT, 0, table), Segment(PROMPT[:8], 0, other)])
    out = runner.forward([Segment(PROMPT[8:12], 8, other), Segment(rows, len(PROMPT), table, TREE)])
    got = out.logits[out.logits_spans[1][0] :]
    worst = 0.0
    for row in range(len(rows)):
        line, at = [], row
        while at >= 0:
            line.append(rows[at])
            at = TREE[at]
        worst = max(worst, float((path_logits(runner, PROMPT + line[::-1]) - got[row]).abs().max()))
    runner.blocks.free(table)
    runner.blocks.free(other)
    return worst


@pytest.mark.parametrize("backend", BACKENDS)
def test_tree_rows_equal_plain_paths(path: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_what_does_not_fit(path, backend)
    runner = load(path, backend).engine.runner
    if backend == "fused":
        assert tree_error(runner) == 0  # a row's bits are a function of its path
        return
    assert tree_error(runner) < 1e-5  # float32 islands in norms and rotary factors

    def with_uncles(segment: Segment) -> np.ndarray:
        seen: np.ndarray = ancestry(segment)
        seen[-1] = True  # the last row sees them
        return seen

    ancestry = Segment.ancestry.func
    monkeypatch.setattr(Segment, "ancestry", property(with_uncles))
    assert tree_error(runner) > 1e-3


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "fused"])  # which knows it from the load
@pytest.mark.parametrize("path", core(checkpoints.WINDOWED, ("mistral", "gemma2"), *OF_FAMILIES), indirect=True)
def test_a_forgotten_window_is_noticed(
    path: str, stock_text: tuple[int, ...], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(path, backend)
    if backend == "gather":
        real = context.visible
        monkeypatch.setattr("outrider.model.attention.visible", lambda s, _, **rest: real(s, LayerReach(), **rest))
    else:
        monkeypatch.setattr(llm.engine.runner, "_reaches", [LayerReach()] * llm.engine.runner.num_layers)
    assert llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))[0].token_ids != stock_text


@pytest.mark.parametrize("path", ["gemma2", "gemma3", "qwen2", "gpt_oss"], indirect=True)
def test_every_layer_type_is_present(path: str) -> None:
    llm = load(path, "auto")
    fused = available_sets() and checkpoints.is_described(Path(path).name)
    assert llm.engine.runner.backend.name == ("fused" if fused else "paged")
    assert {layer.type_name for layer in llm.engine.runner.loaded.layers} == {"sliding_attention", "full_attention"}


def test_latent_attention_has_values_of_another_width_and_dense_and_expert_layers(tmp_path: Path) -> None:
    """The kernels know one width, so that the narrower ones have zeros behind them there."""
    path = checkpoints.save("deepseek_v3", tmp_path / "deepseek_v3")
    for backend in ("paged", "paged_stock"):
        runner = load(path, backend).engine.runner
        runner.forward([Segment(PROMPT, 0, runner.blocks.allocate(6))])
        keys, values = runner.pool.read(0, slice(0, 1))
        assert (keys.shape[-1] != values.shape[-1]) is (backend == "paged_stock" or not available_sets())
    kinds = [type(layer.mlp).__name__ for layer in runner.loaded.model.model.layers]
    assert len(set(kinds)) == 2


@pytest.mark.parametrize("backend", ["paged", "paged_stock"])
@pytest.mark.parametrize(("family", "forgotten"), [("gpt_oss", "sinks"), ("gemma2", "softcap")])
def test_forgotten_sinks_and_soft_caps_are_noticed(
    family: str, forgotten: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(checkpoints.save(family, tmp_path / family), backend)
    params, real = SamplingParams(temperature=0, max_tokens=20, logprobs=0), attention.Scores
    want = llm.generate(PROMPT, params)[0].logprobs
    monkeypatch.setattr(attention, "Scores", lambda *values: replace(real(*values), **{forgotten: None}))
    assert llm.generate(PROMPT, params)[0].logprobs != want


ENCODERS = [(layers, seed, dtype) for layers, seed in ((1, 0), (4, 0), (4, 3), (4, 5)) for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("layers", "seed", "dtype"), core(ENCODERS, ENCODERS[::3]))
def test_encoders_are_refused(tmp_path: Path, layers: int, seed: int, dtype: Any) -> None:
    from transformers import BertConfig, BertLMHeadModel

    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    shape["num_hidden_layers"] = layers
    torch.manual_seed(seed)
    model = BertLMHeadModel(BertConfig(**shape))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.5)
    model.save_pretrained(tmp_path / "bert")
    with pytest.raises(UnsupportedModelError, match="encoder"):
        LLM(str(tmp_path / "bert"), dtype=dtype)


@pytest.mark.parametrize(
    ("name", "keeps", "forgets"),
    [
        ("full_attention", {StateKind.KEYS_AND_VALUES}, True),
        ("mlp", set(), True),
        ("conv", {StateKind.CONVOLUTION}, False),
        ("linear_attention", {StateKind.RUNNING, StateKind.CONVOLUTION}, False),
        ("hybrid", {StateKind.KEYS_AND_VALUES, StateKind.RUNNING, StateKind.CONVOLUTION}, False),
    ],
)
def test_a_layer_says_what_it_keeps(name: str, keeps: set[StateKind], forgets: bool) -> None:
    from transformers import LlamaConfig

    decoder = LlamaConfig(num_hidden_layers=1)
    decoder.layer_types = [name]
    config = SimpleNamespace(get_text_config=lambda **_: decoder)
    (layer,) = hf_modules.layer_specs(config)
    assert (layer.keeps, layer.forgets_rows) == (keeps, forgets)

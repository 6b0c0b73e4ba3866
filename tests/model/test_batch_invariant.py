"""Batch-invariant mode: same seed, same bits, whatever else runs and however rows are cut; and ordinary mode must not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams, SpeculationConfig, Suffix
from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.config import CacheConfig, ModelConfig, SchedulerConfig, default_model
from outrider.errors import ContradictionError, UnsupportedModelError
from outrider.kernels.library import available_sets
from outrider.kernels.row_by_row import RowByRow
from outrider.loading.loader import load_model
from outrider.model.batch import Segment
from outrider.model.factory import BACKENDS, make_runner
from outrider.model.probe import probe_bits
from tests.model import checkpoints

DTYPES = ["bfloat16", "float32"]
TESTED = ("mistral", "gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2", "cohere", "granite", "mixtral", "gpt_oss")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("models")
    families = (*TESTED, "falcon")
    return {name: checkpoints.save(name, folder / name, seed=1) for name in families}


def _logits_by_schedule(llm: LLM) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Of one text: in one pass, row by row, in chunks beside a neighbour, and as a branch of a tree."""
    runner = llm.engine.runner
    runner.memory = StateMemory(BlockManager(64, 8))
    tokens = [(11 * i * i + 3 * i + 1) % checkpoints.VOCAB_SIZE for i in range(40)]
    one, two, three, four, five = (runner.blocks.allocate(7) for _ in range(5))
    whole = runner.forward([Segment(tokens, 0, one)]).logits
    single = torch.cat([runner.forward([Segment([t], i, two)]).logits for i, t in enumerate(tokens)])
    chunks = []
    for at in range(0, 40, 7):
        rows, beside = tokens[at : at + 7], tokens[: 5 + at // 7]
        chunks.append(runner.forward([Segment(beside, 0, four), Segment(rows, at, three)]).logits[len(beside) :])
    runner.forward([Segment(tokens[:30], 0, five)])
    tree = [t for token in tokens[30:] for t in (token, (token + 1) % checkpoints.VOCAB_SIZE)]
    parents = tuple(-1 if i < 2 else 2 * (i // 2 - 1) for i in range(len(tree)))
    branch = runner.forward([Segment(tree, 30, five, parents)]).logits[::2]
    return [single, torch.cat(chunks), torch.cat([whole[:30], branch])], whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", TESTED)
def test_bits_are_a_function_of_the_text(paths: dict[str, str], family: str, dtype: Any) -> None:
    schedules, whole = _logits_by_schedule(LLM(paths[family], dtype=dtype, batch_invariant=True, kv_cache_tokens=512))
    for logits in schedules:
        assert torch.equal(logits, whole)


def test_a_pass_without_logits_runs(paths: dict[str, str]) -> None:
    """Prefill chunks alone: the head has no rows."""
    llm = LLM(paths["mistral"], dtype="float32", batch_invariant=True, max_num_batched_tokens=8, max_num_seqs=4)
    prompts = [[(5 * i + j) % checkpoints.VOCAB_SIZE for i in range(30)] for j in range(3)]
    params = SamplingParams(seed=1, max_tokens=6)
    together = [out.token_ids for out in llm.generate(prompts, params)]
    assert together == [llm.generate(prompt, params)[0].token_ids for prompt in prompts]


def test_stock_operators_make_no_such_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would prove nothing: the embedded pair's rows are wide enough to differ."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    llm = LLM(dtype="float32", speculation="none", kv_cache_tokens=512)
    schedules, whole = _logits_by_schedule(llm)
    assert any(not torch.equal(logits, whole) for logits in schedules)


@pytest.mark.parametrize("dtype", DTYPES)
def test_texts_are_the_same_in_any_batch_with_any_proposer(dtype: Any) -> None:
    """The embedded pair: prefix hits, preemptions, small chunks, trees and chains, against each request alone."""
    settings: dict[str, Any] = {"dtype": dtype, "batch_invariant": True, "block_size": 8}
    tight = LLM(**settings, max_num_batched_tokens=24, max_num_seqs=5, kv_cache_tokens=104)
    alone = LLM(**settings, speculation="none", prefix_caching=False)
    ways = [
        SpeculationConfig(method="draft_model", num_draft_tokens=4),
        SpeculationConfig(method="draft_model", tree=(2, 2)),
        SpeculationConfig(method=Suffix(min_match=1, branches=True)),
        SpeculationConfig(),
    ]
    head = "class Reader:\n    def "
    jobs = [
        (head + "parse(self", SamplingParams(seed=1, max_tokens=20, top_p=0.9)),
        (head + "__init__(self, path", SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.2)),
    ]
    plain = [alone.generate(prompt, params)[0].token_ids for prompt, params in jobs]
    work = [(i, way) for i in range(len(jobs)) for way in ways]
    random.Random(3).shuffle(work)
    found = tight.generate([jobs[i][0] for i, _ in work], [jobs[i][1] for i, _ in work], speculation=[w for _, w in work])
    assert [out.token_ids for out in found] == [plain[i] for i, _ in work]
    assert tight.stats.finished.num_preemptions > 0
    assert tight.stats.finished.num_cached_tokens > 0


def test_a_model_whose_bits_depend_on_the_batch_is_refused(paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaky(RowByRow):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            return out * (1 + 1e-3 * args[0].shape[-2]) if func is torch.ops.aten.linear.default else out

    monkeypatch.setenv("OUTRIDER_KERNELS", "off")  # ours have no such leak
    monkeypatch.setattr("outrider.model.attention.RowByRow", Leaky)
    with pytest.raises(UnsupportedModelError):
        LLM(paths["mistral"], dtype="float32", batch_invariant=True)


def test_the_probe_of_bits_tells_paged_from_row_by_row() -> None:
    loaded = load_model(ModelConfig(model=default_model("target"), dtype="float32"))
    backend = BACKENDS["paged"]()
    backend.install(loaded.model)
    with pytest.raises(ValueError, match="bits"):
        probe_bits(loaded, backend)


def test_a_backend_whose_bits_depend_on_the_batch_is_refused_beside_it() -> None:
    with pytest.raises(ContradictionError, match="attention_backend") as caught:
        LLM(batch_invariant=True, attention_backend="gather")
    assert "fused" in caught.value.remedy


def test_paged_is_refused_beside_it_where_stock_operators_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the bits of a small model happen to agree."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    with pytest.raises(UnsupportedModelError, match="bits depend on the batch"):
        LLM(batch_invariant=True, attention_backend="paged")


@pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
def test_the_kernels_may_be_asked_for_beside_it(paths: dict[str, str]) -> None:
    """They are what the mode chooses; and where they do not fit, nothing else is taken in silence."""
    llm = LLM(paths["mistral"], dtype="float32", batch_invariant=True, attention_backend="fused", kv_cache_tokens=512)
    assert llm.engine.runner.backend.name == "fused"
    schedules, whole = _logits_by_schedule(llm)
    assert all(torch.equal(logits, whole) for logits in schedules)
    with pytest.raises(UnsupportedModelError, match="falcon"):
        LLM(paths["falcon"], dtype="float32", batch_invariant=True, attention_backend="fused")


def test_bits_are_probed_in_a_backend_asked_for_too() -> None:
    loaded = load_model(ModelConfig(model=default_model("target"), dtype="float32"))
    with pytest.raises(UnsupportedModelError, match="bits depend on the batch"):
        make_runner(loaded, "gather", CacheConfig(), SchedulerConfig(max_num_seqs=4), batch_invariant=True)

"""Families outside of the fused decoder: a row's bits are its own, and greedy and seeded texts are sped up under auto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, Ngram, SamplingParams, SpeculationConfig, Suffix
from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.govern.costs import CostTable, StepTimes, StepWork
from outrider.kernels.experts import pack_stacks, unpack_stacks
from outrider.kernels.formats import FORMATS
from outrider.kernels.library import available_sets, kernel_library
from outrider.kernels.weights import quantise_linears
from outrider.loading import hf_modules
from outrider.model.batch import Segment
from outrider.model.row_guard import RowGuard
from outrider.model.runner import ModelRunner
from outrider.propose.compositions import Auto
from tests.model import checkpoints
from tests.model.core import core, in_turn

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
VOCAB = checkpoints.VOCAB_SIZE
CONTEXT = [(13 * i * i + 5 * i + 1) % VOCAB for i in range(9)]
#: Numbers of rows, of which some fill vectors and others do not.
SIZES = (2, 3, 5, 8, 15, 27, 40)
ROWS = [(11 * i * i + 3 * i + 2) % VOCAB for i in range(40)]
FREE = CostTable(dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128), 1.0), 0.0, {})
PROMPTS = [[1, 2, 0] * 4, [2, 0, 1] * 3, [5] * 8]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("models")
    return {name: checkpoints.save(name, folder / name, seed=2, layers=2) for name in checkpoints.OUTSIDE}


def loaded(path: str, dtype: Any, **settings: Any) -> LLM:
    return LLM(path, dtype=dtype, block_size=4, kv_cache_tokens=1024, max_num_seqs=4, **settings)


class Passes:
    """Passes of a model over one context, each in a memory of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        runner.memory = StateMemory(BlockManager(256, 4))
        self._runner = runner
        self.alone = torch.cat([rows for _, rows in self.chunks([1] * len(ROWS))])

    def chunks(self, sizes: list[int], beside: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """Where each pass of the rows begins, and its logits; beside a neighbour of so many rows."""
        self._runner.memory = StateMemory(BlockManager(256, 4))
        own, other = (self._runner.blocks.allocate(24) for _ in range(2))
        self._runner.forward([Segment(CONTEXT, 0, own)])
        at = 0
        for size in sizes:
            neighbours = [Segment(ROWS[::-1][:beside], 0, other)] if beside else []
            rows = Segment(ROWS[at : at + size], len(CONTEXT) + at, own)
            yield at, self._runner.forward([*neighbours, rows]).logits[beside:]
            at += size

    def tree(self, size: int) -> torch.Tensor:
        """Logits of the first rows as a branch, each with a sibling before it that nobody sees."""
        self._runner.memory = StateMemory(BlockManager(256, 4))
        own = self._runner.blocks.allocate(24)
        self._runner.forward([Segment(CONTEXT, 0, own)])
        rows = [token for right in ROWS[:size] for token in ((right + 1) % VOCAB, right)]
        parents = tuple(-1 if i < 2 else 2 * (i // 2) - 1 for i in range(len(rows)))
        return self._runner.forward([Segment(rows, len(CONTEXT), own, parents)]).logits[1::2]

    def wrong(self, sizes: Iterable[int]) -> list[tuple[str, int]]:
        """Passes whose bits are not those of rows alone."""
        found = []
        for size in sizes:
            ways = {"chunks": self.chunks([size]), "beside": self.chunks([size], beside=size % 7 + 1)}
            found += [(way, size) for way, each in ways.items() if not torch.equal(next(each)[1], self.alone[:size])]
            if not torch.equal(self.tree(-(-size // 2)), self.alone[: -(-size // 2)]):
                found.append(("tree", size))
        return found


#: Where a change may concern one family, or one instruction set.
OF_FAMILIES = (
    "src/outrider/model/",
    "src/outrider/loading/",
    "src/outrider/kernels/",
    "tests/model/checkpoints.py",
    "tests/model/test_paged_rows.py",
)
DTYPES = ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("family", "dtype"),
    core(product(checkpoints.OUTSIDE, DTYPES), in_turn(checkpoints.OUTSIDE, DTYPES), *OF_FAMILIES),
)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(paths: dict[str, str], family: str, dtype: Any) -> None:
    runner = loaded(paths[family], dtype).engine.runner
    assert (runner.backend.name, runner.backend.invariant) == ("paged", True)
    assert Passes(runner).wrong(SIZES) == []


@pytest.mark.parametrize(
    ("kernels", "dtype"), core(product(available_sets(), DTYPES), in_turn(available_sets(), DTYPES), *OF_FAMILIES)
)
def test_every_instruction_set_holds_them(
    paths: dict[str, str], kernels: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", kernels)
    runner = loaded(paths["deepseek_v3"], dtype).engine.runner
    assert runner.backend.instruction_set(runner.loaded.model) == kernels
    assert runner.backend.invariant
    assert Passes(runner).wrong(SIZES[2::2]) == []


@pytest.mark.slow
@pytest.mark.parametrize("kernels", available_sets())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", checkpoints.OUTSIDE)
def test_every_number_of_rows_holds_them(
    paths: dict[str, str], family: str, kernels: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", kernels)
    runner = loaded(paths[family], dtype).engine.runner
    assert runner.backend.invariant
    assert Passes(runner).wrong(range(2, 41)) == []


@pytest.mark.parametrize("family", ["granitemoe", "qwen2_moe", "llama4_text"])
def test_without_a_guard_they_do_and_the_probe_sees_it(
    paths: dict[str, str], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the tests above would prove nothing. In float32 no rounding hides it."""
    monkeypatch.setattr(RowGuard, "_watch", lambda *_, **__: None)
    runner = loaded(paths[family], "float32").engine.runner
    assert not runner.backend.invariant
    assert Passes(runner).wrong(SIZES) != []


def choice_set(path: str, **settings: Any) -> LLM:
    """Under auto, with rows that cost nothing, so that whatever stands pays."""
    methods = SpeculationConfig(method=Auto(methods=(SpeculationConfig(method=Suffix(min_match=1), num_draft_tokens=5),)))
    llm = loaded(path, "bfloat16", speculation=methods, **settings)
    llm.engine.drafting.script(FREE, _steady)
    return llm


def _steady(work: StepWork, times: StepTimes) -> StepTimes:
    return StepTimes(0.01 if work.texts else 0.0001, 1.0, 0.01)


@pytest.mark.parametrize(
    "family", core(("deepseek_v3", "vaultgemma", "qwen2_moe", "llama4_text"), ("deepseek_v3", "llama4_text"), *OF_FAMILIES)
)
def test_greedy_and_seeded_texts_are_sped_up_and_stay_the_same(paths: dict[str, str], family: str) -> None:
    ways = ["none", SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=4)]
    ways.append(SpeculationConfig(method=Suffix(min_match=1, branches=True), num_draft_tokens=6))
    with choice_set(paths[family]) as llm:
        greedy, seeded = (
            SamplingParams(temperature=0, max_tokens=24),
            SamplingParams(seed=5, temperature=0.3, max_tokens=24),
        )
        chosen = [[out.token_ids for out in llm.generate(PROMPTS, params)] for params in (greedy, seeded)]
        assert llm.stats.finished.num_drafts > 0
        for way in ways:
            for params, texts in zip((greedy, seeded), chosen, strict=True):
                assert [out.token_ids for out in llm.generate(PROMPTS, params, speculation=way)] == texts


def test_where_bits_depend_on_rows_such_texts_are_decoded_plainly(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    with choice_set(paths["arcee"]) as llm:
        assert not llm.engine.runner.invariant
        (output,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=30), trace=True)
        assert not any(each.token_ids for each in output.outputs[0].rounds)


def test_a_large_weight_that_is_not_packed_is_not_read_once_a_row(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model runs as fast as before, and its bits are not promised."""
    monkeypatch.setattr("outrider.model.attention._FEW_BYTES", 0)
    runner = loaded(paths["llama4_text"], "float32").engine.runner  # its experts are multiplied all at once
    assert runner.backend.name == "paged"
    assert not runner.backend.invariant


@pytest.mark.parametrize("name", [None, "int8"])
def test_packed_experts_are_given_back(paths: dict[str, str], name: str | None) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(paths["granitemoe"], dtype=torch.float32)
    if name is not None:
        quantise_linears(model, FORMATS[name], hf_modules.expert_stacks(model))
    kept = [stack.stored().each(torch.clone) for stack in hf_modules.expert_stacks(model)]
    library = kernel_library()
    assert library is not None
    assert len(pack_stacks(hf_modules.expert_stacks(model), library)) == len(kept)
    assert all(getattr(stack.module, stack.name).isnan().all() for stack in hf_modules.expert_stacks(model))
    unpack_stacks(hf_modules.expert_stacks(model))
    for stack, before in zip(hf_modules.expert_stacks(model), kept, strict=True):
        found = stack.stored()
        assert torch.equal(found.data, before.data)
        assert (found.scale is None) is (before.scale is None)
        assert found.scale is None or torch.equal(found.scale, before.scale)

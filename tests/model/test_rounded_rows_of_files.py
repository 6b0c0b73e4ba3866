"""Rows of 8 bits that meet weights of quantised files: as without kernels, with drafts, and where there is nothing to
round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.errors import ContradictionError
from outrider.kernels.library import available_sets
from outrider.lab.prove.own_model import OwnModel
from outrider.lab.train.target import FrozenTarget
from tests.model import checkpoints, quantised_files
from tests.model.gguf_files import Kinds, Written
from tests.model.quantised_files import GROUP, gptq
from tests.model.test_gguf_models import EXPERTS, SHAPE
from tests.model.test_quantization import TEXT, logits

pytest.importorskip("gguf")
needs_kernels = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def write(folder: Path, family: str, kinds: Kinds, seed: int = 1, **changes: Any) -> str:
    """A file of a random model whose matrices have these types."""
    source = checkpoints.save(family, folder / f"{family}-{seed}", seed=seed, head_dim=64, **SHAPE | changes)
    return str(Written(source, folder / f"{family}-{seed}.gguf", kinds).path)


def halves_among_blocks(_: int, name: str) -> str:
    """Values are float16, beside queries and keys in blocks."""
    return "F16" if "attn_v" in name else "Q4_K"


def blocks_of_experts(_: int, name: str) -> str:
    """Only experts are in blocks."""
    return "Q4_0" if "exps" in name else "F32"


def ordered_gptq(folder: Path) -> str:
    """A checkpoint whose inputs lie in another order."""
    declared = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
    return str(quantised_files.write(folder / "gptq", gptq(ordered=True), declared)[0])


@needs_kernels
@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (partial(write, family="qwen3", kinds=("Q4_K", "Q6_K", "Q8_0")), "fused"),
        (partial(write, family="qwen3", kinds=("Q6_K",), tie_word_embeddings=True), "fused"),
        (partial(write, family="qwen3_moe", kinds=blocks_of_experts, **EXPERTS), "fused"),
        (partial(write, family="llama", kinds=halves_among_blocks), "paged"),
        (ordered_gptq, "fused"),
    ],
    ids=["mixed", "tied", "experts", "halves", "gptq"],
)
def test_rounded_rows_are_those_of_the_stock_model(
    tmp_path: Path, make: Callable[[Path], str], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels stack queries, keys and values only where their rows enter in one form."""
    path = make(tmp_path)
    exact, rounded = (LLM(path, dtype="float32", activations=rows) for rows in ("none", "int8"))
    assert rounded.engine.runner.backend.name == backend
    fast = logits(rounded)
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    stock = logits(LLM(path, dtype="float32", activations="int8"))
    size = stock.abs().max()
    apart, from_exact = ((fast - other).abs().amax(-1).median() / size for other in (stock, logits(exact)))
    assert apart < 0.1 * from_exact, f"{apart:.1e} from a model that rounds alike, {from_exact:.1e} from one that does not"


def test_drafts_of_other_files_round_their_rows_too_where_they_can(tmp_path: Path) -> None:
    target = write(tmp_path, "llama", ("Q4_K", "Q6_K"))
    drafts = {kind: write(tmp_path, "llama", (kind,), seed, layers=1) for seed, kind in ((2, "Q8_0"), (3, "F16"))}
    llm = LLM(target, activations="int8", max_num_seqs=2)
    prompts = [[1, 2, 3], [9, 8, 7, 6]]
    want = [out.token_ids for out in llm.generate(prompts, GREEDY, speculation="none")]
    for kind, path in drafts.items():
        way = SpeculationConfig(method=DraftModel(model=path), num_draft_tokens=3)
        assert [out.token_ids for out in llm.generate(prompts, GREEDY, speculation=way)] == want
        assert llm.proposers.get(way.method).runner.loaded.rounds_rows is (kind == "Q8_0")


def test_proofs_hold_for_rounded_rows(tmp_path: Path) -> None:
    """In the precision and the mode where passes of other shapes have the same bits."""
    files = [write(tmp_path, "llama", ("Q4_K", "Q6_K"), seed) for seed in (1, 2)]
    own = OwnModel(files[0], files[1], activations="int8")
    found = [own.text_is_identical(GREEDY), own.bits_are_identical("bfloat16", 6), own.cache_is_true(6)]
    assert [finding.passed for finding in found] == [True] * 3, found
    assert own.llm.engine.runner.loaded.rounds_rows
    with pytest.raises(ContradictionError, match=r"activations='int8': .* brings no weights of 8 bits or less"):
        OwnModel(None, None, activations="int8")


def test_a_target_that_teaches_rounds_its_rows_and_lets_gradients_through(tmp_path: Path) -> None:
    path = write(tmp_path, "llama", ("Q8_0",))
    teacher, plain = (FrozenTarget(path, "float32", activations=rows) for rows in ("int8", "none"))
    engine, tokens = logits(LLM(path, dtype="float32", activations="int8")), torch.tensor([TEXT])
    apart, from_exact = ((engine - target.logits(tokens)[0]).abs().amax(-1).median() for target in (teacher, plain))
    assert apart < 0.1 * from_exact
    hidden = torch.randn(3, teacher.hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
    grown = [torch.autograd.grad(target.head(hidden).square().sum(), hidden)[0] for target in (teacher, plain)]
    torch.testing.assert_close(*grown, rtol=0.05, atol=0.05 * float(grown[1].abs().max()))


def test_rows_are_not_rounded_for_a_file_of_floats(tmp_path: Path) -> None:
    path = write(tmp_path, "llama", ("F32", "F16"))
    with pytest.raises(ContradictionError, match=r"activations='int8': .* brings no weights of 8 bits or less"):
        LLM(path, activations="int8")
    blocks = write(tmp_path, "llama", ("Q8_0",), 2)
    with pytest.raises(ContradictionError, match=r"activations='int8': .* this one is torch\.float64"):
        LLM(blocks, activations="int8", dtype="float64")
    assert "activations=int8" in repr(LLM(blocks, activations="int8", dtype="float32"))

"""Free memory is divided among a target and its draft models before either has blocks, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.errors import ModelTooLargeError
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.loading.fit import Needs
from outrider.model import memory
from outrider.model.runner import ModelRunner

BLOCK = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
PROMPT = (1, 2, 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return (
        save_tiny_llama(folder / "target", seed=1, vocab_size=13, num_layers=3),
        save_tiny_llama(folder / "draft", seed=2, vocab_size=13, num_layers=2),
    )


def limited(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)


def load(target: str, **options: Any) -> LLM:
    return LLM(target, dtype="float32", block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=16, **options)


def weight_bytes(path: str) -> int:
    return sum(4 * tensor.numel() for file in Path(path).glob("*.safetensors") for tensor in load_file(file).values())


def runners(llm: LLM, draft: str) -> tuple[ModelRunner, ModelRunner]:
    """The target's and the draft's, once both have written."""
    config = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=2)
    assert len(llm.generate(PROMPT, GREEDY, speculation=config)[0].token_ids) == 4
    proposer = llm.engine.proposers.get(config.method)
    return llm.engine.runner, proposer.runner  # type: ignore[attr-defined]


def token_bytes(pair: tuple[str, str]) -> tuple[int, int]:
    own, beside = runners(load(pair[0], kv_cache_tokens=64), pair[1])
    return own.pool.bytes_per_slot(), beside.pool.bytes_per_slot()


@pytest.mark.parametrize("way", ["path", "given", "inside"])
def test_what_drafts_take_counts_when_blocks_are_sized(
    way: str, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    by_target, by_draft = token_bytes(pair)
    drafts: dict[str, Any] = {
        "path": {"draft_model": draft},
        "given": {"draft_model": AutoModelForCausalLM.from_pretrained(draft)},
    }
    if way == "inside":  # a draft model that another one drafts for
        other = {"method": "draft_model", "model": save_tiny_llama(tmp_path, seed=3, vocab_size=13, num_layers=2)}
        drafts["inside"] = {"speculation": {"method": "staged", "model": draft, "drafter": other}}
    number = 2 if way == "inside" else 1
    free = number * weight_bytes(draft) + 4 * 20 * BLOCK * (by_target + number * by_draft)
    limited(monkeypatch, free)
    assert load(target, **drafts[way]).engine.runner.blocks.num_blocks == 20, "a quarter of what is left"
    assert load(target, speculation="none").engine.runner.blocks.num_blocks > 20


def test_a_draft_that_leaves_no_block_is_refused_with_the_numbers(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    block = BLOCK * sum(token_bytes(pair))
    limited(monkeypatch, weight_bytes(draft) + block)
    assert load(target, draft_model=draft).engine.runner.blocks.num_blocks == 1
    free = weight_bytes(draft) + block - 1
    limited(monkeypatch, free)
    with pytest.raises(ModelTooLargeError, match=r"GB for the weights of draft models.* a smaller draft model") as caught:
        load(target, draft_model=draft)
    error = caught.value
    assert (error.weight_bytes, error.kv_bytes, error.available_bytes) == (weight_bytes(draft), block, free)


def test_tokens_that_are_asked_for_must_fit_both(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair
    whole = weight_bytes(draft) + 80 * sum(token_bytes(pair))
    limited(monkeypatch, whole)
    load(target, draft_model=draft, kv_cache_tokens=80)
    limited(monkeypatch, whole - 1)
    with pytest.raises(ModelTooLargeError, match=r"GB for keys and values and .* a smaller kv_cache_tokens"):
        load(target, draft_model=draft, kv_cache_tokens=80)


def test_a_draft_that_comes_later_leaves_the_target_its_memory(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    by_target, by_draft = token_bytes(pair)
    llm = load(target, speculation="none", kv_cache_tokens=80)
    assert llm.engine.runner.unmade_bytes == 80 * by_target
    config = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=2)
    limited(monkeypatch, 80 * (by_target + by_draft) - 1)
    with pytest.raises(ModelTooLargeError, match="GB for the target's keys and values") as caught:
        llm.generate(PROMPT, GREEDY, speculation=config)
    assert caught.value.kv_bytes == 80 * (by_target + by_draft)
    llm.generate(PROMPT, GREEDY)
    assert llm.engine.runner.unmade_bytes == 0, "now the target has what it takes"
    limited(monkeypatch, 80 * by_draft)
    assert len(llm.generate(PROMPT, GREEDY, speculation=config)[0].token_ids) == 4


def test_what_a_draft_needs_is_what_it_takes(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of its files are those that it has when it is loaded."""
    from outrider.building import DraftLoader

    found, needs = list[Needs | None](), DraftLoader.needs
    monkeypatch.setattr(DraftLoader, "needs", lambda *given, **how: found.append(needs(*given, **how)) or found[-1])
    load(pair[0], draft_model=pair[1])
    assert found == [Needs(weight_bytes(pair[1]), token_bytes(pair)[1])]

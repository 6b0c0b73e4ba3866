"""longrope: every text uses the factors that stock transformers uses for a text of its length, whatever runs beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import LLM, DraftModel, Ngram, SamplingParams, SpeculationConfig
from outrider.lab.prove.own_model import CacheAudit
from tests.model import checkpoints
from tests.model.checkpoints import LONG_AFTER, VOCAB_SIZE

BACKENDS = ("paged", "gather")
LENGTHS = (9, LONG_AFTER - 3, LONG_AFTER, LONG_AFTER + 1, 47)
PROMPTS = [[(7 * i * i + 3 * i + 1) % VOCAB_SIZE for i in range(n)] for n in LENGTHS]
GREEDY = SamplingParams(temperature=0, max_tokens=26)  # short ones cross the line while they write


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("longrope")
    target = checkpoints.save("longrope", folder / "target", seed=1)
    return target, checkpoints.save("longrope", folder / "draft", seed=1, layers=2)


@pytest.fixture(scope="module")
def stock(paths: tuple[str, str]) -> list[tuple[int, ...]]:
    return [checkpoints.greedy_by_transformers(paths[0], prompt, 26) for prompt in PROMPTS]


def ways(draft: str) -> list[SpeculationConfig]:
    return [
        SpeculationConfig(),
        SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=6),
        SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=5),
        SpeculationConfig(method=DraftModel(model=draft), tree=(2, 2, 1)),
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", range(4))
def test_texts_cross_the_line_in_a_mixed_batch(
    paths: tuple[str, str], stock: list[tuple[int, ...]], way: int, backend: str
) -> None:
    llm = LLM(paths[0], dtype="float64", block_size=4, max_num_batched_tokens=20, max_num_seqs=8, attention_backend=backend)  # type: ignore[arg-type]
    config = ways(paths[1])[way]
    for _ in range(2):  # the second time the prompts are cached
        found = llm.generate(PROMPTS, GREEDY, speculation=config)
        assert [out.token_ids for out in found] == stock


def test_memory_is_true_on_either_side_and_samples_cross_alone(paths: tuple[str, str]) -> None:
    llm = LLM(paths[0], dtype="float64", block_size=4)
    config = ways(paths[1])[2]
    params = SamplingParams(seed=3, max_tokens=26, n=2)
    for prompt in PROMPTS:
        llm.engine.add_request(tuple(prompt), params, config)
    audit = CacheAudit(llm.engine)
    audit.run()
    assert audit.num_checked > 20
    assert audit.worst < 1e-5


def test_seeded_texts_are_those_of_plain_decoding_alone(paths: tuple[str, str]) -> None:
    llm = LLM(paths[0], dtype="float64", block_size=4, kv_cache_tokens=160)
    params = [SamplingParams(seed=i, max_tokens=26) for i in range(len(PROMPTS))]
    alone = [llm.generate(prompt, each)[0].token_ids for prompt, each in zip(PROMPTS, params, strict=True)]
    for config in ways(paths[1])[1:]:
        assert [out.token_ids for out in llm.generate(PROMPTS, params, speculation=config)] == alone
    assert llm.stats.finished.num_preemptions > 0


def test_a_prefix_computed_with_other_factors_is_not_shared(paths: tuple[str, str]) -> None:
    llm = LLM(paths[0], dtype="float64", block_size=4)
    long = PROMPTS[-1]
    llm.generate(long, SamplingParams(max_tokens=1))
    short = long[: LONG_AFTER - 8]
    assert llm.generate(short, SamplingParams(temperature=0, max_tokens=4))[0].stats.num_cached_tokens == 0
    assert llm.generate(long, SamplingParams(temperature=0, max_tokens=4))[0].stats.num_cached_tokens > 0

"""Heads of EAGLE and DFlash that learn a few texts: the engine accepts what a reference counts, by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import default_model
from outrider.lab.prove.tiny import raise_engine_norms
from outrider.lab.train.blocks import DflashSettings
from outrider.lab.train.features import Eagle1Settings, Eagle3Settings
from outrider.lab.train.run import Job, train_heads
from outrider.lab.train.settings import HeadLearning, TrainSettings
from outrider.records import DataSettings, Manifest, Record, TargetFacts, write_shard
from tests.model.block_reference import BlockReference
from tests.model.eagle_reference import Eagle1Reference, EagleReference
from tests.model.test_target import Oracle

pytestmark = pytest.mark.slow

PROMPTS = ("def main(", "x = [1, 2, 3,", "class Node:", '{"name": "')
LENGTH, DRAFTED, BLOCK, STEPS = 48, 4, 5, 40
HEADS: dict[str, tuple[HeadLearning, Any]] = {
    "eagle1": (Eagle1Settings(unroll=DRAFTED), Eagle1Reference),
    "eagle3": (Eagle3Settings(unroll=DRAFTED), EagleReference),
    "dflash": (DflashSettings(block_size=BLOCK), BlockReference),
}
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> str:
    return default_model("target")


@pytest.fixture(scope="module")
def oracle(target: str) -> Oracle:
    return Oracle(target)


@pytest.fixture(scope="module")
def llm(target: str) -> LLM:
    llm = LLM(target, dtype="float64", speculation="none")
    raise_engine_norms(llm)
    return llm


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[tuple[int, ...]]:
    """Prompts and what the target writes behind them."""
    return [(*out.prompt_token_ids, *out.outputs[0].token_ids) for out in llm.generate(list(PROMPTS), GREEDY)]


def train(head: HeadLearning, folder: Path, oracle: Oracle, target: str, texts: list[tuple[int, ...]]) -> str:
    """Learn the texts by heart."""
    data = folder.with_name("data")
    facts = TargetFacts(name=target, vocab_size=oracle.model.vocab_size, hidden_size=384, num_layers=8)
    settings = DataSettings(temperature=0, max_tokens=LENGTH)
    records = [  # the same texts, to learn from and to measure with
        Record(bytes(16), 0, held_out, len(text) - LENGTH, torch.tensor(text))
        for held_out in (False, True)
        for text in texts
    ]
    shard = write_shard(data, "shard-00000.safetensors", records)
    Manifest(target=facts, settings=settings).with_shard(shard).save(data)
    how = TrainSettings(steps=STEPS, batch_size=4, precision="fp32", engine_prompts=0, num_draft_tokens=DRAFTED)
    train_heads(Job(data, folder, target, "float32", how), head)
    return str(folder)


def counted(reference: Any, texts: list[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """How many drafts of the reference were tried at each position, and how many stood there, over greedy texts."""
    tried, stood = [0] * DRAFTED, [0] * DRAFTED
    for text in texts:
        now, stop = len(text) - LENGTH + 1, len(text)  # the first token is written without a draft
        while now < stop:
            path: tuple[int, ...] = ()
            for position in range(min(DRAFTED, stop - now - 1)):
                token = int(reference.logits(text[:now], path).argmax())
                tried[position] += 1
                if token != text[now + position]:
                    break
                stood[position] += 1
                path += (token,)
            now += len(path) + 1
    return tried, stood


def padded(counts: list[int]) -> list[int]:
    """The engine counts up to the last position that was reached."""
    return counts + [0] * (DRAFTED - len(counts))


@pytest.mark.parametrize("method", HEADS)
def test_the_engine_accepts_what_the_reference_counts(
    method: str, llm: LLM, oracle: Oracle, target: str, texts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    head, kind = HEADS[method]
    folder = train(head, tmp_path / method, oracle, target, texts)
    llm.stats.reset()
    way = {"method": method, "model": folder, "num_draft_tokens": DRAFTED}
    outputs = llm.generate(list(PROMPTS), GREEDY, speculation=way)
    assert [(*out.prompt_token_ids, *out.outputs[0].token_ids) for out in outputs] == texts
    stats = llm.stats.finished
    tried, stood = counted(kind(folder, oracle.model), texts)
    assert stats.num_proposer_faults == 0
    assert padded(stats.tried_per_position) == tried
    assert padded(stats.accepted_per_position) == stood
    assert stood[0] > 0.6 * tried[0], "a head that reads the wrong states learns no text by heart"

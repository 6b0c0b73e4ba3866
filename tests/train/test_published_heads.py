"""EAGLE-3 and DFlash heads that learn a few texts: the engine accepts what a reference of their own counts, by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.embedded import default_model
from outrider.heads.block_network import BlockHeadNetwork
from outrider.heads.feature_networks import HeadAttention
from outrider.heads.formats.published import PublishedHead, read_head
from outrider.model.lone_layer import RotaryFactors
from outrider.prove.published_blocks import save_random_dflash
from outrider.prove.tiny import raise_engine_norms
from outrider.train.feature_heads import FeatureHeadSettings
from outrider.train.manifest import DataSettings, Manifest, TargetFacts
from outrider.train.records import Record, write_shard
from outrider.train.run import Job, train_heads
from outrider.train.settings import TrainSettings
from tests.model.block_reference import BlockReference
from tests.model.eagle_reference import EagleReference
from tests.model.test_target import Oracle

pytestmark = pytest.mark.slow

PROMPTS = ("def main(", "x = [1, 2, 3,", "class Node:", '{"name": "')
LENGTH, DRAFTED, BLOCK, STEPS = 48, 4, 5, 40
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


def attended(attention: HeadAttention, queries: Tensor, kept: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
    keys, values = (each.repeat_interleave(queries.shape[1] // each.shape[1], 1) for each in kept)
    scores = torch.einsum("ihd,jhd->hij", queries, keys) / attention.head_dim**0.5
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)


def dflash_loss(head: PublishedHead, oracle: Oracle, text: tuple[int, ...], states: list[Tensor]) -> Tensor:
    """At every mask token of a block behind every token but the first: which token stands there."""
    network, config = head.network, head.config
    assert isinstance(network, BlockHeadNetwork)
    starts = torch.arange(1, len(text) - BLOCK + 1)
    places = (starts[:, None] + torch.arange(BLOCK)).flatten()
    tokens = torch.where(torch.arange(len(places)) % BLOCK == 0, torch.tensor(text)[places], network.config.mask_token_id)
    rotary = RotaryFactors(config.layer, torch.device("cpu"))
    tables, before = rotary.at(places.tolist(), torch.float32), rotary.at(range(len(text)), torch.float32)
    begun = starts.repeat_interleave(BLOCK)
    seen = torch.cat([torch.arange(len(text)) < begun[:, None], begun == begun[:, None]], 1)
    features, rows = network.fuse(states), oracle.model.get_input_embeddings().weight.float()[tokens]
    for layer in network.own_layers:
        attention, normed = layer.self_attn, layer.input_layernorm(rows)
        pairs = zip(attention.keys_and_values(features, before), attention.keys_and_values(normed, tables), strict=True)
        keys, values = (torch.cat(pair) for pair in pairs)
        rows = layer.leave(rows, attended(attention, attention.queries(normed, tables), (keys, values), seen))
    drafted = torch.arange(len(places)) % BLOCK > 0
    logits = network.norm(rows[drafted]) @ oracle.model.lm_head.weight.float().T
    return torch.nn.functional.cross_entropy(logits, torch.tensor(text)[places[drafted]])


def train_eagle3(folder: Path, oracle: Oracle, target: str, texts: list[tuple[int, ...]]) -> str:
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
    train_heads(Job(data, folder, target, "float32", how), FeatureHeadSettings(unroll=DRAFTED))
    return str(folder)


def train_dflash(folder: Path, oracle: Oracle, target: str, texts: list[tuple[int, ...]]) -> str:
    """Learn the texts by heart, and write the head into the file that it was read from."""
    save_random_dflash(folder, target, scale=0.05, inputs=(2, 4, 7), block_size=BLOCK)
    head = read_head(str(folder))
    network = head.network.float().requires_grad_(True)
    hidden = [[oracle.hidden(list(text))[layer].float().clone() for layer in (2, 4, 7)] for text in texts]
    optimiser = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.0)
    torch.manual_seed(1)
    for step in range(120):
        optimiser.zero_grad()
        dflash_loss(head, oracle, texts[step % len(texts)], hidden[step % len(texts)]).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
    save_file({name: w.detach().clone() for name, w in network.state_dict().items()}, folder / "model.safetensors")
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


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_the_engine_accepts_what_the_reference_counts(
    method: str, llm: LLM, oracle: Oracle, target: str, texts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    train, kind = {"eagle3": (train_eagle3, EagleReference), "dflash": (train_dflash, BlockReference)}[method]
    folder = train(tmp_path / method, oracle, target, texts)
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

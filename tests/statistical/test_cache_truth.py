"""KV after every commit equals a fresh prefill, ragged and preempted; overwritten KV must be seen."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.lab.prove.own_model import CacheAudit
from outrider.lab.prove.tiny import raise_engine_norms, save_tiny_llama

BOUND = 1e-12


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny_llama(folder / "target", 1, vocab_size=7), save_tiny_llama(folder / "draft", 2, vocab_size=7)


def _llm(paths, **settings):
    config = SpeculationConfig(method=DraftModel(model=paths[1]), num_draft_tokens=3)
    llm = LLM(paths[0], dtype="float64", speculation=config, block_size=2, **settings)
    raise_engine_norms(llm)
    return llm


def _submit(llm, count, params):
    config = llm.speculation
    prompts = [tuple((i + j * j) % 7 for j in range(3 + i)) for i in range(count)]
    return [llm.engine.add_request(p, params, config) for p in prompts]


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize(
    "params", [SamplingParams(seed=3, max_tokens=14), SamplingParams(max_tokens=14, stop_token_ids=(5,))]
)
def test_kv_is_that_of_a_fresh_prefill(paths, count, params):
    llm = _llm(paths)
    _submit(llm, count, params)
    audit = CacheAudit(llm.engine)
    audit.run()
    assert audit.num_checked >= count
    assert audit.worst <= BOUND


def test_kv_after_preemption(paths):
    llm = _llm(paths, kv_cache_tokens=40)
    requests = _submit(llm, 4, SamplingParams(seed=3, max_tokens=16))
    audit = CacheAudit(llm.engine)
    audit.run()
    assert sum(seq.stats.num_preemptions for r in requests for seq in r.sequences) > 0
    assert audit.worst <= BOUND


def test_control_an_overwritten_slot_is_seen(paths):
    llm = _llm(paths)
    (request,) = _submit(llm, 1, SamplingParams(seed=3, max_tokens=20))
    seq = request.sequences[0]
    while seq.num_output_tokens < 5:
        llm.engine.step()
    audit, size = CacheAudit(llm.engine), llm.engine.runner.blocks.block_size
    assert audit.difference(seq) <= BOUND
    slots = [seq.state.block_table[i // size] * size + i % size for i in (0, seq.state.num_computed - 1)]
    with torch.inference_mode():
        llm.engine.runner.pool.move(slots[:1], slots[1:])
    assert audit.difference(seq) > 1e-3

"""Layers that a proposer keeps beside the target's, against a fresh prefill: forks, drafts, preemption and prefixes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.cache.memory import AddedShape
from outrider.engine.sequence import Request
from outrider.errors import ContradictionError, InvalidParameterError, ModelTooLargeError
from outrider.lab.prove.own_model import CacheAudit
from outrider.lab.prove.tiny import raise_engine_norms, save_tiny_llama
from outrider.model import memory
from outrider.model import target as target_module
from tests.model.feature_head import FeatureHead, FeatureHeadProposer

BOUND = 1e-12
HEAD = SpeculationConfig(method=FeatureHead(), num_draft_tokens=3)
PLAIN = SpeculationConfig()
PROMPTS = [tuple((i + j * j) % 7 for j in range(5 + i)) for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "target", 1, vocab_size=7)


@pytest.fixture
def llm(path: str) -> Iterator[LLM]:
    llm = load(path)
    yield llm
    llm.engine.check_rest()


def load(path: str, **settings: int) -> LLM:
    llm = LLM(path, dtype="float64", block_size=2, speculation=PLAIN, **settings)
    raise_engine_norms(llm)
    return llm


def head_of(llm: LLM) -> FeatureHeadProposer:
    proposer = llm.engine.proposers.get(FeatureHead())
    assert isinstance(proposer, FeatureHeadProposer)
    return proposer


def audited(llm: LLM, prompts: list[tuple[int, ...]], params: SamplingParams) -> tuple[CacheAudit, list[Request]]:
    requests = [llm.engine.add_request(prompt, params, HEAD) for prompt in prompts]
    audit = CacheAudit(llm.engine)
    audit.run()
    assert audit.num_checked
    return audit, requests


def tokens(requests: list[Request]) -> list[tuple[int, ...]]:
    return [tuple(seq.output_token_ids) for request in requests for seq in request.sequences]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=12, n=3), SamplingParams(max_tokens=12, n=2)])
def test_added_layers_hold_what_a_fresh_prefill_gives(llm: LLM, params: SamplingParams) -> None:
    audit, requests = audited(llm, PROMPTS, params)
    assert audit.worst <= BOUND
    assert head_of(llm).num_late == 0
    assert sum(seq.stats.num_draft_tokens for request in requests for seq in request.sequences) > 20
    if params.temperature == 0:
        assert tokens(requests) == [out.token_ids for out in load(llm.engine.runner.loaded.name).generate(PROMPTS, GREEDY)]


def test_preempted_texts_begin_with_what_all_layers_hold(path: str) -> None:
    llm = load(path, kv_cache_tokens=48)
    audit, requests = audited(llm, PROMPTS, SamplingParams(seed=3, max_tokens=16))
    assert sum(seq.stats.num_preemptions for request in requests for seq in request.sequences) > 0
    assert audit.worst <= BOUND
    assert head_of(llm).num_late == 0


def test_a_prefix_is_shared_as_far_as_the_layers_that_are_needed_hold_it(llm: LLM) -> None:
    prompt = [(1, 2, 3, 4, 5, 6, 0, 1, 2, 3)]
    found = []
    for config in (PLAIN, HEAD, HEAD, PLAIN):
        request = llm.engine.add_request(prompt[0], GREEDY, config)
        audit = CacheAudit(llm.engine)
        audit.run()
        assert audit.worst <= BOUND
        found.append(request.sequences[0].stats.num_cached_tokens)
    assert found == [0, 0, 8, 8], "the second text takes the place of the first one, whose blocks hold less"
    assert head_of(llm).num_late == 0


def test_a_text_that_turns_to_the_head_late_is_written_all_the_same(llm: LLM) -> None:
    llm.engine.drafting.planner = lambda seq: (HEAD,) if seq.num_output_tokens > 4 else ()
    request = llm.engine.add_request(PROMPTS[0], GREEDY, PLAIN)
    while llm.engine.has_work:
        llm.engine.step()
    assert head_of(llm).num_late > 0
    assert request.sequences[0].stats.num_proposer_faults == 0
    assert tokens([request]) == [llm.generate([PROMPTS[0]], GREEDY, speculation=PLAIN)[0].token_ids]


def test_control_an_overwritten_slot_of_an_added_layer_is_seen(llm: LLM) -> None:
    request = llm.engine.add_request(PROMPTS[1], SamplingParams(seed=3, max_tokens=12), HEAD)
    (seq,) = request.sequences
    while seq.num_output_tokens < 4:
        llm.engine.step()
    audit, added = CacheAudit(llm.engine), head_of(llm).added
    assert audit.difference(seq) <= BOUND
    with torch.inference_mode():
        added.move([seq.state.slot(0)], [seq.state.slot(added.num_filled(seq.view.kv) - 1)])
    assert audit.difference(seq) > 1e-3
    llm.engine.cancel(request)


def test_added_layers_go_with_who_asked_for_them(llm: LLM) -> None:
    kept, added = llm.engine.runner.memory, head_of(llm).added
    assert list(kept.added) == [added]
    del added
    llm.engine.proposers.dismiss_all()
    gc.collect()
    assert len(kept.added) == 0


def test_the_memory_of_added_layers_counts_when_blocks_are_sized(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 4 * 2**16)
    llm = load(path)
    llm.generate(PROMPTS[:1], GREEDY)
    plain, by_token = llm.engine.runner, llm.engine.runner.pool.bytes_per_slot()
    added = LLM(path, dtype="float64", block_size=2, speculation=HEAD).engine.runner
    of_head = FeatureHead().added_token_bytes(added.loaded)
    assert plain.blocks.num_blocks == 2**16 // by_token // 2
    assert added.blocks.num_blocks == 2**16 // (by_token + of_head) // 2 < plain.blocks.num_blocks


def test_what_cannot_be_added_or_written_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of(llm)
    target, added = head.target, head.added
    with pytest.raises(InvalidParameterError, match="num_heads"):
        target.add_layers(AddedShape(1, 0, 4), head.recompute)
    with pytest.raises(InvalidParameterError, match="feature_size"):
        target.add_layers(AddedShape(1, 1, 4, -1), head.recompute)
    with pytest.raises(InvalidParameterError, match="aux_layers"):
        target.add_layers(AddedShape(1, 1, 4), head.recompute, [99])
    monkeypatch.setattr(target_module, "available_bytes", lambda device: 100)
    with pytest.raises(ModelTooLargeError, match="smaller kv_cache_tokens"):
        target.add_layers(AddedShape(1, 1, 4), head.recompute)
    request = llm.engine.add_request(PROMPTS[0], GREEDY, HEAD)
    llm.engine.step()
    kv = request.sequences[0].view.kv
    rows = torch.zeros(1, 2, 4, dtype=torch.float64)
    with pytest.raises(ContradictionError, match="may be written now"):
        added.write(kv, 0, 99, rows, rows)
    with pytest.raises(InvalidParameterError, match="another shape"):
        added.write(kv, 0, kv.num_computed, rows[:, :1], rows)
    with pytest.raises(InvalidParameterError, match="Use 0 to 0"):
        added.write(kv, 1, kv.num_computed, rows, rows)
    with pytest.raises(ContradictionError, match="the target has computed"):
        added.fill(kv, kv.num_computed + 1)
    with pytest.raises(ContradictionError, match="Read no further"):
        added.read(kv, 0, 999)
    llm.engine.step()
    with pytest.raises(ContradictionError, match="may be written now"):
        added.write(kv, 0, 0, rows, rows)  # which may belong to other texts by now
    llm.engine.cancel(request)

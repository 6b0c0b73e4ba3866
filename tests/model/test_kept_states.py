"""Models with a running state begin with what the prefix cache has of a text: blocks, and the states at their ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.cache.running import Anchor, CellRecord
from outrider.config import RequestOptions
from outrider.engine.thread import Health
from outrider.lab.prove.own_model import KV_BOUND, CacheAudit
from outrider.model import memory
from outrider.propose.draft_model import DraftModel
from outrider.server.metrics import EngineState
from tests.model.preempted import found_again
from tests.model.test_running_states import EXIT, KINDS, PREDICTION, PROMPT, almost, load, saved

GREEDY = SamplingParams(temperature=0, max_tokens=12)
#: The second and third go on from the first one's prompt, the fourth from what stands on the grid alone.
PROMPTS = [PROMPT, [*PROMPT, 5, 6, 7, 8, 9], PROMPT, [*PROMPT[:17], 1, 2, 3], [3, *PROMPT]]
CACHED = [0, 20, 20, 16, 0]


@pytest.fixture(scope="module", params=KINDS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model of every kind with memory for two texts, that keeps a state every two blocks."""
    path = saved(request.param, tmp_path_factory.mktemp(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "STATE_SPACING", 8)
        yield load(path, draft_model=path, kv_cache_tokens=80, state_cache_mib=1)


@pytest.fixture
def fresh(llm: LLM) -> LLM:
    """The same with nothing kept."""
    llm.engine.runner.blocks.reset()
    llm.stats.reset()
    return llm


one_kind = pytest.mark.parametrize("llm", ["qwen3_next"], indirect=True)


def bound(llm: LLM) -> float:
    """Where bits are a function of the text, they are the same bits."""
    return 0 if llm.engine.runner.backend.invariant else KV_BOUND


def audited(llm: LLM, prompts: list[list[int]], max_tokens: int = 1, **options: Any) -> CacheAudit:
    """One text after another, each step audited."""
    audit, params = CacheAudit(llm.engine), SamplingParams(temperature=0, max_tokens=max_tokens)
    for prompt in prompts:
        request = llm.engine.add_request(tuple(prompt), params, llm.resolve("none"), RequestOptions(**options))
        audit.run()
        assert request.error is None
    llm.engine.runner.blocks.check_integrity([])
    return audit


def test_texts_with_hits_are_those_without(fresh: LLM) -> None:
    want = []
    for prompt in PROMPTS:
        want.append(fresh.generate(prompt, GREEDY, speculation="none")[0].token_ids)
        fresh.engine.runner.blocks.reset()
    for prompt, text, cached in zip(PROMPTS, want, CACHED, strict=True):
        found = fresh.generate(prompt, GREEDY, speculation=PREDICTION, prediction=almost(text))[0]
        assert (found.token_ids, found.stats.num_cached_tokens) == (text, cached)
        assert found.stats.num_accepted_tokens > 5


def test_states_after_hits_are_those_of_a_fresh_prefill(fresh: LLM) -> None:
    """The texts are written too, past places where states are kept."""
    audit = audited(fresh, [*PROMPTS, *PROMPTS], 5)
    assert audit.worst <= bound(fresh)
    assert audit.num_checked > 30
    assert fresh.stats.finished.num_cached_tokens == sum(CACHED) + 20 + 24 + 20 + 16 + 20


def test_texts_that_are_read_together_leave_states_of_their_own(fresh: LLM) -> None:
    """Passes hold rows of several prompts, which go past the grid in other places of the pass than of their text."""
    for cached in (0, 16 + 8 + 12):
        audit, params = CacheAudit(fresh.engine), SamplingParams(temperature=0, max_tokens=3)
        for prompt in (PROMPT[:19], [5, *PROMPT[:9]], [3, 1, *PROMPT[:11]]):
            fresh.engine.add_request(tuple(prompt), params, fresh.resolve("none"))
        audit.run()
        assert audit.worst <= bound(fresh)
        assert fresh.stats.finished.num_cached_tokens == cached


@one_kind
def test_preempted_texts_and_samples_go_on_from_kept_states(fresh: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for two texts, five of them with samples and drafts."""
    text = fresh.generate(PROMPT, GREEDY, speculation="none")[0].token_ids
    ways = [PREDICTION, SpeculationConfig(method=DraftModel(), tree=(2, 1)), PREDICTION, "none", PREDICTION]
    requests = []
    for place, (prompt, way) in enumerate(zip(PROMPTS, ways, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=12, n=1 + (place == 2))
        options = RequestOptions(prediction=almost(text))
        requests.append(fresh.engine.add_request(tuple(prompt), params, fresh.resolve(way), options))
    audit, found = CacheAudit(fresh.engine), found_again(monkeypatch)
    audit.run()
    assert not [request.error for request in requests if request.error]
    assert audit.worst <= bound(fresh)
    assert sum(found) > 0
    assert len({tuple(seq.output_token_ids) for seq in requests[2].sequences}) == 1


@one_kind
def test_a_cancelled_text_is_taken_up_again(fresh: LLM) -> None:
    """From what it has left, and beside a text that goes on without it."""
    text = fresh.generate(PROMPT, GREEDY, speculation="none")[0].token_ids
    fresh.engine.runner.blocks.reset()
    fresh.stats.reset()
    options = RequestOptions(prediction=almost(text))
    dropped, kept = (
        fresh.engine.add_request(tuple(prompt), GREEDY, fresh.resolve(PREDICTION), options)
        for prompt in (PROMPT, [3, *PROMPT])
    )
    while len(dropped.sequences[0].output_token_ids) < 4:
        fresh.engine.step()
    written = list(dropped.sequences[0].output_token_ids)
    fresh.engine.cancel(dropped)
    audit = CacheAudit(fresh.engine)
    again = fresh.engine.add_request(
        (*PROMPT, *written), GREEDY.replace(max_tokens=12 - len(written)), fresh.resolve(PREDICTION), options
    )
    audit.run()
    assert audit.worst <= bound(fresh)
    assert kept.error is again.error is None
    assert (*written, *again.sequences[0].output_token_ids) == text
    assert again.sequences[0].stats.num_cached_tokens >= 20


@one_kind
def test_a_text_that_is_written_leaves_states_on_the_grid(fresh: LLM) -> None:
    """Rows of drafts that stand go past such places as well as rows of the text, and rows that a draft has begun."""
    first = fresh.generate(PROMPT, GREEDY, speculation="none")[0].token_ids
    for way in ("none", PREDICTION, EXIT):
        fresh.engine.runner.blocks.reset()
        fresh.generate(PROMPT, GREEDY, speculation=way, prediction=first)
        again = [*PROMPT, *first[:11], 1]
        assert fresh.generate(again, GREEDY, speculation="none")[0].stats.num_cached_tokens == 32


@one_kind
def test_rows_that_drafts_have_begun_leave_the_states_of_other_texts_alone(fresh: LLM) -> None:
    """Early exit drafting goes past the grid before the target's pass does, which has its other rows alone to compute."""
    for length in (4, 8):
        audit, way = CacheAudit(fresh.engine), fresh.resolve(EXIT.replace(num_draft_tokens=1))
        for place in range(4):
            fresh.engine.add_request(tuple(PROMPT[place : 2 * place + length]), GREEDY.replace(max_tokens=20), way)
        audit.run()
        assert audit.num_checked > 40
        assert audit.worst <= bound(fresh)


@one_kind
def test_namespaces_do_not_share_states(fresh: LLM) -> None:
    for namespace, cached in (("mine", 0), ("yours", 0), ("mine", 20)):
        audited(fresh, [PROMPT], namespace=namespace)
        assert fresh.stats.finished.num_cached_tokens == cached


@one_kind
def test_a_small_budget_keeps_what_was_used_last(fresh: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    states = fresh.engine.runner.blocks.states
    assert states is not None
    monkeypatch.setattr(states, "capacity", 2)
    texts = [[first, *PROMPT[:9]] for first in (1, 2, 3)]
    audited(fresh, [texts[0], texts[1], texts[0], texts[2], texts[0]])
    assert fresh.stats.finished.num_cached_tokens == 16
    assert len(states) == 2
    monkeypatch.setattr(states, "capacity", 0)
    fresh.engine.runner.blocks.reset()
    audited(fresh, [PROMPT, PROMPT])
    assert fresh.stats.finished.num_cached_tokens == 16
    assert len(states) == 0


@one_kind
def test_as_many_states_are_kept_as_the_budget_holds(fresh: LLM) -> None:
    states, by_text = fresh.engine.runner.blocks.states, fresh.engine.runner.text_bytes
    assert states is not None
    assert states.capacity == 2**20 // (by_text // 6)
    audited(fresh, [PROMPT])
    assert EngineState.of(fresh.engine, Health()).kept_states == len(states) == 3  # at 8, 16 and 20
    sizes = [cell.state_bytes for block in states.blocks for cell in states.begin_at(block).records.values()]
    assert sum(sizes) == 3 * by_text // 6


def _zeros(record: CellRecord, position: int) -> CellRecord:
    state = torch.zeros_like(record.anchors[0].state)
    return CellRecord(record.function, (Anchor(position, state),), position, tuple(each[:0] for each in record.tape))


@one_kind
def test_the_audit_sees_a_wrong_state(fresh: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CellRecord, "cut", _zeros)
    assert audited(fresh, [PROMPT, PROMPT], 2).worst > 100 * KV_BOUND

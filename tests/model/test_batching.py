"""Continuous batches: whatever runs beside a request, and however its rows are cut, its text is the one it has alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from outrider import LLM, DraftModel, Ngram, SamplingParams, SpeculationConfig, Suffix
from outrider.engine.sequence import Request
from outrider.lab.prove.own_model import CacheAudit
from outrider.model.context import ForwardContext
from outrider.propose.draft_model import DraftModelProposer
from tests.model import checkpoints

SETTINGS: dict[str, Any] = {"dtype": "float64", "block_size": 4}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder: Path = tmp_path_factory.mktemp("pair")
    return checkpoints.save("mistral", folder / "target", seed=1), checkpoints.save(
        "llama", folder / "draft", seed=1, layers=1
    )


@pytest.fixture(scope="module")
def alone(paths: tuple[str, str]) -> LLM:
    return LLM(paths[0], **SETTINGS, prefix_caching=False)


def speculations(draft: str) -> list[SpeculationConfig]:
    return [
        SpeculationConfig(),
        SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=3),
        SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=1),
        SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=5),
        SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=4, draft_sampling="greedy"),
        SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=3, rule="walk"),
        SpeculationConfig(method=DraftModel(model=draft), tree=(3, 2)),
        SpeculationConfig(method=DraftModel(model=draft), tree=(2, 2), draft_sampling="greedy"),
        SpeculationConfig(method=Suffix(min_match=1)),
        SpeculationConfig(method=Suffix(min_match=1, branches=True, shared=True)),
    ]


def nudged(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor: the last token and its neighbours are less likely."""
    pushed = scores.clone()
    pushed[:, int(ids[0, -1]) :: 7] -= 2.0
    return pushed


def random_params(rng: random.Random) -> SamplingParams:
    filters = rng.choice([{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}])
    prefix: dict[str, Any] = rng.choice(
        [
            {},
            {},
            {"repetition_penalty": 1.4, "logprobs": 2},
            {"presence_penalty": 0.8, "frequency_penalty": -0.3},
            {"logit_bias": {3: 4.0, 8: -5.0}, "prompt_logprobs": 1},
            {"bad_words_ids": ((3,), (8, 21), (5, 5)), "logits_processors": (nudged,)},
            {"allowed_token_ids": tuple(range(0, checkpoints.VOCAB_SIZE, 2)), "logprobs": 0},
        ]
    )
    return SamplingParams(
        **prefix,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.4]),
        seed=rng.randrange(1000),
        max_tokens=rng.randrange(1, 24),
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=rng.choice([(), (), (3, 8, 21)]),
        n=rng.choice([1, 1, 1, 3]),
        **filters,
    )


def random_prompt(rng: random.Random) -> tuple[int, ...]:
    shared = [(5 * i) % checkpoints.VOCAB_SIZE for i in range(12)]
    tail = [rng.randrange(checkpoints.VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
    return tuple([*shared, *tail] if rng.random() < 0.5 else tail)


class Arrivals:
    """Requests that arrive at exponential gaps, in steps, while the engine runs."""

    def __init__(self, llm: LLM, draft: str, count: int, seed: int) -> None:
        self.llm, self.rng = llm, random.Random(seed)
        self.choices = speculations(draft)
        self.requests: list[Request] = []
        self.due = []
        at = 0.0
        for _ in range(count):
            at += self.rng.expovariate(0.5)
            self.due.append(at)

    def run(self) -> Iterator[None]:
        """Step to the end, yielding after each step."""
        step = 0
        while self.due or self.llm.engine.has_work:
            while self.due and self.due[0] <= step:
                self.due.pop(0)
                config = self.rng.choice(self.choices)
                self.requests.append(self.llm.engine.add_request(random_prompt(self.rng), random_params(self.rng), config))
            self.llm.engine.step()
            step += 1
            yield


def texts(request: Request) -> list[list[int]]:
    return [seq.output_token_ids for seq in request.sequences]


@pytest.mark.parametrize("seed", [1, 2])
def test_poisson_arrivals_change_no_text(paths: tuple[str, str], alone: LLM, seed: int) -> None:
    llm = LLM(paths[0], **SETTINGS, max_num_seqs=6, max_num_batched_tokens=13, kv_cache_tokens=112)
    engine, runner = llm.engine, llm.engine.runner
    calls: list[int] = []
    forward = runner.backend.forward

    def counted(loaded: Any, context: ForwardContext, aux_layers: Any, part: Any = None) -> Any:
        calls.append(context.batch.num_rows)
        return forward(loaded, context, aux_layers, part)

    runner.backend.forward = counted  # type: ignore[method-assign]
    arrivals = Arrivals(llm, paths[1], 45, seed)
    passes = 0
    for _ in arrivals.run():
        assert len(calls) - passes <= 1, "more than one target pass in a step"
        passes = len(calls)
        runner.blocks.check_integrity([seq.state.block_table for seq in engine.scheduler.running])
        for proposer in llm.proposers:
            proposer.check_integrity()
    assert sum(calls) == engine.stats.num_rows, "rows that nobody asked for"
    for request in arrivals.requests:
        assert request.error is None
        assert request.finished
        again = alone.generate(list(request.prompt_token_ids), request.params)[0]
        assert [list(o.token_ids) for o in again.outputs] == texts(request), request.speculation
    totals = engine.stats.finished
    assert totals.num_preemptions > 0
    assert totals.num_cached_tokens > 0
    assert totals.num_accepted_tokens > 0
    assert_nothing_is_left(llm)


def assert_nothing_is_left(llm: LLM) -> None:
    engine = llm.engine
    engine.runner.blocks.check_integrity([])
    assert engine.runner.blocks.num_free == engine.runner.blocks.num_blocks
    assert not engine.noise._used  # type: ignore[attr-defined]
    for proposer in llm.proposers:
        proposer.check_integrity()
        if isinstance(proposer, DraftModelProposer):
            assert not proposer._states
            assert proposer.runner.blocks.num_free == proposer.runner.blocks.num_blocks


@pytest.mark.parametrize("count", [1, 4, 8])
def test_kv_is_true_after_every_commit(paths: tuple[str, str], count: int) -> None:
    llm = LLM(paths[0], **SETTINGS, max_num_seqs=8, max_num_batched_tokens=24, kv_cache_tokens=180)
    rng = random.Random(count)
    for i in range(count):
        config = speculations(paths[1])[1 + i % 3]
        params = random_params(rng).replace(max_tokens=30, n=1)
        llm.engine.add_request(random_prompt(rng), params, config)
    audit = CacheAudit(llm.engine)
    audit.run()
    assert audit.num_checked > 5 * count
    assert audit.worst < 1e-5


def test_a_pass_tells_the_scheduler_what_rows_of_prompts_take(paths: tuple[str, str]) -> None:
    llm = LLM(paths[0], **SETTINGS)
    scheduler = llm.engine.scheduler
    before = scheduler._row_seconds
    llm.generate({"prompt_token_ids": [5] * 20}, SamplingParams(max_tokens=1))
    assert scheduler._row_seconds == before, "so few rows say nothing"
    llm.generate({"prompt_token_ids": [7] * 60}, SamplingParams(max_tokens=1))
    assert scheduler._row_seconds != before


def test_the_audit_notices_a_wrong_slot(paths: tuple[str, str]) -> None:
    llm = LLM(paths[0], **SETTINGS)
    request = llm.engine.add_request((1, 2, 3, 4, 5, 6), SamplingParams(max_tokens=9), SpeculationConfig())
    llm.engine.step()
    seq = request.sequences[0]
    audit = CacheAudit(llm.engine)
    assert audit.difference(seq) < 1e-5
    llm.engine.runner.pool.move([seq.state.block_table[0] * 4], [seq.state.block_table[0] * 4 + 2])
    assert audit.difference(seq) > 1e-3
    llm.engine.cancel(request)


def test_text_runs_to_the_end_of_the_context(paths: tuple[str, str]) -> None:
    llm = LLM(paths[0], **SETTINGS, max_model_len=40)
    for config in speculations(paths[1]):
        output = llm.generate(list(range(20)), SamplingParams(temperature=0, max_tokens=500), speculation=config)[0]
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 20
        assert output.token_ids == llm.generate(list(range(20)), SamplingParams(temperature=0, max_tokens=20))[0].token_ids


def test_samples_share_the_prompt_and_copy_on_write(paths: tuple[str, str]) -> None:
    llm = LLM(paths[0], **SETTINGS)
    prompt = tuple(range(10))  # two full blocks and a half
    request = llm.engine.add_request(prompt, SamplingParams(n=3, seed=1, max_tokens=8), SpeculationConfig())
    llm.engine.step()
    llm.engine.step()
    tables = [seq.state.block_table for seq in request.sequences]
    assert len({tuple(t[:2]) for t in tables}) == 1, "full blocks are shared"
    assert len({t[2] for t in tables}) == 3, "the block they write to is not"
    while llm.engine.has_work:
        llm.engine.step()
    assert len({tuple(t) for t in texts(request)}) == 3
    assert_nothing_is_left(llm)


def test_cancelling_frees_everything_and_disturbs_nobody(paths: tuple[str, str], alone: LLM) -> None:
    llm = LLM(paths[0], **SETTINGS, speculation=speculations(paths[1])[3])
    params = SamplingParams(seed=3, max_tokens=20)
    dropped = llm.stream([9, 8, 7, 6], params)
    kept = llm.stream([1, 2, 3], params)
    next(dropped)
    first = next(kept)
    dropped.close()  # type: ignore[attr-defined]
    rest = list(kept)
    tokens = tuple(t for piece in (first, *rest) for t in piece.token_ids)
    assert tokens == alone.generate([1, 2, 3], params)[0].token_ids
    unread = llm.stream([4, 4], params)
    del unread
    assert not llm.engine.has_work
    assert_nothing_is_left(llm)


def test_seeded_text_is_the_same_with_any_proposer(paths: tuple[str, str], alone: LLM) -> None:
    llm = LLM(paths[0], **SETTINGS)
    prompts = [[1, 2, 3, 4, 1, 2, 3], [5], [7, 7, 7, 7]]
    for seed in range(4):
        params = SamplingParams(seed=seed, max_tokens=25, temperature=1.1)
        want = [alone.generate(p, params)[0].token_ids for p in prompts]
        for config in speculations(paths[1]):
            got = llm.generate(prompts, params, speculation=config)
            assert [o.token_ids for o in got] == want, config
    other = llm.generate(prompts, SamplingParams(seed=99, max_tokens=25, temperature=1.1))
    assert [o.token_ids for o in other] != want


def test_unseeded_requests_differ(paths: tuple[str, str]) -> None:
    llm = LLM(paths[0], **SETTINGS)
    outputs = llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=20))
    assert len({o.token_ids for o in outputs}) == 4

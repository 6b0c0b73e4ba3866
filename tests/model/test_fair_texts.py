"""Tenants that take turns get the texts that each would have got alone."""

from __future__ import annotations

import asyncio

import pytest

from outrider import LLM, AsyncLLM, SamplingParams
from tests.conftest import PROMPTS


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_cache_tokens=2048, max_num_seqs=2, max_num_batched_tokens=16)


GREEDY, SEEDED = SamplingParams(temperature=0), SamplingParams(seed=5)


@pytest.mark.parametrize(
    ("speculation", "params"),
    [
        pytest.param("draft_model", SEEDED, id="draft_model, seeded"),
        pytest.param("suffix", GREEDY, id="suffix, greedy"),
        pytest.param("draft_model", GREEDY, id="draft_model, greedy", marks=pytest.mark.slow),
        pytest.param("suffix", SEEDED, id="suffix, seeded", marks=pytest.mark.slow),
        pytest.param("none", GREEDY, id="none, greedy", marks=pytest.mark.slow),
        pytest.param("none", SEEDED, id="none, seeded", marks=pytest.mark.slow),
    ],
)
def test_turns_and_priorities_change_no_text(llm: LLM, params: SamplingParams, speculation: str) -> None:
    long, short = (params.replace(max_tokens=length, ignore_eos=True) for length in (60, 8))
    alone = {
        (prompt, length): llm.generate(prompt, wanted, speculation="none")[0].token_ids
        for prompt in PROMPTS
        for length, wanted in ((60, long), (8, short))
    }

    async def ask() -> list[tuple[int, ...]]:
        server = AsyncLLM(llm)
        flood = [
            asyncio.create_task(
                server.generate(PROMPTS[i % 4], long, speculation=speculation, namespace="flood", priority=-i % 3)
            )
            for i in range(8)
        ]
        while llm.engine.stats.num_committed_tokens < before + 20:
            await asyncio.sleep(0.001)
        quiet = [await server.generate(prompt, short, speculation=speculation, namespace="quiet") for prompt in PROMPTS]
        assert not all(task.done() for task in flood), "the quiet tenant did not wait for the flood to end"
        found = [await task for task in flood]
        assert sum(output.stats.num_preemptions for output in found) > 0, "somebody gave up a seat"
        return [output.token_ids for output in (*found, *quiet)]

    before = llm.engine.stats.num_committed_tokens
    want = [alone[PROMPTS[i % 4], 60] for i in range(8)] + [alone[prompt, 8] for prompt in PROMPTS]
    assert asyncio.run(asyncio.wait_for(ask(), 300)) == want
    llm.engine.check_integrity()

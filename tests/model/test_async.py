"""Coroutines get the texts that they would have got alone, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.errors import ClosedError, InvalidParameterError, InvalidPromptError, ProcessingError
from tests.conftest import PROMPTS

T = TypeVar("T")
PARAMS = SamplingParams(temperature=0, max_tokens=24)  # as in the fixture `alone`
ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    gc.collect()
    while llm.engine.has_work:  # what was dropped is cancelled between two steps
        pass
    llm.engine.check_integrity()
    assert not llm.engine.scheduler.running


def run(job: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(job, 300))


def test_many_at_a_time_get_their_own_texts(llm: LLM, alone: dict[str, tuple[int, ...]]) -> None:
    server = AsyncLLM(llm)

    async def streamed(prompt: str) -> tuple[int, ...]:
        return tuple([token async for piece in server.stream(prompt, PARAMS) for token in piece.token_ids])

    async def generated(prompt: str) -> tuple[int, ...]:
        return (await server.generate(prompt, PARAMS)).token_ids

    async def chatted(prompt: str) -> tuple[int, ...]:
        return (await server.chat([{"role": "user", "content": prompt}], PARAMS)).token_ids

    async def chatted_in_pieces(prompt: str) -> tuple[int, ...]:
        stream = server.stream_chat([{"role": "user", "content": prompt}], PARAMS)
        return tuple([token async for piece in stream for token in piece.token_ids])

    async def ask() -> list[tuple[int, ...]]:
        calls = [streamed, generated, chatted, chatted_in_pieces]
        return await asyncio.gather(*(calls[i % 4](PROMPTS[i // 4 % 4]) for i in range(32)))

    steps = llm.stats.num_steps
    assert run(ask()) == [alone[PROMPTS[i // 4 % 4]] for i in range(32)]
    assert llm.stats.num_steps - steps < 32 * 10, "they share batches"


def test_a_namespace_that_takes_long_to_prepare_holds_up_no_other(
    llm: LLM, alone: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, over = llm.prepare, threading.Event()

    def wait(*args: Any, **options: Any) -> Any:
        if options.get("namespace") == "flood":
            over.wait(60)
        return prepare(*args, **options)

    monkeypatch.setattr(llm, "prepare", wait)

    async def ask() -> list[tuple[int, ...]]:
        server = AsyncLLM(llm)
        flood = [asyncio.create_task(server.generate(PROMPTS[0], PARAMS, namespace="flood")) for _ in range(20)]
        await asyncio.sleep(0)
        quiet = [await server.generate(PROMPTS[0], PARAMS, namespace="quiet") for _ in range(3)]
        assert not any(task.done() for task in flood)
        over.set()
        return [found.first.token_ids for found in [*quiet, *await asyncio.gather(*flood)]]

    assert run(ask()) == [alone[PROMPTS[0]]] * 23


def test_a_text_with_a_seed_is_the_same_streamed_or_not(llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=30, n=2)
    (want,) = llm.generate("import os\n", params)

    async def ask() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {0: [], 1: []}
        async for piece in AsyncLLM(llm).stream("import os\n", params):
            found[piece.index] += piece.token_ids
        return found

    assert run(ask()) == {output.index: list(output.token_ids) for output in want.outputs}


def test_errors_arrive_where_they_belong(llm: LLM) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("planted")

    async def ask() -> list[Any]:
        server = AsyncLLM(llm)
        calls = [
            server.generate("", PARAMS),
            server.generate("x", PARAMS, speculation="no such method"),
            server.generate("x", PARAMS.replace(logits_processors=[fails])),
            server.generate("x", PARAMS),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    kinds = [type(found) for found in run(ask())]
    assert kinds[:3] == [InvalidPromptError, InvalidParameterError, ProcessingError]
    assert not issubclass(kinds[3], Exception)


def test_a_cancelled_task_cancels_its_request(llm: LLM) -> None:
    async def ask() -> None:
        task = asyncio.create_task(AsyncLLM(llm).generate("x", ENDLESS))
        while not llm.engine.has_work:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(ask())
    assert not llm.engine.has_work


def test_a_stream_that_is_left_early_cancels_its_request(llm: LLM) -> None:
    async def ask() -> None:
        async with AsyncLLM(llm).stream("x", ENDLESS) as stream:
            async for _ in stream:
                break

    run(ask())
    assert not llm.engine.has_work


def test_a_stream_that_is_cancelled_keeps_what_it_has_written(llm: LLM) -> None:
    async def ask() -> tuple[list[int], Any]:
        stream, tokens = AsyncLLM(llm).stream("x", ENDLESS), list[int]()
        async for piece in stream:
            tokens += piece.token_ids
            stream.cancel()
        return tokens, stream.output

    tokens, output = run(ask())
    assert output.finish_reason == "cancelled"
    assert 0 < len(tokens) < 1500
    assert list(output.token_ids) == tokens


def test_closing_ends_what_runs() -> None:
    async def ask() -> None:
        async with AsyncLLM(kv_cache_tokens=2048) as server:
            task = asyncio.create_task(server.generate("x", ENDLESS))
            while not server.llm.engine.has_work:
                await asyncio.sleep(0.001)
        with pytest.raises(ClosedError):
            await task
        with pytest.raises(ClosedError):
            await server.generate("x", PARAMS)

    run(ask())


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(seed=3, max_tokens=24, n=2)], ids=["greedy", "seeded"])
def test_a_prediction_changes_the_speed_and_not_the_text(llm: LLM, params: SamplingParams) -> None:
    (want,) = llm.generate("import os\n", params, speculation="none")
    half = len(want.text) // 2

    async def ask(prediction: Any) -> Any:
        return await AsyncLLM(llm).generate("import os\n", params, speculation="prediction", prediction=prediction)

    changed = want.text[:half] + "$$ " + want.text[half:]
    for prediction, helps in ((want.token_ids, True), (want.text, True), (changed, True), ("$$$$", False), (None, False)):
        found = run(ask(prediction))
        assert [output.token_ids for output in found.outputs] == [output.token_ids for output in want.outputs]
        assert bool(found.stats.num_accepted_tokens) == helps
        if prediction == want.token_ids:
            assert found.stats.num_target_passes <= 3


def test_a_prediction_that_is_none_is_refused_by_its_name(llm: LLM) -> None:
    with pytest.raises(InvalidPromptError, match="prediction="):
        run(AsyncLLM(llm).generate("x", PARAMS, speculation="prediction", prediction=3))  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(seed=3, max_tokens=24, n=2)], ids=["greedy", "seeded"])
def test_references_change_the_speed_and_not_the_text(llm: LLM, params: SamplingParams) -> None:
    (want,) = llm.generate("import os\n", params, speculation="suffix")
    texts = ["$$$$", want.text] if params.n == 1 else [output.token_ids for output in want.outputs]

    async def ask(references: Any) -> Any:
        return await AsyncLLM(llm).generate("import os\n", params, speculation="suffix", references=references)

    for references, helps in ((texts, True), (["$$$$"], False), ([], False)):
        found = run(ask(references))
        assert [output.token_ids for output in found.outputs] == [output.token_ids for output in want.outputs]
        assert (found.stats.num_target_passes < want.stats.num_target_passes) == helps


@pytest.mark.parametrize(("given", "field"), [("x", "references"), (3, "references"), (["x", 3], "references.1")])
def test_references_that_are_none_are_refused_by_their_name(llm: LLM, given: Any, field: str) -> None:
    with pytest.raises(InvalidPromptError, match=f"{field}="):
        run(AsyncLLM(llm).generate("x", PARAMS, references=given))


def test_of_a_reference_that_is_too_long_the_beginning_is_taken(llm: LLM) -> None:
    found = llm.prompts.encode_references(["x = 1\n" * 100_000])
    assert 0 < len(found[0]) < 100_000
    assert llm.generate("x", PARAMS, references=["x = 1\n" * 100_000])[0].token_ids

"""Several threads call one LLM: everybody gets the text that he would have got alone."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.params import RequestOutput
from outrider.prompts import PromptEncoder
from tests.conftest import PROMPTS

PARAMS = SamplingParams(temperature=0, max_tokens=24)  # as in the fixture `alone`


def generated(llm: LLM, prompt: str) -> tuple[int, ...]:
    return llm.generate(prompt, PARAMS)[0].token_ids


def streamed(llm: LLM, prompt: str) -> tuple[int, ...]:
    return tuple(token for piece in llm.stream(prompt, PARAMS) for token in piece.token_ids)


def chatted(llm: LLM, prompt: str) -> tuple[int, ...]:
    return llm.chat([{"role": "user", "content": prompt}], PARAMS)[0].token_ids


CALLS: list[Callable[[LLM, str], tuple[int, ...]]] = [generated, streamed, chatted]


@pytest.mark.parametrize("calls", [CALLS[:1], CALLS[1:2], CALLS], ids=["generate", "stream", "mixed"])
def test_threads_get_the_texts_they_would_get_alone(
    llm: LLM, alone: dict[str, tuple[int, ...]], calls: list[Callable[[LLM, str], tuple[int, ...]]]
) -> None:
    jobs = [(calls[i % len(calls)], PROMPTS[i % len(PROMPTS)]) for i in range(24)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: job[0](llm, job[1]), jobs))
    assert found == [alone[prompt] for _, prompt in jobs]
    assert not llm.engine.has_work
    llm.engine.runner.blocks.check_integrity([])


def test_coroutines_get_them_through_threads(llm: LLM, alone: dict[str, tuple[int, ...]]) -> None:
    async def ask() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(asyncio.to_thread(llm.generate, prompt, PARAMS) for prompt in PROMPTS * 3))

    assert [output.token_ids for (output,) in asyncio.run(ask())] == [alone[prompt] for prompt in PROMPTS * 3]


class Watched:
    """The tokenizer, and whether it was ever used twice at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._in_use = threading.Lock()
        self.chat_template = tokenizer.chat_template
        self.overlaps = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._alone(self._tokenizer, *args, **kwargs)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._alone(self._tokenizer.apply_chat_template, *args, **kwargs)

    def _alone(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.overlaps += not self._in_use.acquire(blocking=False)
        time.sleep(0.01)
        result = call(*args, **kwargs)
        if self._in_use.locked():
            self._in_use.release()
        return result


def test_a_tokenizer_of_several_threads_writes_what_it_writes_for_one(llm: LLM) -> None:
    texts = [f"def function_{number}(first, second):\n" * 40 for number in range(64)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(llm.encode, texts)) == [llm.encode(text) for text in texts]


def test_a_tokenizer_in_python_serves_one_thread_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(llm.tokenizer)
    monkeypatch.setattr(llm, "prompts", PromptEncoder(watched, None))
    calls: list[Callable[[str], Any]] = [
        llm.encode,
        lambda prompt: llm.generate(prompt, PARAMS.replace(max_tokens=1)),
        lambda prompt: next(llm.stream(prompt, PARAMS)),
        lambda prompt: llm.chat_prompt([{"role": "user", "content": prompt}]),
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: calls[i % 4](PROMPTS[0]), range(16)))
    assert watched.overlaps == 0


def test_a_half_read_stream_holds_nobody_up(llm: LLM, alone: dict[str, tuple[int, ...]]) -> None:
    stream = llm.stream(PROMPTS[0], PARAMS)
    tokens = list(next(stream).token_ids)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(generated, llm, PROMPTS[1]).result(timeout=60) == alone[PROMPTS[1]]
        rest = pool.submit(list, stream).result(timeout=60)
    assert (*tokens, *(t for piece in rest for t in piece.token_ids)) == alone[PROMPTS[0]]


def test_a_stream_may_be_dropped_in_another_thread(llm: LLM, alone: dict[str, tuple[int, ...]]) -> None:
    stop = threading.Event()

    def drop_streams() -> int:
        count = 0
        while not stop.is_set():
            stream = llm.stream(PROMPTS[2], PARAMS)
            next(stream)
            del stream
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        dropping = pool.submit(drop_streams)
        try:
            found = [generated(llm, prompt) for prompt in PROMPTS * 4]
        finally:
            stop.set()
        assert dropping.result(timeout=60) > 0
    assert found == [alone[prompt] for prompt in PROMPTS * 4]
    assert not llm.engine.has_work
    llm.engine.runner.blocks.check_integrity([])


@pytest.fixture
def inside(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What is put into this list happens once, in the middle of the next engine step: in the target's pass."""
    todo: list[Callable[[], None]] = []
    forward = llm.engine.runner.backend.forward

    def interrupted(*args: Any) -> Any:
        while todo:
            todo.pop()()
        return forward(*args)

    monkeypatch.setattr(llm.engine.runner.backend, "forward", interrupted)
    yield todo
    assert not todo


def test_a_stream_may_be_collected_in_the_middle_of_its_own_threads_step(
    llm: LLM, alone: dict[str, tuple[int, ...]], inside: list[Callable[[], None]]
) -> None:
    stream: Any = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)  # so that only the garbage collector finds it
    del stream, cycle
    inside.append(lambda: (gc.collect(), None)[1])
    assert generated(llm, PROMPTS[1]) == alone[PROMPTS[1]]
    assert not llm.engine.has_work
    llm.engine.runner.blocks.check_integrity([])


def test_dropping_a_stream_waits_for_nobody(
    llm: LLM, alone: dict[str, tuple[int, ...]], inside: list[Callable[[], None]]
) -> None:
    """The thread that drops may hold a lock that the engine's thread needs: here, the end of the drop itself."""
    stream: Any = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    dropped = threading.Event()

    def drop_elsewhere() -> None:
        def drop() -> None:
            stream.close()
            dropped.set()

        threading.Thread(target=drop, daemon=True).start()
        assert dropped.wait(30)

    inside.append(drop_elsewhere)
    assert generated(llm, PROMPTS[1]) == alone[PROMPTS[1]]
    assert not llm.engine.has_work
    llm.engine.runner.blocks.check_integrity([])


def test_a_callback_may_call_again(llm: LLM, alone: dict[str, tuple[int, ...]]) -> None:
    found: list[tuple[int, ...]] = []
    llm.generate(PROMPTS[0], PARAMS, on_finished=lambda _: found.append(generated(llm, PROMPTS[1])))
    assert found == [alone[PROMPTS[1]]]

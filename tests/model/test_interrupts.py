"""What an interrupt, or a cancel in the middle of a step, may not do: lose a seat, a block, or another request."""

from __future__ import annotations

import gc
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.cache.state import SequenceState
from outrider.engine.committing import Committing
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Schedule, Scheduler
from outrider.engine.sequence import Sequence, Status
from outrider.engine.thread import EngineThread
from outrider.errors import StepAbortedError
from tests.model import checkpoints

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6], [7, 7, 7, 7, 7]]
SHORT = SamplingParams(seed=3, max_tokens=6)
LONG = SamplingParams(seed=3, max_tokens=24)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("pair")
    target = checkpoints.save("llama", folder / "target", seed=1, layers=2)
    draft = checkpoints.save("llama", folder / "draft", seed=1, layers=1)
    speculation = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=3)
    return LLM(target, dtype="float64", block_size=4, max_num_seqs=2, kv_cache_tokens=160, speculation=speculation)


@pytest.fixture(autouse=True)
def nothing_is_lost(llm: LLM) -> Iterator[None]:
    yield
    gc.collect()
    llm.engine.check_integrity()
    assert not llm.engine.has_work
    blocks = llm.engine.runner.blocks
    assert blocks.num_free == blocks.num_blocks


def interrupting(method: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """`method` that is interrupted after its work is done, the first time that `when` holds."""
    left = [True]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if left[0] and when(*args):
            left[0] = False
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.mark.parametrize(("owner", "method"), [(Committing, "_extend"), (SequenceState, "publish"), (Engine, "_retire")])
def test_an_interrupt_while_a_finishing_step_commits_loses_no_seat(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    def finished(*given: Any) -> bool:
        """Whether it is about a finished sequence, given itself or by its state."""
        known = [*llm.engine.scheduler.running, *(one for one in given if isinstance(one, Sequence))]
        return any(seq.status is Status.FINISHED and (seq in given or seq.state in given) for seq in known)

    monkeypatch.setattr(owner, method, interrupting(getattr(owner, method), finished))
    before = llm.health.num_broken_steps
    llm.generate(PROMPTS, SHORT)
    assert llm.health.num_broken_steps == before + 1
    gc.collect()
    llm.engine.check_integrity()
    again = llm.generate(PROMPTS, SHORT)
    assert [out.token_ids for out in again] == [llm.generate(p, SHORT)[0].token_ids for p in PROMPTS]


def test_an_interrupted_step_ends_the_streams_it_served_and_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    served = llm.stream(PROMPTS[0], LONG)
    next(served)

    def of_the_target(state: SequenceState, *_: Any) -> bool:
        return any(seq.state is state for seq in llm.engine.scheduler.running)

    monkeypatch.setattr(SequenceState, "publish", interrupting(SequenceState.publish, of_the_target))
    with pytest.raises(StepAbortedError, match="KeyboardInterrupt"):
        list(served)
    assert llm.generate(PROMPTS[1], SHORT)


@pytest.fixture
def hearing() -> Iterator[None]:
    """Interrupts are heard even where the tests run in the background of a shell, which has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hearing")
def test_real_interrupts_lose_nothing(llm: LLM) -> None:
    want = [out.token_ids for out in llm.generate(PROMPTS, LONG)]
    rng, num_interrupted = random.Random(1), 0
    main = threading.main_thread().ident
    assert main is not None
    for _ in range(60):
        timer = threading.Timer(rng.uniform(0.0, 0.03), signal.pthread_kill, (main, signal.SIGINT))
        try:
            timer.start()
            llm.generate(PROMPTS, LONG)
            timer.join()
        except KeyboardInterrupt:
            num_interrupted += 1
        timer.join()
    assert num_interrupted > 20
    gc.collect()
    llm.engine.check_integrity()
    assert [out.token_ids for out in llm.generate(PROMPTS, LONG)] == want


def test_a_stream_that_is_dropped_inside_a_step_kills_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection may drop it at any moment: here right after both were scheduled."""
    want = llm.generate(PROMPTS[1], LONG)[0].token_ids
    dropped = [llm.stream(PROMPTS[0], LONG)]
    next(dropped[0])
    stock = Scheduler.schedule

    def dropping(self: Scheduler) -> Schedule:
        plan = stock(self)
        if len(plan.items) == 2 and dropped:
            dropped.pop().close()  # type: ignore[attr-defined]
        return plan

    monkeypatch.setattr(Scheduler, "schedule", dropping)
    assert llm.generate(PROMPTS[1], LONG)[0].token_ids == want
    assert not dropped
    assert not llm.engine.noise._used, "the ledger of keys forgets with it"  # type: ignore[attr-defined]


def test_where_no_step_makes_progress_the_engine_begins_anew(llm: LLM) -> None:
    want = llm.generate(PROMPTS[0], SHORT)[0].token_ids
    before = llm.health.num_rebuilds
    llm.engine.runner.blocks.allocate(llm.engine.runner.blocks.num_free)  # as a leak would take them
    with pytest.raises(StepAbortedError, match="EngineStalledError") as caught:
        llm.generate(PROMPTS[0], SHORT)
    assert "0 of 40 blocks are free" in str(caught.value.__cause__)
    assert llm.health.num_rebuilds == before + 1
    assert llm.generate(PROMPTS[0], SHORT)[0].token_ids == want


def test_books_that_do_not_agree_after_a_fault_are_begun_anew(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [out.token_ids for out in llm.generate(PROMPTS, SHORT)]
    before = llm.health.num_rebuilds
    left = [True]
    stock = Committing.commit

    def breaking(self: Committing, *args: Any) -> Any:
        committed = stock(self, *args)
        if left.pop():
            left.append(False)
            llm.engine.runner.blocks._ref_count[0] += 1
            raise ValueError("planted")
        left.append(False)
        return committed

    monkeypatch.setattr(Committing, "commit", breaking)
    outputs = llm.generate(PROMPTS, SHORT)
    assert all(isinstance(out.error, StepAbortedError) for out in outputs[:2])  # two run at a time
    assert llm.health.num_rebuilds == before + 1
    assert [out.token_ids for out in llm.generate(PROMPTS, SHORT)] == want


def test_nobody_waits_for_a_thread_whose_own_books_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, left = EngineThread.gather, [True]

    def failing(self: EngineThread) -> Any:
        if self.serving and left:
            left.clear()
            raise ValueError("planted")
        return stock(self)

    monkeypatch.setattr(EngineThread, "gather", failing)
    with pytest.raises(StepAbortedError, match="begin anew after ValueError"):
        llm.generate(PROMPTS[0], SHORT)
    assert llm.generate(PROMPTS[0], SHORT)


def test_the_integrity_check_sees_a_finished_sequence_that_still_runs(llm: LLM) -> None:
    engine = llm.engine
    request = engine.add_request(tuple(PROMPTS[0]), LONG, llm.speculation)  # by hand, so that it stands still
    engine.step()
    (seq,) = engine.scheduler.running
    status, seq.status = seq.status, Status.FINISHED
    with pytest.raises(AssertionError, match="finished"):
        engine.check_integrity()
    seq.status = status
    engine.cancel(request)


def test_accepted_tokens_are_those_that_entered_the_text(llm: LLM) -> None:
    ends: list[tuple[int, int]] = []  # seeds, and tokens new to the text that stood before another one of their draft
    for seed in range(20):
        whole = llm.generate(PROMPTS[0], LONG.replace(seed=seed))[0]
        behind = [i for i in range(23) if whole.origins[i] == whole.origins[i + 1] == "accepted"]
        ends += [(seed, whole.token_ids[i]) for i in behind if whole.token_ids[i] not in whole.token_ids[:i]]
    assert ends
    params = LONG.replace(seed=ends[0][0], stop_token_ids=(ends[0][1],))
    output = llm.generate(PROMPTS[0], params)[0]
    assert output.finish_reason == "stop"
    num_accepted = sum(origin == "accepted" for origin in output.origins)
    assert output.stats.num_accepted_tokens == num_accepted
    assert sum(output.stats.accepted_per_position) == num_accepted

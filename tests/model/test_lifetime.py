"""When an LLM goes, so does its memory; and where it cannot live."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import ClosedError, InvalidPromptError, OutriderError, ProcessingError
from tests.model import checkpoints

PARAMS = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection within the test: what goes, goes because nothing points to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def things_of(llm: LLM) -> list[weakref.ref[Any]]:
    """Models, weights and KV memory, of the target and of its draft models."""
    runners = [llm.engine.runner, *(p.runner for p in llm.proposers if hasattr(p, "runner"))]
    found = [weakref.ref(llm.engine)]
    for runner in runners:
        model = runner.loaded.model
        found += [weakref.ref(o) for o in (runner, model, next(model.parameters()), runner.pool, runner.backend)]
        found += [weakref.ref(tensor) for layer in runner.pool.layers for tensor in runner.pool._layers[layer]]
    return found


def use(llm: LLM) -> None:
    """In every way that there is."""

    def fails(*_: Any) -> Any:
        raise KeyError("planted")

    llm.generate([[1, 2, 3], [1, 2, 9999999]], PARAMS.replace(n=2, logprobs=1))
    with pytest.raises(InvalidPromptError):
        llm.generate([9999999], PARAMS)
    llm.generate([[1, 2, 3]], PARAMS.replace(logits_processors=[fails]))
    with pytest.raises(ProcessingError):
        list(llm.stream([1, 2, 3], PARAMS.replace(logits_processors=[fails])))
    list(llm.stream([1, 2, 3], PARAMS))
    next(llm.stream([1, 2, 3], PARAMS))


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("family", [None, "llama", "gemma2", "gpt2", "longrope"])
def test_the_last_reference_takes_everything_with_it(family: str | None, tmp_path: Path) -> None:
    llm = LLM(None if family is None else checkpoints.save(family, tmp_path), kv_cache_tokens=512)
    use(llm)
    things = things_of(llm)
    del llm
    assert [thing() for thing in things if thing() is not None] == []


@pytest.mark.usefixtures("uncollected")
def test_closing_frees_everything_while_references_stay() -> None:
    llm = LLM(kv_cache_tokens=512)
    use(llm)
    things = things_of(llm)
    stream = llm.stream("def f(", LONG)
    next(stream)
    llm.close()
    assert [thing() for thing in things if thing() is not None] == []
    with pytest.raises(ClosedError):
        list(stream)


def test_a_closed_llm_says_so() -> None:
    with LLM(kv_cache_tokens=512) as llm:
        assert llm.generate("x", PARAMS)
    llm.close()
    assert repr(llm) == "<LLM model=embedded closed>"
    for call in (
        lambda: llm.generate("x"),
        lambda: llm.generate([]),
        lambda: llm.stream("x"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.chat_prompt([{"role": "user", "content": "x"}]),
        lambda: llm.encode("x"),
        lambda: llm.stats,
        lambda: llm.engine,
        lambda: llm.proposers,
    ):
        with pytest.raises(ClosedError, match="Make a new one"):
            call()
    assert issubclass(ClosedError, OutriderError)


def test_an_error_in_the_block_passes_through_and_closes() -> None:
    with pytest.raises(KeyError), LLM(kv_cache_tokens=512) as llm:
        raise KeyError
    with pytest.raises(ClosedError):
        llm.generate("x")


def test_closing_cancels_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(kv_cache_tokens=512)
    engine = llm.engine
    stream = llm.stream("def f(", LONG)
    next(stream)
    assert engine.has_work
    with caplog.at_level(logging.WARNING):
        llm.close()
    assert not engine.has_work
    engine.runner.blocks.check_integrity([])
    assert caplog.text == ""


FORKING = """
import os, signal, sys, time
import torch
from outrider import LLM
from outrider.errors import ForkedProcessError
torch.set_num_threads(2)
llm = LLM(kv_cache_tokens=512)
llm.generate("x")
calls = {
    "generate": lambda: llm.generate("x"),
    "stream": lambda: next(llm.stream("x")),
    "load": lambda: LLM(kv_cache_tokens=512),
    "half": lambda half=llm.stream("x"): next(half),
}
child = os.fork()
if child == 0:
    signal.alarm(40)
    for name, call in calls.items():
        try:
            call()
        except ForkedProcessError as error:
            print(name, "spawn" in str(error), flush=True)
    llm.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child ended"
assert llm.generate("x")
print("parent", True)
"""


@pytest.mark.by_change("src/outrider/engine/", "src/outrider/llm.py", "tests/model/test_lifetime.py")
def test_a_forked_process_is_told_instead_of_hanging() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.split("\n")[:-1] == [f"{name} True" for name in ("generate", "stream", "load", "half", "parent")]
    assert done.returncode == 0

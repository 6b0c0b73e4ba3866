"""Models are loaded at once, and loads are interrupted: the process stays as it was, and ends when it is asked to."""

from __future__ import annotations

import ast
import asyncio
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, core_model_loading

import outrider
from outrider import LLM, AsyncLLM, SamplingParams
from outrider.config import ModelConfig, default_model
from outrider.engine.thread import LONGEST_STAGE, EngineThread
from outrider.errors import ModelLoadError
from outrider.loading import exclusive
from outrider.loading.loader import load_model

PARAMS = SamplingParams(temperature=0, max_tokens=8)
STOCK = (PreTrainedModel.tie_weights, PreTrainedModel.init_weights, nn.init.normal_, torch.linspace)


def swapped() -> tuple[Any, ...]:
    """What transformers swaps while it loads, as it is now."""
    return PreTrainedModel.tie_weights, PreTrainedModel.init_weights, nn.init.normal_, torch.linspace


@pytest.fixture(autouse=True)
def process_is_as_before() -> Any:
    yield
    assert torch.get_default_dtype() == torch.float32
    assert swapped() == STOCK


class Weights:
    """Weights that take a while each, as in large models.

    Attributes:
        begun: Set once the first is being read.
        count: How many were read.
    """

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.count = 0
        self.seconds = 0.2


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
    """Those of every load."""
    found = Weights()
    real = core_model_loading.WeightRenaming.convert

    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.count += 1
        found.begun.set()
        time.sleep(found.seconds)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(core_model_loading.WeightRenaming, "convert", convert)
    return found


def test_threads_load_at_once() -> None:
    """Four real loads begin together, four times."""
    begin = threading.Barrier(4)

    def load(part: str) -> torch.dtype:
        begin.wait()
        return load_model(ModelConfig(model=default_model(part))).dtype

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            assert list(pool.map(load, ("target", "draft") * 2)) == [torch.bfloat16] * 4


def test_coroutines_load_at_once() -> None:
    async def load() -> list[tuple[int, ...]]:
        models = await asyncio.gather(*(asyncio.to_thread(AsyncLLM, kv_cache_tokens=256) for _ in range(2)))
        outputs = await asyncio.gather(*(model.generate("def f(", PARAMS) for model in models))
        for model in models:
            await model.close()
        return [output.token_ids for output in outputs]

    first, second = asyncio.run(load())
    assert first == second == LLM(kv_cache_tokens=256).generate("def f(", PARAMS)[0].token_ids


def test_others_that_load_at_once_are_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own thread has transformers load a model, and so no weights are tied in ours."""
    monkeypatch.setattr(PreTrainedModel, "tie_weights", lambda *_, **__: None)
    with pytest.raises(ModelLoadError, match=r"not tied \(lm_head.weight\): other code of this process") as caught:
        load_model(ModelConfig(model=default_model("draft")))
    assert "exclusive_transformers()" in caught.value.remedy


def test_what_an_interrupt_left_swapped_is_put_back() -> None:
    @exclusive.exclusive_transformers()
    def broken_off() -> None:
        torch.set_default_dtype(torch.float16)
        PreTrainedModel.tie_weights = nn.init.normal_ = torch.linspace = None  # type: ignore[assignment,method-assign]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()


def interrupted(monkeypatch: pytest.MonkeyPatch, begun: threading.Event) -> None:
    """A constructor that is interrupted as soon as its load has begun."""

    def wait(self: EngineThread, function: Any) -> Any:
        outcome = self.post(function)
        begun.wait(60)
        assert not outcome.done()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(EngineThread, "call", wait)
        with pytest.raises(KeyboardInterrupt):
            LLM(default_model("draft"), speculation="none")


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "outrider-engine"]


def test_an_interrupted_load_ends_at_its_next_weight(monkeypatch: pytest.MonkeyPatch, weights: Weights) -> None:
    before = set(engine_threads())
    interrupted(monkeypatch, weights.begun)
    for thread in set(engine_threads()) - before:
        thread.join(60)
        assert not thread.is_alive()
    read, weights.count, weights.seconds = weights.count, 0, 0.0
    assert LLM(default_model("draft"), speculation="none").generate("x", PARAMS)
    assert weights.count > 20
    assert read < weights.count / 2, "the load went on behind the interrupt"


def test_a_load_that_waits_for_its_turn_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    before = set(engine_threads())
    with exclusive.exclusive_transformers():
        threading.Timer(0.5, begun.set).start()  # by then it waits
        interrupted(monkeypatch, begun)
        for thread in set(engine_threads()) - before:
            thread.join(60)
            assert not thread.is_alive()


SLOW = """
import sys, time, transformers.modeling_utils
from transformers import core_model_loading
from outrider.engine import thread
thread.LONGEST_STAGE = {patience}
real = core_model_loading.WeightRenaming.convert
def convert(*args, **kwargs):
    print("loading", file=sys.stderr, flush=True)
    time.sleep({seconds})
    return real(*args, **kwargs)
core_model_loading.WeightRenaming.convert = convert
"""
LIBRARY = "from outrider import LLM; LLM()"
COMMAND = "from outrider.cli import main; sys.argv[1:] = ['generate', '-p', 'x']; main.main()"


def begun(code: str) -> subprocess.Popen[str]:
    """A process that loads, interrupted a first time."""
    hear = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear
    )
    assert process.stderr is not None
    while process.stderr.readline() != "loading\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    return process


#: Processes that are interrupted take seconds to begin.
of_loading = pytest.mark.by_change(
    *("src/outrider/loading/", "src/outrider/engine/", "src/outrider/cli/", "src/outrider/llm.py"),
    "tests/model/test_loading_at_once.py",
)


@of_loading
@pytest.mark.parametrize(
    ("code", "seconds"),
    [
        pytest.param(LIBRARY, 1.0, id="library, many weights"),
        pytest.param(LIBRARY, 60.0, id="library, one weight", marks=pytest.mark.slow),
        pytest.param(COMMAND, 1.0, id="command, many weights", marks=pytest.mark.slow),
        pytest.param(COMMAND, 60.0, id="command, one weight", marks=pytest.mark.core),
    ],
)
def test_one_interrupt_ends_a_process_that_loads(code: str, seconds: float) -> None:
    """Also where a single weight takes a minute. All weights take more than half a minute together."""
    with begun(SLOW.format(seconds=seconds, patience=LONGEST_STAGE) + code) as process:
        start = time.monotonic()
        _, said = process.communicate(timeout=50)
        assert time.monotonic() - start < 30
    said = said.partition("nanobind: ")[0]  # Triton's library, where it is installed, ends with what it leaks
    lines = [line for line in said.splitlines() if line != "loading"]
    if code is COMMAND:
        assert (process.returncode, lines) == (130, [])
    else:
        assert (process.returncode, lines[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


@of_loading
def test_a_second_interrupt_ends_it_at_once_and_does_not_abort() -> None:
    with begun(SLOW.format(seconds=60.0, patience=50.0) + LIBRARY) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "KeyboardInterrupt\n":  # the end of the traceback
            assert process.poll() is None
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, said = process.communicate(timeout=50)
        assert time.monotonic() - start < 30, "it does not wait for the stage"
    assert (process.returncode, said) == (-signal.SIGINT, "")


PACKAGE = Path(outrider.__file__).parent


def untaken(path: Path) -> list[int]:
    """The lines of a module where transformers loads a model and no turn was taken."""
    tree = ast.parse(path.read_text("utf-8"))
    turns = [node for node in ast.walk(tree) if isinstance(node, ast.With) and "exclusive_transformers" in ast.dump(node)]
    taken = {id(inner) for turn in turns for inner in ast.walk(turn)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in taken]
    return [call.lineno for call in calls if ast.unparse(call.func) == "AutoModelForCausalLM.from_pretrained"]


def test_whoever_has_transformers_load_takes_his_turn() -> None:
    here = [path for path in PACKAGE.rglob("*.py") if "peers" not in path.parts]  # peers run in processes of their own
    assert {path: lines for path in here if (lines := untaken(path))} == {}

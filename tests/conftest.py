"""Fixtures of the tests that ask one model in several ways: from threads, from coroutines, and through the server."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import tiers
from tests.chance import begin_chance

if TYPE_CHECKING:
    from outrider import LLM

#: No test measures what passes cost, but those that ask for it, and none leaves files in the user's folders.
os.environ["OUTRIDER_COSTS"] = "off"
#: Triton's interpreter runs the kernels for GPUs, unless somebody who has one says otherwise.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests start hundreds of processes. None of them compiles again what Python has compiled, as some machines ask for.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# No test asserts a time, not even that of one example.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live until the end: the garbage collector need not look through their million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="run what `make test` runs: the core, and what a change touches")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --fast, leave out what belongs to other tiers (see tiers.py)."""
    if config.getoption("fast"):
        chosen = tiers.chosen(items, tiers.changed_paths())
        running = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in running])
        items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test begins with the chance of its file, before its fixtures: what passes once passes in any order."""
    begin_chance(item.location[0])


@pytest.fixture
def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of texts that are too short for a speed are believed, whatever else the machine does."""
    from outrider.lab.measure import writing
    from outrider.lab.measure.machine import Load, LoadWatch

    monkeypatch.setattr(writing, "SLACK", 1e9)
    monkeypatch.setattr(writing, "_FASTER", 1e9)
    monkeypatch.setattr("outrider.lab.bench.results.SLACK", 1e9)
    monkeypatch.setattr(LoadWatch, "load", lambda self: Load(0.0, 2, 2))


PROMPTS = ["def parse(line):\n", "class Reader:\n", "import os\n", "for name in names:\n"]


@pytest.fixture(scope="module")
def template() -> str:
    """A chat template; a module may have one of its own."""
    return "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def llm(template: str) -> LLM:
    """The embedded pair, with a chat template."""
    from outrider import LLM

    llm = LLM(speculation="draft_model", kv_cache_tokens=4096)
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = template
    return llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, tuple[int, ...]]:
    """The greedy text of 24 tokens behind each prompt."""
    from outrider import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24)
    return {prompt: llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS}

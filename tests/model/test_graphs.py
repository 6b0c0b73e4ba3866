"""Passes of fixed shapes over memory of fixed places, as CUDA graphs need them.

On a CPU a stand-in runs the recorded work once more, and so reads whatever lies in these places; Triton is interpreted.
With TRITON_INTERPRET=0 the same runs on a GPU with real graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from outrider import LLM, SamplingParams
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.model import graphs
from outrider.model.batch import Segment
from outrider.model.runner import ForwardOutput, ModelRunner
from tests.model import checkpoints
from tests.unit.interpreted import DEVICE, even_products

#: The interpreter takes seconds for a pass.
BY_CHANGE = pytest.mark.by_change("src/outrider/kernels/triton/", "src/outrider/model/", "tests/model/test_graphs.py")
BLOCKS = list(range(3, 30))
#: Passes in this order: a prompt, single rows, drafts with two texts in between, a tree, another text beside the first, and
#: rows whose number is rounded up. Each comes several times, over other tokens, so that the later ones are replayed.
PASSES: list[list[Segment]] = [
    [Segment([5, 1, 9, 2, 7, 7, 3, 11, 4], 0, BLOCKS[:8], logits_from=8)],
    *[[Segment([token], 9 + at, BLOCKS[:8])] for at, token in enumerate((4, 8, 1))],
    [Segment([2, 6, 3, 1], 12, BLOCKS[:8])],
    [Segment([2, 5], 12, BLOCKS[:8]), Segment([9, 4], 0, BLOCKS[8:16])],
    [Segment([2, 9, 3, 1], 12, BLOCKS[:8])],
    *[[Segment([token, 4, 8, 5, 3], 13, BLOCKS[:8], (-1, 0, 0, 1, 1))] for token in (7, 2, 10)],
    *[
        [Segment([token], 14, BLOCKS[:8]), Segment([3, 4, token], first, BLOCKS[8:16], logits_from=2)]
        for first, token in enumerate((5, 9, 1), 0)
    ],
    *[
        [Segment([1, token, 2, 4, 6], 15, BLOCKS[:8], logits_from=1), Segment([7, 7, token, 3], 3, BLOCKS[8:16])]
        for token in (8, 2, 12)
    ],
]


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with replaying(monkeypatch) as found:
        yield found


@contextmanager
def replaying(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Graphs on this device; the list notes what was recorded and what was launched."""
    found: list[str] = []
    real = graphs.GraphMemory.recorded

    def recorded(memory: graphs.GraphMemory, work: Callable[[], None]) -> Callable[[], object]:
        found.append("recorded")
        again = work if DEVICE.type == "cpu" else real(memory, work)
        return lambda: (found.append("launched"), again())

    monkeypatch.setattr(graphs.GraphMemory, "recorded", recorded)
    monkeypatch.setattr(graphs, "records", lambda device: True)
    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")
    with even_products():
        yield found


def load(path: str, **how: Any) -> LLM:
    settings = {"dtype": "float32", "attention_backend": "paged", "block_size": 4, "kv_cache_tokens": 160}
    return LLM(path, **{**settings, "device": DEVICE.type, "speculation": "none", **how})


def passes(runner: ModelRunner, aux_layers: tuple[int, ...] = ()) -> list[ForwardOutput]:
    mine = runner.with_own_memory(4 * 40)
    return [mine.forward(segments, aux_layers) for segments in PASSES]


def same(got: list[ForwardOutput], want: list[ForwardOutput]) -> bool:
    return all(
        torch.allclose(here.logits, there.logits, atol=1e-4)
        and here.logits_spans == there.logits_spans
        and here.aux_hidden_states.keys() == there.aux_hidden_states.keys()
        and all(
            torch.allclose(states, there.aux_hidden_states[at], atol=1e-4) for at, states in here.aux_hidden_states.items()
        )
        for here, there in zip(got, want, strict=True)
    )


@BY_CHANGE
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_what_is_launched_again_is_what_the_pass_computes(
    family: str, tmp_path: Path, replayed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, caps and sinks, trees, hidden states of layers, rows and logits that are rounded up.

    On a GPU, experts have a product of all of them in bfloat16 alone.
    """
    dtype = "bfloat16" if family == "gpt_oss" and DEVICE.type == "cuda" else "float32"
    runner = load(checkpoints.save(family, tmp_path / family, layers=2), dtype=dtype).engine.runner
    replayed.clear()
    got = passes(runner, (1,))
    assert replayed.count("recorded") == 5, "each shape but that of the prompt, which comes once"
    assert replayed.count("launched") == 10
    monkeypatch.setattr(graphs, "records", lambda device: False)
    want = passes(runner, (1,))
    assert replayed.count("launched") == 10
    assert same(got, want)


@BY_CHANGE
def test_texts_are_those_of_passes_without_graphs(
    tmp_path: Path, replayed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, draft = (save_tiny_llama(tmp_path / str(seed), seed=seed, vocab_size=13) for seed in (1, 2))
    ways: list[Any] = [None, {"method": "draft_model", "model": draft, "num_draft_tokens": 3}]
    params = [SamplingParams(temperature=t, seed=7, max_tokens=12) for t in (0.0, 1.0)]
    prompts = [[1, 5, 9, 2, 7, 7, 3, 11, 4], [3, 1, 4]]

    def texts() -> list[Any]:
        with load(path) as llm:
            return [[o.token_ids for o in llm.generate(prompts, each, speculation=way)] for way in ways for each in params]

    got = texts()
    assert "launched" in replayed
    monkeypatch.setattr(graphs, "records", lambda device: False)
    assert got == texts()


@BY_CHANGE
def test_a_model_that_cannot_be_recorded_runs_as_before(
    tmp_path: Path, replayed: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(memory: graphs.GraphMemory, work: Callable[[], None]) -> Any:
        replayed.append("refused")
        raise RuntimeError("the work waits for the device")

    runner = load(save_tiny_llama(tmp_path / "llama", seed=1, vocab_size=13)).engine.runner
    monkeypatch.setattr(graphs.GraphMemory, "recorded", refuse)
    replayed.clear()
    with caplog.at_level("INFO"):
        got = passes(runner)
    assert replayed == ["refused"], "it is tried once"
    assert "the work waits for the device" in caplog.text
    monkeypatch.setattr(graphs, "records", lambda device: False)
    assert same(got, passes(runner))


@BY_CHANGE
def test_few_graphs_are_kept(tmp_path: Path, replayed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(save_tiny_llama(tmp_path / "llama", seed=1, vocab_size=13)).engine.runner.with_own_memory(160)
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    for segments in PASSES:
        runner.forward(segments)
    replayed.clear()
    for segments in (PASSES[-1], PASSES[-4], PASSES[1]):
        runner.forward(segments)
    assert replayed == ["launched", "launched"], "the shapes that were used last have graphs"

"""How often the host asks for the numbers of a tensor in a step: on a GPU it waits each time. These may only fall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.draft import Draft, Law
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.propose import draft_model, host
from outrider.propose.base import ProposeRequest
from outrider.propose.draft_model import DraftModel
from outrider.verify.noise import Key, KeyedNoise, Stream
from tests.unit.builders import make_sequence, note_draws

#: What hands the numbers of a tensor to Python.
ANSWERS = {
    "tolist",
    "item",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "equal",
    "allclose",
    "cpu",
    "numpy",
    "nonzero",
}
#: What finds out how many places a mask has, if it is given one.
PLACES = {"__getitem__", "__setitem__"}
GREEDY, SAMPLED, SEEDED = (
    SamplingParams(max_tokens=40, ignore_eos=True, **how)
    for how in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "seed": 3})
)
DEPTH = 4
#: Settings of a draft of four levels or of none, parameters, texts, and how often a step may wait.
STEPS: dict[str, tuple[dict[str, Any], SamplingParams, int, int]] = {
    "plain, greedy": ({}, GREEDY, 1, 2),
    "plain, sampled": ({}, SAMPLED, 1, 3),
    "chain, greedy": ({"num_draft_tokens": DEPTH}, GREEDY, 1, 3),
    "chain, sampled": ({"num_draft_tokens": DEPTH}, SAMPLED, 1, 5),
    "chain, seeded": ({"num_draft_tokens": DEPTH}, SEEDED, 1, 4),
    "tree, greedy": ({"num_draft_tokens": 6, "tree": (2, 2)}, GREEDY, 1, 4),
    "chain, greedy, eight texts": ({"num_draft_tokens": DEPTH}, GREEDY, 8, 3),
    "chain, sampled, eight texts": ({"num_draft_tokens": DEPTH}, SAMPLED, 8, 5),
}


def _masks(index: Any) -> bool:
    """Tells whether a mask is among what a tensor is indexed with."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)


class Asked(TorchFunctionMode):
    """Counts where the host asks."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], torch.Tensor) and (name in ANSWERS or (name in PLACES and _masks(args[1]))):
            self.places[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """On stock operators, as the parts of a step that a GPU shares with a CPU run there."""
    folder = tmp_path_factory.mktemp("waits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", "off")
        target, draft = (save_tiny_llama(folder / str(seed), seed=seed, vocab_size=13) for seed in (1, 2))
        how: Any = {"method": "draft_model", "num_draft_tokens": DEPTH}
        with LLM(target, draft_model=draft, dtype="float32", kv_cache_tokens=1024, speculation=how) as made:
            yield made


@contextmanager
def decoding(llm: LLM, params: SamplingParams, config: SpeculationConfig, texts: int) -> Iterator[None]:
    """Texts that decode, step by step."""
    engine = llm.engine
    engine.load_method(config)
    requests = [engine.add_request(tuple(range(1, 5 + number % 3)), params, config) for number in range(texts)]
    while not all(request.sequences[0].num_output_tokens > 2 for request in requests):
        engine.step()
    try:
        yield
        assert all(request.error is None and not request.finished for request in requests)
    finally:
        for request in requests:
            engine.cancel(request)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_waits_no_more_often(step: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (draft_model, host):
        monkeypatch.setattr(module, "host_waits", lambda device: True)
    how, params, texts, most = STEPS[step]
    config = SpeculationConfig(method=DraftModel(model=llm.speculation.method.model) if how else "none", **how)
    with decoding(llm, params, config, texts):
        counts = []
        for _ in range(3):
            with Asked() as asked:
                llm.engine.step()
            counts.append(asked.places)
    assert max(found.total() for found in counts) <= most, counts


def test_trees_that_hold_are_inspected_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_waits", lambda device: True)
    trees = [Draft((2, 0, number), (-1, -1, 1), (Law.SAMPLED,) * 3, torch.full((3, 4), 0.25)) for number in range(4)]
    requests = [ProposeRequest(make_sequence(3).view, 5) for _ in trees]
    for request, tree in zip(requests, trees, strict=True):
        note_draws(request, tree)
    with Asked() as asked:
        hold = host.draws_hold(requests, trees, 4)
        found = [host.inspected(*each) for each in zip(requests, trees, [4] * 4, hold, strict=True)]
    assert asked.places == {"tolist": 1}
    assert [problem for _, problem in found] == [None] * 4


def test_draws_of_two_kinds_at_once_wait_for_nothing() -> None:
    """Some texts of a batch draw behind a whole draft, and others behind a refusal."""
    keys = [Key(0, 1, 0, Stream.TARGET if row % 3 else Stream.RECOVER, row) for row in range(7)]
    with Asked() as asked:
        KeyedNoise().categorical(torch.full((7, 5), 0.2), keys)
    assert not asked.places

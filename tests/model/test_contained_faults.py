"""What raises in a step ends the requests that it concerns: the others write their texts to the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.cache.memory import StateMemory
from outrider.cache.state import SequenceState
from outrider.config import RequestOptions
from outrider.engine import committing, verification
from outrider.engine import committing as rounds
from outrider.engine import engine as engine_module
from outrider.engine.committing import Committing
from outrider.engine.drafting import drafting
from outrider.engine.drafting.proposers import TreeBuilders
from outrider.engine.engine import Engine
from outrider.engine.sequence import Sequence
from outrider.errors import NoiseReuseError, StepAbortedError
from outrider.verify.verifier import Verifier

PROMPTS = ["def parse(line):\n", "class Reader:\n", "import os\n"]
MARKED = 1
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(seed=3, max_tokens=20, n=2, logprobs=1),
    SamplingParams(seed=8, max_tokens=20),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_cache_tokens=2048)


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    before = llm.health
    yield
    llm.engine.check_integrity()
    llm.engine.runner.blocks.check_integrity([])
    after = replace(llm.health, switched_off=before.switched_off)  # as a proposer is that was planted to fail
    assert after == before, "no step was broken off, and nothing was begun anew"


class Fault:
    """Raises when it is asked about a sequence of the marked request, after a few times."""

    def __init__(self, llm: LLM, error: Exception) -> None:
        self.marked = llm.encode(PROMPTS[MARKED])
        self.error = error
        self.num_passed = 0
        self.num_raised = 0

    def about(self, request: Any) -> None:
        if request.prompt_token_ids == self.marked:
            self.num_passed += 1
            if self.num_passed > 3:
                self.num_raised += 1
                raise self.error

    def before(self, stock: Callable[..., Any], place: int) -> Callable[..., Any]:
        """A function that raises about the sequence among its arguments, and does what it did for all others."""

        def planted(*args: Any, **kwargs: Any) -> Any:
            seq: Sequence = args[place]
            self.about(seq.request)
            return stock(*args, **kwargs)

        return planted


def in_verification(fault: Fault, patch: pytest.MonkeyPatch, llm: LLM) -> None:
    stock, engine = Verifier.verify, llm.engine

    def verify(self: Verifier, candidates: Any, *rows: Any) -> Any:
        found = stock(self, candidates, *rows)  # all coins have fallen
        for candidate in candidates:
            for seq in engine.scheduler.running:
                if seq.seq_id == candidate.keys.owner:
                    fault.about(seq.request)
        return found

    patch.setattr(Verifier, "verify", verify)


def in_compaction(fault: Fault, patch: pytest.MonkeyPatch, llm: LLM) -> None:
    stock, engine = SequenceState.commit, llm.engine

    def commit(self: SequenceState, *args: Any) -> None:
        for seq in engine.scheduler.running:
            if seq.state is self:
                fault.about(seq.request)
        stock(self, *args)

    patch.setattr(SequenceState, "commit", commit)


def in_copies(fault: Fault, patch: pytest.MonkeyPatch, llm: LLM) -> None:
    """When samples part, each gets a copy of the block that all of them would write to."""
    stock, engine = StateMemory.make_copies, llm.engine
    fault.num_passed = 3

    def make_copies(self: StateMemory, states: Any) -> None:
        for seq in engine.scheduler.running:
            if seq.state in states and seq.state.copies:
                fault.about(seq.request)
        stock(self, states)

    patch.setattr(StateMemory, "make_copies", make_copies)


def in_forks(fault: Fault, patch: pytest.MonkeyPatch, llm: LLM) -> None:
    fault.num_passed = 3
    in_(Engine, "_fork", 1)(fault, patch, llm)


def in_(owner: Any, name: str, place: int) -> Callable[..., None]:
    return lambda fault, patch, llm: patch.setattr(owner, name, fault.before(getattr(owner, name), place))


WHERE: dict[str, Callable[[Fault, pytest.MonkeyPatch, LLM], None]] = {
    "verification": in_verification,
    "log probabilities": in_(committing, "score", 0),
    "prompt": in_(committing, "score_prompt", 0),
    "extension": in_(Committing, "_extend", 1),
    "trace": in_(rounds, "trace", 0),
    "compaction": in_compaction,
    "copies": in_copies,
    "forks": in_forks,
    "segments": lambda fault, patch, llm: patch.setattr(
        engine_module,
        "segment_of",
        lambda item, *args, stock=engine_module.segment_of: (fault.about(item.seq.request), stock(item, *args))[1],
    ),
    "piece": in_(committing, "piece", 0),
    "candidate": lambda fault, patch, llm: patch.setattr(
        verification,
        "_candidate",
        lambda item, *args, stock=verification._candidate: (fault.about(item.seq.request), stock(item, *args))[1],
    ),
}


def write(llm: LLM, speculation: str) -> tuple[list[Any], list[Any]]:
    """What came of each request: its tokens, or its error."""
    engine = llm.engine
    requests = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        config = llm.resolve(speculation)
        requests.append(engine.add_request(llm.encode(prompt), params, config, RequestOptions(streaming=True, trace=True)))
    while engine.has_work:
        engine.step()
    return [[seq.output_token_ids for seq in request.sequences] for request in requests], [r.error for r in requests]


@pytest.mark.parametrize("speculation", ["none", "draft_model"])
@pytest.mark.parametrize("where", WHERE)
def test_only_the_requests_concerned_end(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, speculation: str
) -> None:
    want, _ = write(llm, speculation)
    fault = Fault(llm, ValueError("planted"))
    faults = llm.engine.stats.num_faults
    WHERE[where](fault, monkeypatch, llm)
    with caplog.at_level(logging.ERROR):
        got, errors = write(llm, speculation)
    assert fault.num_raised > 0
    assert [got[0], got[2]] == [want[0], want[2]]
    assert (errors[0], errors[2]) == (None, None)
    assert isinstance(errors[1], StepAbortedError)
    assert errors[1].__cause__ is fault.error
    assert 1 <= llm.engine.stats.num_faults - faults <= 2, "a fault of each sample at most"
    assert any("raised" in record.message for record in caplog.records)


@pytest.mark.parametrize("owner", [TreeBuilders, drafting], ids=["pace", "teach"])
def test_what_only_drafts_need_costs_no_text(llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: Any) -> None:
    """Trees that adapt learn from every step."""
    speculation = {"method": "draft_model", "tree": "best_first", "num_draft_tokens": 4}
    want = [out.token_ids for out in llm.generate(PROMPTS, PARAMS, speculation="none")]

    def explode(*_: Any, **__: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(owner, "observe_step" if owner is TreeBuilders else "teach", explode)
    outputs = llm.generate(PROMPTS, PARAMS, speculation=speculation)
    assert [out.token_ids for out in outputs] == want


def test_a_key_that_is_used_twice_is_not_forgiven(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose fault a failed verification is, is found by drawing again; what made it fail must not be lost by that."""
    want, _ = write(llm, "none")
    stock = Verifier.verify
    marked = llm.encode(PROMPTS[MARKED])

    def twice(self: Verifier, candidates: Any, *rows: Any) -> Any:
        found = stock(self, candidates, *rows)
        for seq in llm.engine.scheduler.running:
            if seq.request.prompt_token_ids == marked and any(c.keys.owner == seq.seq_id for c in candidates):
                stock(self, [c for c in candidates if c.keys.owner == seq.seq_id], *rows)
        return found

    engine = llm.engine
    monkeypatch.setattr(type(llm), "engine", property(lambda self: engine))
    monkeypatch.setattr(Verifier, "verify", twice)
    got, errors = write(llm, "none")
    assert isinstance(errors[1].__cause__, NoiseReuseError)
    assert [got[0], got[2]] == [want[0], want[2]]

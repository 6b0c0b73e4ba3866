"""What proposers answer is inspected row by row: a fault costs the rows from there on, and never a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.drafting import propose_all, sound_prefix
from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.sequence import Sequence as EngineSequence
from outrider.engine.verifier import rule_for
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.draft import EMPTY, Draft, Law
from outrider.verify.noise import KeyedNoise
from tests.unit.builders import make_sequence

VOCAB = 4


def sampled(tokens: Sequence[Any] = (0, 1, 2), probs: Any = None) -> Draft:
    laws = torch.full((len(tokens), VOCAB), 1 / VOCAB) if probs is None else probs
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (Law.SAMPLED,) * len(tokens), laws)


def with_row(row: int, values: Sequence[float]) -> torch.Tensor:
    probs = torch.full((3, VOCAB), 1 / VOCAB)
    probs[row] = torch.tensor(values)
    return probs


# -- sound drafts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draft",
    [
        EMPTY,
        sampled(),
        Draft.chain([3, 0], Law.DETERMINISTIC),
        Draft.chain([3, 0], Law.COUPLED),
        Draft((1, 2, 1), (-1, -1, 0), (Law.OPAQUE, Law.SCRATCH, Law.DETERMINISTIC)),
        Draft((1, 2), (-1, 0), (Law.SAMPLED, Law.OPAQUE), torch.tensor([[0.0, 1.0, 0.0, 0.0], [float("nan")] * 4])),
        sampled(probs=with_row(1, [0.2501, 0.2501, 0.2501, 0.2501])),  # rounding over a large vocabulary
    ],
)
def test_a_sound_draft_passes_as_it_is(draft: Draft) -> None:
    found, problem = sound_prefix(draft, 5, 9, VOCAB)
    assert found is draft
    assert problem is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.data())
def test_random_trees_with_honest_laws_pass(size: int, data: st.DataObject) -> None:
    tokens = tuple(data.draw(st.integers(0, VOCAB - 1)) for _ in range(size))
    parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(size))
    laws = tuple(data.draw(st.sampled_from(list(Law))) for _ in range(size))
    draft = Draft(tokens, parents, laws, torch.full((size, VOCAB), 1 / VOCAB))
    drawn = [(p, t) for p, t, law in zip(parents, tokens, laws, strict=True) if law is Law.SAMPLED]
    found, problem = sound_prefix(draft, 6, 9, VOCAB)
    if len(set(drawn)) == len(drawn):
        assert (found, problem) == (draft, None)
    else:  # a token cannot be drawn twice from one law without replacement
        assert found == draft.opaque()
        assert problem is not None


def test_siblings_of_unlike_laws_are_believed_no_law() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    found, problem = sound_prefix(Draft((0, 1), (-1, -1), (Law.SAMPLED,) * 2, probs), 6, 9, 3)
    assert found.candidate_laws == {Law.OPAQUE}
    assert problem is not None


def test_nodes_deeper_than_a_text_may_go_are_cut() -> None:
    chain = Draft.chain([1, 2, 3], Law.DETERMINISTIC)
    found, problem = sound_prefix(chain, 6, 2, VOCAB)
    assert found == chain.first(2)
    assert problem is not None
    assert sound_prefix(Draft((1, 2, 3), (-1,) * 3, (Law.OPAQUE,) * 3), 6, 1, VOCAB)[1] is None


# -- one faulty row ----------------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[int], Draft]] = {
    "token past the vocabulary": lambda j: _replace_token(j, VOCAB),
    "negative token": lambda j: _replace_token(j, -1),
    "float token": lambda j: _replace_token(j, 1.0),
    "bool token": lambda j: _replace_token(j, True),
    "text token": lambda j: _replace_token(j, "1"),
    "no token": lambda j: _replace_token(j, None),
    "tensor token": lambda j: _replace_token(j, torch.tensor(1)),
    "numpy token": lambda j: _replace_token(j, np.int64(1)),
    "parent is itself": lambda j: _replace_parent(j, j),
    "parent comes later": lambda j: _replace_parent(j, 3),
    "parent below the root": lambda j: _replace_parent(j, -2),
    "float parent": lambda j: _replace_parent(j, -1.0),
    "text parent": lambda j: _replace_parent(j, "0"),
    "no parent": lambda j: _replace_parent(j, None),
    "bool parent": lambda j: _replace_parent(j, False),
    "law by another name": lambda j: _replace_law(j, "guessed"),
    "law that cannot be hashed": lambda j: _replace_law(j, ["sampled"]),
    "no law": lambda j: _replace_law(j, None),
    "NaN in the law": lambda j: sampled(probs=with_row(j, [float("nan"), 0.5, 0.25, 0.25])),
    "infinity in the law": lambda j: sampled(probs=with_row(j, [float("inf"), 0.0, 0.0, 0.0])),
    "negative probability": lambda j: sampled(probs=with_row(j, [0.75, 0.75, 0.75, -1.25])),
    "law without mass": lambda j: sampled(probs=with_row(j, [0.0] * 4)),
    "law with too much mass": lambda j: sampled(probs=with_row(j, [0.3] * 4)),
    "law of logits": lambda j: sampled(probs=with_row(j, [4.0, -2.0, 1.0, 0.5])),
    "law that could not draw its token": lambda j: sampled((3, 3, 3), with_row(j, [0.5, 0.5, 0.0, 0.0])),
}


def _replace_token(row: int, token: Any) -> Draft:
    tokens: list[Any] = [0, 1, 2]
    tokens[row] = token
    return sampled(tokens)


def _replace_parent(row: int, parent: Any) -> Draft:
    parents: list[Any] = [-1, 0, 1]
    parents[row] = parent
    return Draft((0, 1, 2), tuple(parents), (Law.OPAQUE,) * 3)


def _replace_law(row: int, law: Any) -> Draft:
    laws: list[Any] = [Law.SAMPLED] * 3
    laws[row] = law
    return Draft((0, 1, 2), (-1, 0, 1), tuple(laws), torch.full((3, VOCAB), 1 / VOCAB))


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_keeps_the_rows_before_it(fault: str, row: int) -> None:
    draft = FAULTS[fault](row)
    found, problem = sound_prefix(draft, 5, 9, VOCAB)
    assert problem is not None
    assert problem.startswith(f"node {row}: ")
    assert found.token_ids == draft.token_ids[:row]
    assert found.parents == draft.parents[:row]
    assert found.laws == draft.laws[:row]
    if row == 0:
        assert found is EMPTY
    elif draft.draft_probs is not None:
        assert found.draft_probs is not None
        assert torch.equal(found.draft_probs, draft.draft_probs[:row])
    # What is left is safe for everything that looks at it later.
    assert found.depths == list(range(1, row + 1))
    rule_for(found, "auto")


def test_the_first_of_several_faults_decides() -> None:
    draft = Draft((0, 9, 1, -1), (-1, 0, 7, 2), (Law.OPAQUE,) * 4)
    found, problem = sound_prefix(draft, 5, 9, VOCAB)
    assert len(found) == 1
    assert problem is not None
    assert problem.startswith("node 1: ")


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_nodes_beyond_the_budget_are_cut_and_counted(budget: int) -> None:
    found, problem = sound_prefix(sampled(), budget, 9, VOCAB)
    assert len(found) == budget
    assert problem == f"node {budget}: more than {budget} nodes"


# -- answers that are no drafts ----------------------------------------------------------------------------------------

NONSENSE: dict[str, Any] = {
    "nothing": None,
    "a list": [0, 1],
    "a class": Draft,
    "too few parents": Draft((0, 1), (-1,), (Law.OPAQUE,) * 2),
    "too few laws": Draft((0, 1), (-1, 0), (Law.OPAQUE,)),
    "too many laws": Draft((0,), (-1,), (Law.OPAQUE,) * 2),
    "no probabilities": Draft((0, 1), (-1, 0), (Law.SAMPLED,) * 2),
    "too few rows of probabilities": sampled(probs=torch.full((2, VOCAB), 1 / VOCAB)),
    "too many rows of probabilities": sampled(probs=torch.full((4, VOCAB), 1 / VOCAB)),
    "probabilities of another vocabulary": sampled(probs=torch.full((3, VOCAB + 1), 1 / (VOCAB + 1))),
    "parents in a tensor": Draft((0, 1), torch.tensor([-1, 0]), (Law.OPAQUE,) * 2),  # type: ignore[arg-type]
    "tokens in a tensor": Draft(torch.tensor([0, 1]), (-1, 0), (Law.OPAQUE,) * 2),  # type: ignore[arg-type]
    "flat probabilities": sampled(probs=torch.full((3 * VOCAB,), 1 / VOCAB)),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_an_answer_without_a_sound_row_is_empty(what: str) -> None:
    found, problem = sound_prefix(NONSENSE[what], 5, 9, VOCAB)
    assert found == EMPTY
    assert problem


MALFORMED: dict[str, Any] = {
    **NONSENSE,
    "no tokens at all": Draft(None, (), ()),  # type: ignore[arg-type]
    "probabilities that are no tensor": sampled(probs=[[0.25] * 4] * 3),
    "probabilities of text": sampled(probs=np.array([["a"] * 4] * 3)),
    "complex probabilities": sampled(probs=torch.full((3, VOCAB), 0.25 + 1j)),
}


class Stub(Proposer):
    """Answers what it was told to."""

    def __init__(self, answer: Callable[[Sequence[ProposeRequest]], Any]) -> None:
        self.answer = answer
        self.calls: list[list[int]] = []

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Any:
        self.calls.append([request.budget for request in requests])
        return self.answer(requests)


def scheduled(proposer: Proposer | None, budget: int = 5) -> ScheduledSequence:
    return ScheduledSequence(make_sequence(3, proposer=proposer), 1, budget, budget)


def ask(*items: ScheduledSequence) -> list[Draft]:
    return propose_all(items, KeyedNoise(), VOCAB)


def faults(item: ScheduledSequence) -> tuple[int, bool]:
    seq: EngineSequence = item.seq
    return seq.stats.num_proposer_faults, seq.demoted


GOOD = Draft.chain([1, 2], Law.DETERMINISTIC)


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_answer_costs_that_sequence_its_draft_and_no_other(what: str) -> None:
    proposer = Stub(lambda requests: [GOOD, MALFORMED[what], GOOD])
    items = [scheduled(proposer) for _ in range(3)]
    assert ask(*items) == [GOOD, EMPTY, GOOD]
    assert [faults(item) for item in items] == [(0, False), (1, True), (0, False)]


def _raise(requests: Sequence[ProposeRequest]) -> list[Draft]:
    raise RuntimeError("broken")


def _raise_midway(requests: Sequence[ProposeRequest]) -> Any:
    yield GOOD
    raise RuntimeError("broken")


BROKEN_CALLS: dict[str, Callable[..., Any]] = {
    "raises": _raise,
    "raises midway": _raise_midway,
    "answers nothing": lambda requests: None,
    "answers a number": lambda requests: 3,
    "no drafts": lambda requests: [],
    "a draft too many": lambda requests: [GOOD] * (len(requests) + 1),
    "a draft too few": lambda requests: [GOOD] * (len(requests) - 1),
}


@pytest.mark.parametrize("answer", BROKEN_CALLS.values(), ids=BROKEN_CALLS)
def test_a_call_that_fails_costs_all_its_sequences_one_round(answer: Callable[..., Any]) -> None:
    broken, sound = Stub(answer), Stub(lambda requests: [GOOD] * len(requests))
    items = [scheduled(broken), scheduled(sound), scheduled(broken)]
    assert ask(*items) == [EMPTY, GOOD, EMPTY]
    assert [faults(item) for item in items] == [(1, True), (0, False), (1, True)]
    broken.answer = sound.answer
    assert ask(*items) == [GOOD.opaque(), GOOD, GOOD.opaque()], "it may go on, but is no longer believed"


def test_each_proposer_is_asked_once_and_answers_in_order() -> None:
    one = Stub(lambda requests: [Draft.chain([r.budget], Law.OPAQUE) for r in requests])
    other = Stub(lambda requests: [GOOD] * len(requests))
    items = [scheduled(one, 1), scheduled(other, 2), scheduled(None, 0), scheduled(one, 3)]
    assert ask(*items) == [Draft.chain([1], Law.OPAQUE), GOOD, EMPTY, Draft.chain([3], Law.OPAQUE)]
    assert (one.calls, other.calls) == ([[1, 3]], [[2]])


def test_a_sequence_without_budget_is_not_asked_for() -> None:
    proposer = Stub(lambda requests: [GOOD] * len(requests))
    assert ask(scheduled(proposer, 0)) == [EMPTY]
    assert proposer.calls == []


def test_an_empty_draft_is_no_fault() -> None:
    item = scheduled(Stub(lambda requests: [EMPTY]))
    assert ask(item) == [EMPTY]
    assert faults(item) == (0, False)


def test_the_round_of_the_fault_keeps_its_laws_and_later_ones_claim_none() -> None:
    item = scheduled(Stub(lambda requests: [_replace_token(1, 99)]))
    (first,) = ask(item)
    assert first.laws == (Law.SAMPLED,)
    (second,) = ask(item)
    assert (second.laws, second.draft_probs) == ((Law.OPAQUE,), None)
    assert faults(item) == (2, True)


def test_a_fault_is_logged_with_proposer_request_and_problem(caplog: pytest.LogCaptureFixture) -> None:
    item = scheduled(Stub(lambda requests: [_replace_token(2, 99)]))
    with caplog.at_level(logging.WARNING):
        ask(item)
    assert len(caplog.records) == 1
    for part in ("Stub", str(item.seq.request.request_id), "99"):
        assert part in caplog.text

"""What proposers answer is inspected row by row: a fault costs the rows from there on, and never a step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft import EMPTY, Draft, Law, ScratchRows, depths_of
from outrider.engine.drafting.asking import StepDraft, propose_all
from outrider.engine.drafting.choosing import member_drafts
from outrider.engine.drafting.proposers import TreeBuilders
from outrider.engine.scheduler import ScheduledSequence, Turn
from outrider.engine.sequence import Drafter, SharedProposer
from outrider.engine.sequence import Sequence as EngineSequence
from outrider.params import TokenOrigin
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.host import sound_prefix
from outrider.propose.tree import CHAIN, StaticTree
from outrider.propose.trees.adaptive import FixedPace
from outrider.verify.noise import KeyedNoise
from outrider.verify.verifier import Verdict, rule_for
from tests.unit.builders import Planted, make_sequence, note_draws

VOCAB = 4

NOBODY: Any = None  # trees of a fixed shape ask no one
BUILDERS = TreeBuilders(NOBODY, lambda: FixedPace({1: 1.0}))
BUSHY = StaticTree.of_widths((2, 1))


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
        Draft((1, 1), (-1, 0), (Law.OPAQUE, Law.DETERMINISTIC), scratch=ScratchRows((2, 3, 0), (-1, 1, 3))),
        Draft(scratch=ScratchRows((2, 2), (-1, 0))),
        Draft((1, 2), (-1, 0), (Law.SAMPLED, Law.OPAQUE), torch.tensor([[0.0, 1.0, 0.0, 0.0], [float("nan")] * 4])),
        sampled(probs=with_row(1, [0.2501, 0.2501, 0.2501, 0.2501])),  # rounding over a large vocabulary
    ],
)
def test_a_sound_draft_passes_as_it_is(draft: Draft) -> None:
    found, problem = sound_prefix(draft, 5, 9, VOCAB)
    assert (found.token_ids, found.parents, found.laws) == (draft.token_ids, draft.parents, draft.laws)
    assert found.scratch == draft.scratch
    assert found.draft_probs is draft.draft_probs
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
        assert problem is None
        assert (set(found.paths), found.laws) == (set(draft.paths), draft.laws)
        assert len(set(found.paths)) == len(found), "siblings of equal token are one node"
    else:  # a token cannot be drawn twice from one law without replacement
        assert len(found) < len(draft)
        assert problem is not None
        assert sound_prefix(found, 6, 9, VOCAB) == (found, None)


def test_siblings_of_one_member_have_one_law() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    draft = Draft((0, 1), (-1, -1), (Law.SAMPLED,) * 2, probs)
    found, problem = sound_prefix(draft, 6, 9, 3)
    assert (found.token_ids, found.laws) == ((0,), (Law.SAMPLED,)), "what was drawn before is believed"
    assert problem == "node 1: its probabilities are not those its elder sibling 0 was drawn from"
    two = dataclasses.replace(draft, members=(0, 1))
    assert sound_prefix(two, 6, 9, 3) == (two, None), "those of two members may differ"


def test_a_token_that_two_members_drew_is_one_node_with_two_draws() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
    twice = Draft((0, 0, 2), (-1, -1, 1), (Law.SAMPLED,) * 3, probs, members=(0, 1, 1))
    found, problem = sound_prefix(twice, 6, 9, 3)
    assert problem is None
    assert (found.token_ids, found.parents) == ((0, 2), (-1, 0))
    assert (found.nodes, found.members) == ((0, 0, 1), (0, 1, 1))
    assert sound_prefix(dataclasses.replace(twice, members=(0, 0, 0)), 6, 9, 3)[0].token_ids == (0,)


@pytest.mark.parametrize("nodes", [(0, 1, 3), (0, 1, 1), (0, -1, 2), (0, 1), ("0", 1, 2)])
def test_draws_that_leave_out_a_node_are_nonsense(nodes: tuple[Any, ...]) -> None:
    found, problem = sound_prefix(dataclasses.replace(sampled(), nodes=nodes), 6, 9, VOCAB)
    assert found is EMPTY
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


# -- one faulty scratch row --------------------------------------------------------------------------------------------

BESIDE = Draft((0, 1), (-1, 0), (Law.OPAQUE,) * 2, scratch=ScratchRows((2, 1, 0), (1, 2, -1)))

SCRATCH_FAULTS: dict[str, Callable[[int], ScratchRows]] = {
    "token past the vocabulary": lambda j: _scratch(j, token=VOCAB),
    "negative token": lambda j: _scratch(j, token=-1),
    "float token": lambda j: _scratch(j, token=1.0),
    "bool token": lambda j: _scratch(j, token=True),
    "no token": lambda j: _scratch(j, token=None),
    "tensor token": lambda j: _scratch(j, token=torch.tensor(1)),
    "numpy token": lambda j: _scratch(j, token=np.int64(1)),
    "parent is itself": lambda j: _scratch(j, parent=len(BESIDE) + j),
    "parent comes later": lambda j: _scratch(j, parent=len(BESIDE) + 3),
    "parent below the root": lambda j: _scratch(j, parent=-2),
    "float parent": lambda j: _scratch(j, parent=0.0),
    "text parent": lambda j: _scratch(j, parent="0"),
    "bool parent": lambda j: _scratch(j, parent=False),
    "no parent": lambda j: _scratch(j, parent=None),
}


def _scratch(row: int, **values: Any) -> ScratchRows:
    tokens: list[Any] = list(BESIDE.scratch.token_ids)
    parents: list[Any] = list(BESIDE.scratch.parents)
    tokens[row], parents[row] = values.get("token", tokens[row]), values.get("parent", parents[row])
    return ScratchRows(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("fault", SCRATCH_FAULTS)
def test_a_faulty_scratch_row_keeps_the_nodes_and_the_rows_before_it(fault: str, row: int) -> None:
    draft = dataclasses.replace(BESIDE, scratch=SCRATCH_FAULTS[fault](row))
    found, problem = sound_prefix(draft, 9, 9, VOCAB)
    assert problem is not None
    assert problem.startswith(f"scratch row {row}: ")
    assert (found.token_ids, found.parents, found.laws) == (BESIDE.token_ids, BESIDE.parents, BESIDE.laws)
    assert found.scratch == BESIDE.with_scratch(row).scratch
    assert found.num_rows == len(found.row_token_ids) == len(depths_of(found.row_parents))


@pytest.mark.parametrize("budget", [2, 3, 4])
def test_scratch_rows_share_the_budget_with_the_nodes(budget: int) -> None:
    found, problem = sound_prefix(BESIDE, budget, 9, VOCAB)
    assert found == BESIDE.with_scratch(budget - 2)
    assert problem == f"scratch row {budget - 2}: more than {budget} rows"
    assert sound_prefix(BESIDE, 5, 9, VOCAB) == (BESIDE, None)


def test_scratch_rows_deeper_than_a_text_may_go_are_cut() -> None:
    assert depths_of(BESIDE.row_parents) == [1, 2, 3, 4, 1]
    for depth, kept in ((2, 0), (3, 1)):
        found, problem = sound_prefix(BESIDE, 9, depth, VOCAB)
        assert found == BESIDE.with_scratch(kept)
        assert problem == f"scratch row {kept}: deeper than {depth}"
    assert sound_prefix(BESIDE, 9, 4, VOCAB) == (BESIDE, None)


def test_a_faulty_node_costs_the_scratch_rows_too() -> None:
    draft = dataclasses.replace(BESIDE, token_ids=(0, 99))
    found, problem = sound_prefix(draft, 9, 9, VOCAB)
    assert found == BESIDE.first(1)
    assert problem is not None
    assert problem.startswith("node 1: ")


def test_scratch_rows_of_two_lengths_are_none() -> None:
    found, problem = sound_prefix(dataclasses.replace(BESIDE, scratch=ScratchRows((1, 2), (0,))), 9, 9, VOCAB)
    assert found == BESIDE.with_scratch(0)
    assert problem


def test_misdrawn_siblings_cost_the_scratch_rows_too() -> None:
    probs = torch.full((2, VOCAB), 1 / VOCAB)
    draft = Draft((0, 0), (-1, -1), (Law.SAMPLED,) * 2, probs, scratch=ScratchRows((1,), (1,)))
    found, problem = sound_prefix(draft, 5, 9, VOCAB)
    assert problem == "node 1: token 0 was drawn before among its siblings"
    assert (found.token_ids, len(found.scratch)) == ((0,), 0)
    assert sound_prefix(found, 5, 9, VOCAB) == (found, None), "what is left is sound"


# -- lists in the place of tuples --------------------------------------------------------------------------------------

LISTS: dict[str, Any] = {
    "nodes": Draft([0, 1], [-1, 0], [Law.OPAQUE] * 2),  # type: ignore[arg-type]
    "nodes before scratch rows": Draft([0, 1], [-1, 0], [Law.OPAQUE] * 2, scratch=ScratchRows((2,), (1,))),  # type: ignore[arg-type]
    "scratch rows": Draft((0,), (-1,), (Law.OPAQUE,), scratch=ScratchRows([2], [0])),  # type: ignore[arg-type]
    "a faulty node": Draft([0, 99], [-1, 0], [Law.OPAQUE] * 2),  # type: ignore[arg-type]
    "a faulty scratch row": Draft((0,), (-1,), (Law.OPAQUE,), scratch=ScratchRows([2, 99], [0, 0])),  # type: ignore[arg-type]
    "a tensor of scratch rows": Draft((0,), (-1,), (Law.OPAQUE,), scratch=ScratchRows(torch.tensor([2]), (0,))),  # type: ignore[arg-type]
    "another scratch": Draft((0,), (-1,), (Law.OPAQUE,), scratch=None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", LISTS)
def test_whatever_comes_through_is_safe_to_look_at(what: str) -> None:
    """The step puts rows of all sequences together, so that what raises there costs every sequence."""
    item = scheduled(Stub(lambda requests: [LISTS[what]]))
    (draft,) = ask(item)
    assert len(draft.row_token_ids) == len(draft.row_parents) == draft.num_rows
    assert {type(token) for token in draft.row_token_ids} <= {int}
    assert draft.joined(GOOD, draft.deepest)[0].num_rows == draft.num_rows + len(GOOD)
    assert draft.is_chain, "lists make no branches"
    rule_for(draft, "auto")


UNCLAIMED: dict[str, Any] = {
    "of another vocabulary": torch.full((2, VOCAB + 1), 0.2),
    "of too few rows": torch.full((1, VOCAB), 0.25),
    "in a list": [[0.25] * VOCAB] * 2,
    "in an array": np.full((2, VOCAB), 0.25),
    "in words": "half",
}


@pytest.mark.parametrize("law", [Law.DETERMINISTIC, Law.COUPLED, Law.OPAQUE])
@pytest.mark.parametrize("what", UNCLAIMED)
def test_probabilities_that_no_token_was_drawn_from_harm_nobody(what: str, law: Law) -> None:
    """They may be of any kind, since no rule reads them; nor do they stand in the way of those that count."""
    odd = Draft.chain([0, 1], law, UNCLAIMED[what])
    one, other = (Stub(lambda requests, answer=answer: [answer]) for answer in (odd, sampled((1, 2))))
    for first, second in ((one, other), (other, one)):
        (draft,) = ask(scheduled(first, second))
        assert len(draft) == 4
        drawn = [node for node, kind in enumerate(draft.laws) if kind is Law.SAMPLED]
        assert draft.draft_probs is not None
        assert draft.draft_probs.shape == (4, VOCAB)
        assert draft.draft_probs[drawn].tolist() == [[0.25] * VOCAB] * 2


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
    """Answers what it was told to, as if it had drawn what it says that it has drawn."""

    def __init__(self, answer: Callable[[Sequence[ProposeRequest]], Any]) -> None:
        self.answer = answer
        self.calls: list[list[int]] = []

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Any:
        self.calls.append([request.budget for request in requests])
        answers = self.answer(requests)
        for request, answer in zip(requests, answers if isinstance(answers, list) else (), strict=False):
            with suppress(Exception):  # some are malformed
                note_draws(request, answer)
        return answers


def turn(budget: int = 5, max_depth: int | None = None, **how: Any) -> Turn:
    depth = budget if max_depth is None else max_depth
    return Turn(how.get("method", Planted()), how.get("tree", ()), how.get("greedy", False), budget, depth)


def in_line(*turns: Turn) -> tuple[Turn, ...]:
    """Each turn behind all before it."""
    return tuple(dataclasses.replace(each, behind=tuple(range(place))) for place, each in enumerate(turns))


@dataclass
class Asked:
    """A scheduled sequence and who drafts for it in each turn."""

    item: ScheduledSequence
    drafters: list[Drafter | None]


def scheduled(*proposers: Proposer | None, budget: int = 5) -> Asked:
    """One turn for each proposer; None stands for one that cannot be had."""
    seq = make_sequence(3)
    for index, proposer in enumerate(proposers):
        if proposer is not None:
            host = SharedProposer(proposer, VOCAB, Planted(tag=index))
            seq.drafters.append(Drafter(index, host.method, host, seq.request.request_id, seq.stats))
    known = iter(seq.drafters)
    who = [None if proposer is None else next(known) for proposer in proposers]
    return Asked(ScheduledSequence(seq, 1, in_line(*(turn(budget) for _ in proposers))), who)


def steps(*asked: Asked) -> list[StepDraft]:
    return propose_all([a.item for a in asked], [a.drafters for a in asked], BUILDERS, KeyedNoise())


def ask(*asked: Asked) -> list[Draft]:
    return [step.draft for step in steps(*asked)]


def faults(asked: Asked) -> tuple[int, bool]:
    """Faults of a sequence, and whether its only drafter is no longer believed."""
    seq: EngineSequence = asked.item.seq
    (drafter,) = seq.drafters
    assert drafter.num_faults == seq.stats.num_proposer_faults
    return seq.stats.num_proposer_faults, not drafter.believed


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
    items = [scheduled(one, budget=1), scheduled(other, budget=2), scheduled(), scheduled(one, budget=3)]
    assert ask(*items) == [Draft.chain([1], Law.OPAQUE), GOOD, EMPTY, Draft.chain([3], Law.OPAQUE)]
    assert (one.calls, other.calls) == ([[1, 3]], [[2]])


def test_a_sequence_without_a_turn_is_not_asked_for() -> None:
    proposer = Stub(lambda requests: [GOOD] * len(requests))
    asked = scheduled(proposer)
    asked.item.turns = ()
    assert ask(asked) == [EMPTY]
    assert proposer.calls == []


def test_a_proposer_that_cannot_be_had_drafts_nothing_and_is_no_fault() -> None:
    proposer = Stub(lambda requests: [GOOD] * len(requests))
    asked = scheduled(None)
    assert ask(asked, scheduled(proposer)) == [EMPTY, GOOD]
    assert asked.item.seq.stats.num_proposer_faults == 0


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
    for part in ("planted", str(item.item.seq.request.request_id), "99"):
        assert part in caplog.text


# -- several turns -----------------------------------------------------------------------------------------------------


def test_each_turn_goes_on_behind_the_deepest_token_of_the_one_before() -> None:
    tree = Draft((1, 2, 3), (-1, 0, -1), (Law.OPAQUE,) * 3, scratch=ScratchRows((0,), (-1,)))
    one = Stub(lambda requests: [tree] * len(requests))
    seen: list[ProposeRequest] = []

    def second(requests: Sequence[ProposeRequest]) -> list[Draft]:
        seen.extend(requests)
        return [dataclasses.replace(GOOD, scratch=ScratchRows((3,), (1,)))] * len(requests)

    asked = scheduled(one, Stub(second), Stub(lambda requests: [GOOD]))
    (step,) = steps(asked)
    assert step.draft.token_ids == (1, 2, 3, 1, 2, 1, 2)
    assert step.draft.parents == (-1, 0, -1, 1, 3, 4, 5)
    assert step.draft.scratch == ScratchRows((0, 3), (-1, 4))
    assert [part.drafter for part in step.parts] == list(asked.drafters)
    assert [(part.root, part.nodes) for part in step.parts] == [(-1, (0, 1, 2)), (1, (3, 4)), (4, (5, 6))]
    assert [(part.draws, part.scratch) for part in step.parts] == [((0, 3), (0, 1)), ((3, 5), (1, 2)), ((5, 7), (2, 2))]
    (request,) = seen
    assert (request.path, request.length, request.last_token_id, request.drafter) == ((1, 2), 5, 2, 1)


def test_a_request_says_what_its_turn_says() -> None:
    seen: list[ProposeRequest] = []

    def answer(requests: Sequence[ProposeRequest]) -> list[Draft]:
        seen.extend(requests)
        return [EMPTY] * len(requests)

    asked = scheduled(Stub(answer), Stub(answer))
    asked.item.rule = "coupled"
    asked.item.turns = in_line(turn(4, 3, tree=(2, 1), greedy=True), turn(2, 1))
    steps(asked)
    first, second = seen
    assert (first.budget, first.max_depth, first.builder, first.greedy, first.drafter) == (4, 3, BUSHY, True, 0)
    assert first.coupled
    assert second.coupled
    assert (second.budget, second.max_depth, second.builder, second.greedy, second.drafter) == (2, 1, CHAIN, False, 1)
    assert first.path == second.path == ()
    assert (first.sequence, first.length, first.last_token_id) == (asked.item.seq.view, 3, 102)


def test_a_turn_that_drafts_nothing_has_no_part_and_moves_nobody() -> None:
    asked = scheduled(None, Stub(lambda requests: [EMPTY]), Stub(lambda requests: [GOOD]))
    (step,) = steps(asked)
    assert step.draft == GOOD
    (part,) = step.parts
    assert (part.drafter, part.root, part.nodes) == (asked.drafters[2], -1, (0, 1))


def test_a_fault_costs_its_own_turn_and_demotes_its_own_drafter() -> None:
    broken = Stub(lambda requests: [_replace_token(1, 99)])
    asked = scheduled(Stub(lambda requests: [sampled((1, 2))]), broken, Stub(lambda requests: [GOOD]))
    (first,), (second,) = steps(asked), steps(asked)
    assert first.draft.laws == (Law.SAMPLED,) * 3 + (Law.DETERMINISTIC,) * 2
    assert second.draft.laws == (Law.SAMPLED,) * 2 + (Law.OPAQUE,) + (Law.DETERMINISTIC,) * 2
    assert second.draft.token_ids == (1, 2, 0, 1, 2)
    assert [d.believed for d in asked.item.seq.drafters] == [True, False, True]
    assert [d.num_faults for d in asked.item.seq.drafters] == [0, 2, 0]
    assert asked.item.seq.stats.num_proposer_faults == 2


def test_a_proposer_is_asked_once_a_turn_for_all_its_sequences() -> None:
    one, other = (Stub(lambda requests: [GOOD] * len(requests)) for _ in range(2))
    items = [scheduled(one, other, budget=3), scheduled(other, one, budget=4), scheduled(one, one, budget=5)]
    assert ask(*items) == [GOOD.joined(GOOD, GOOD.deepest)[0]] * 3
    assert one.calls == [[3, 5], [4, 5]]
    assert other.calls == [[4], [3]]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_budgets_hold_for_each_turn_whatever_is_answered(data: st.DataObject) -> None:
    """Drafts of any size, deeper and longer than asked for: what comes out fits the plan."""
    budgets = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    answers = []
    for _ in budgets:
        size, extra = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 3))
        parents = tuple(data.draw(st.integers(-1, row - 1)) for row in range(size + extra))
        tokens = tuple(data.draw(st.integers(0, VOCAB)) for _ in range(size + extra))
        scratch = ScratchRows(tokens[size:], parents[size:])
        answers.append(Draft(tokens[:size], parents[:size], (Law.OPAQUE,) * size, scratch=scratch))
    asked = scheduled(*(Stub(lambda requests, answer=answer: [answer]) for answer in answers))
    asked.item.turns = in_line(*(turn(budget) for budget in budgets))
    (step,) = steps(asked)
    assert step.draft.num_rows <= sum(budgets)
    assert max(depths_of(step.draft.row_parents), default=0) <= sum(budgets)
    assert all(0 <= token < VOCAB for token in step.draft.row_token_ids)
    place = row = 0
    for part in step.parts:
        assert (part.draws[0], part.scratch[0]) == (place, row), "parts follow one another"
        place, row = part.draws[1], part.scratch[1]
        assert len(set(part.nodes)) + (part.scratch[1] - part.scratch[0]) <= budgets[part.drafter.index]
    assert (place, row) == (step.draft.num_draws, len(step.draft.scratch))


# -- compositions ------------------------------------------------------------------------------------------------------


def pooled(budget: int, max_depth: int = 5, behind: tuple[int, ...] = ()) -> Turn:
    return dataclasses.replace(turn(budget, max_depth), behind=behind, pooled=True)


def test_members_begin_where_their_turns_say_and_share_nodes() -> None:
    one, other = (Stub(lambda requests, answer=answer: [answer]) for answer in (GOOD, sampled((1, 3))))
    third = Stub(lambda requests: [Draft.chain([0], Law.OPAQUE)])
    asked = scheduled(one, other, third)
    asked.item.turns = (pooled(2), pooled(2), pooled(1, behind=(0, 1)))
    (step,) = steps(asked)
    assert (step.draft.token_ids, step.draft.parents) == ((1, 2, 3, 0), (-1, 0, 0, 1)), "behind the first of the deepest"
    assert step.draft.nodes == (0, 1, 0, 2, 3)
    assert [part.root for part in step.parts] == [-1, -1, 1]
    assert [part.outcome([0, 2]) for part in step.parts] == [(2, 1), (2, 2), (0, 0)]
    assert [sorted(part.accepted([0, 2])) for part in step.parts] == [[0], [0, 1], []]


def test_a_member_is_not_blamed_for_what_it_drafted_behind_the_end_of_a_text() -> None:
    asked = scheduled(*(Stub(lambda requests, answer=answer: [answer]) for answer in (GOOD, sampled((1, 3)))))
    asked.item.turns = (pooled(2), pooled(2))
    (step,) = steps(asked)
    verdict = Verdict((0,), 0, TokenOrigin.RECOVERED)
    going_on = member_drafts(("lookup", "model"), asked.item, step, verdict, 1)
    assert [draft.scores for draft in going_on] == [[1.0, 0.0]] * 2, "the target wrote another token than both"
    asked.item.seq.finish("stop")
    ended = member_drafts(("lookup", "model"), asked.item, step, verdict, 1)
    assert [draft.scores for draft in ended] == [[1.0]] * 2, "the first token ended the text, and nothing else was compared"


def test_rows_that_a_lookup_leaves_over_are_the_others() -> None:
    seen: list[int] = []

    def answer(requests: Sequence[ProposeRequest]) -> list[Draft]:
        seen.append(requests[0].budget)
        return [sampled((1,))]

    asked = scheduled(Stub(lambda requests: [Draft.chain([2], Law.OPAQUE)]), None, Stub(answer), Stub(answer), Stub(answer))
    asked.item.turns = (pooled(3), pooled(1), pooled(1), pooled(1), pooled(0))
    (step,) = steps(asked)
    assert seen == [4, 1], "what drawn tokens leave over is nobody's, and without a row nobody is asked"
    assert len(step.draft) == 2
    assert step.draft.num_draws == 3


def test_a_bad_member_costs_its_own_draws_alone() -> None:
    bad = Stub(lambda requests: [_replace_token(1, 99)])
    asked = scheduled(Stub(lambda requests: [sampled((1, 2))]), bad)
    asked.item.turns = (pooled(3), pooled(3))
    (step,) = steps(asked)
    assert step.draft.laws == (Law.SAMPLED,) * 3, "two of the good member, and the first of the bad one"
    assert [d.believed for d in asked.item.seq.drafters] == [True, False]
    (step,) = steps(asked)
    assert step.draft.laws == (Law.SAMPLED, Law.SAMPLED, Law.OPAQUE)


# -- behind forced tokens ----------------------------------------------------------------------------------------------


def forced_before(asked: Asked, *tokens: int) -> Asked:
    asked.item.forced = tokens
    return asked


def test_a_draft_goes_on_behind_forced_tokens() -> None:
    seen: list[ProposeRequest] = []
    proposer = Stub(lambda requests: [seen.append(r) or Draft.chain([3], Law.DETERMINISTIC) for r in requests])  # type: ignore[func-returns-value]
    (step,) = steps(forced_before(scheduled(proposer), 1, 2))
    assert [(request.path, request.last_token_id) for request in seen] == [((1, 2), 2)]
    assert step.draft.token_ids == (1, 2, 3)
    assert step.draft.is_chain
    assert step.draft.laws == (Law.OPAQUE, Law.OPAQUE, Law.DETERMINISTIC)
    assert step.draft.members == (0, 0, 1)
    assert [part.member for part in step.parts] == ["forced", "planted"]
    assert step.num_forced == 2
    assert step.parts[1].outcome([0, 1]) == (1, 0), "it was tried where all that is forced stands"
    assert step.parts[1].outcome([0]) == (0, 0)


def test_forced_tokens_are_drafted_where_nobody_else_drafts() -> None:
    (step,) = steps(forced_before(scheduled(None), 1, 2))
    assert (step.draft.token_ids, step.draft.laws) == ((1, 2), (Law.OPAQUE,) * 2)
    assert step.drafted == []


def test_two_turns_at_the_end_of_the_text_both_begin_behind_what_is_forced() -> None:
    asked = forced_before(scheduled(*(Stub(lambda r: [Draft.chain([3], Law.OPAQUE)]) for _ in range(2))), 1, 2)
    asked.item.turns = tuple(dataclasses.replace(each, behind=(), pooled=True) for each in asked.item.turns)
    (step,) = steps(asked)
    assert (step.draft.token_ids, step.draft.nodes) == ((1, 2, 3), (0, 1, 2, 2))

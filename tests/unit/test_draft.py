"""Drafts: shape, depths, cutting, rows beside them, and drafts that go on behind others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft import EMPTY, Draft, Law, ScratchRows, depths_of

TREE = Draft((5, 6, 7, 5, 8), (-1, -1, 0, 1, 2), (Law.DETERMINISTIC,) * 5)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Trees of up to 8 nodes with up to 4 scratch rows."""
    size, extra = draw(st.integers(0, 8)), draw(st.integers(0, 4))
    parents = tuple(draw(st.integers(-1, row - 1)) for row in range(size + extra))
    tokens = tuple(draw(st.integers(0, 2)) for _ in range(size + extra))
    laws = tuple(draw(st.sampled_from(list(Law))) for _ in range(size))
    scratch = ScratchRows(tokens[size:], parents[size:])
    return Draft(tokens[:size], parents[:size], laws, scratch=scratch)


def test_a_chain_hangs_each_token_on_the_one_before() -> None:
    probs = torch.eye(3)
    draft = Draft.chain([4, 5, 6], Law.SAMPLED, probs)
    assert draft == Draft((4, 5, 6), (-1, 0, 1), (Law.SAMPLED,) * 3, probs)
    assert (len(draft), draft.is_chain, draft.depths, draft.depth) == (3, True, [1, 2, 3], 3)


def test_tokens_of_a_chain_become_plain_integers() -> None:
    tokens = Draft.chain(torch.tensor([1, 2]), Law.OPAQUE).token_ids
    assert tokens == (1, 2)
    assert {type(token) for token in tokens} == {int}


def test_the_empty_draft() -> None:
    assert len(EMPTY) == EMPTY.depth == EMPTY.num_rows == 0
    assert EMPTY.depths == EMPTY.paths == []
    assert EMPTY.is_chain
    assert EMPTY.rows_are_chain
    assert EMPTY.deepest == -1
    assert EMPTY.child(-1, 0) is None
    assert Draft.chain([], Law.SAMPLED) == EMPTY
    assert EMPTY.opaque() == EMPTY


def test_depths_of_a_tree() -> None:
    assert TREE.depths == [1, 1, 2, 2, 3]
    assert TREE.depth == 3
    assert not TREE.is_chain


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees())
def test_a_node_is_one_deeper_than_its_parent(draft: Draft) -> None:
    for node, parent in enumerate(draft.parents):
        assert draft.depths[node] == (1 if parent < 0 else draft.depths[parent] + 1)
    assert draft.depth == max(draft.depths, default=0)
    assert draft.is_chain == (draft.depths == list(range(1, len(draft) + 1)))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(trees(), st.integers(0, 2))
def test_a_child_is_the_first_candidate_that_carries_the_token(draft: Draft, token: int) -> None:
    for node in range(-1, len(draft)):
        children = [i for i in range(len(draft)) if draft.parents[i] == node]
        fitting = [i for i in children if draft.token_ids[i] == token]
        assert draft.children(node) == children
        assert draft.child(node, token) == (fitting[0] if fitting else None)


def test_scratch_rows_are_no_nodes() -> None:
    draft = Draft((5,), (-1,), (Law.OPAQUE,), scratch=ScratchRows((5, 6), (-1, 0)))
    assert (len(draft), draft.num_rows) == (1, 3)
    assert draft.child(-1, 5) == 0
    assert draft.child(0, 6) is None
    assert (draft.is_chain, draft.rows_are_chain, draft.depth, draft.deepest) == (True, False, 1, 0)
    alone = Draft(scratch=ScratchRows((5,), (-1,)))
    assert (len(alone), alone.num_rows, alone.deepest) == (0, 1, -1)
    assert alone.child(-1, 5) is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees())
def test_rows_are_the_nodes_and_then_the_scratch_rows(draft: Draft) -> None:
    assert draft.num_rows == len(draft) + len(draft.scratch)
    assert draft.row_token_ids == (*draft.token_ids, *draft.scratch.token_ids)
    assert draft.row_parents == (*draft.parents, *draft.scratch.parents)
    assert depths_of(draft.row_parents)[: len(draft)] == draft.depths
    assert draft.rows_are_chain == (draft.is_chain and len(draft.scratch) == 0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees())
def test_a_path_leads_from_the_root_to_its_node(draft: Draft) -> None:
    for node, path in enumerate(draft.paths):
        parent = draft.parents[node]
        assert path == (*(draft.paths[parent] if parent >= 0 else ()), draft.token_ids[node])
        assert len(path) == draft.depths[node]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees())
def test_the_deepest_node_is_the_first_of_those_that_are_farthest(draft: Draft) -> None:
    farthest = [node for node, depth in enumerate(draft.depths) if depth == draft.depth]
    assert draft.deepest == (farthest[0] if farthest else -1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees(), st.integers(0, 8))
def test_the_first_nodes_are_a_whole_draft(draft: Draft, count: int) -> None:
    draft = dataclasses.replace(draft, draft_probs=torch.rand(len(draft), 3))
    cut = draft.first(count)
    size = min(count, len(draft))
    assert len(cut) == len(cut.parents) == len(cut.laws) == size
    assert (cut.token_ids, cut.parents, cut.laws) == (draft.token_ids[:size], draft.parents[:size], draft.laws[:size])
    assert cut.draft_probs is not None
    assert torch.equal(cut.draft_probs, draft.draft_probs[:size])
    assert cut.depths == draft.depths[:size]
    assert len(cut.scratch) == 0, "scratch rows may follow nodes that are cut"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees(), st.integers(0, 4))
def test_the_first_scratch_rows_leave_the_nodes_as_they_are(draft: Draft, count: int) -> None:
    draft = dataclasses.replace(draft, draft_probs=torch.rand(len(draft), 3))
    cut = draft.with_scratch(count)
    assert cut.draft_probs is draft.draft_probs
    assert (cut.token_ids, cut.parents, cut.laws) == (draft.token_ids, draft.parents, draft.laws)
    assert cut.scratch == ScratchRows(draft.scratch.token_ids[:count], draft.scratch.parents[:count])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees())
def test_an_opaque_draft_claims_nothing_and_guesses_the_same(draft: Draft) -> None:
    opaque = dataclasses.replace(draft, draft_probs=torch.rand(len(draft), 3)).opaque()
    assert (opaque.token_ids, opaque.parents) == (draft.token_ids, draft.parents)
    assert opaque.draft_probs is None
    assert opaque.scratch == draft.scratch
    assert opaque.laws == (Law.OPAQUE,) * len(draft)


# -- going on behind another draft -------------------------------------------------------------------------------------


def extended(head: Draft, tail: Draft) -> Draft:
    """`head` going on with `tail` behind its deepest node."""
    return head.joined(tail, head.deepest)[0]


def test_a_draft_goes_on_behind_the_deepest_node() -> None:
    head = Draft((5, 6, 7), (-1, -1, 1), (Law.SAMPLED,) * 3, torch.full((3, 4), 0.25), ScratchRows((1, 2), (2, 3)))
    tail = Draft((8, 9), (-1, 0), (Law.OPAQUE,) * 2, scratch=ScratchRows((3, 4, 5), (-1, 1, 2)))
    joined = extended(head, tail)
    assert joined.token_ids == (5, 6, 7, 8, 9)
    assert joined.parents == (-1, -1, 1, 2, 3), "the tail's root is node 2, the deepest of the head"
    assert joined.laws == (Law.SAMPLED,) * 3 + (Law.OPAQUE,) * 2
    assert joined.scratch.token_ids == (1, 2, 3, 4, 5)
    assert joined.scratch.parents == (2, 5, 2, 4, 7), "row 5 is the first scratch row now, and row 7 the third"
    assert joined.draft_probs is not None
    assert joined.draft_probs.tolist() == [[0.25] * 4] * 3 + [[0.0] * 4] * 2


def test_nothing_to_go_on_with_or_from_changes_nothing() -> None:
    assert extended(TREE, EMPTY) is TREE
    assert extended(EMPTY, TREE) is TREE
    scratch = Draft(scratch=ScratchRows((7,), (-1,)))
    assert extended(TREE, scratch).scratch == ScratchRows((7,), (4,)), "scratch rows follow the deepest node too"
    before = extended(scratch, Draft.chain([1, 2], Law.OPAQUE))
    assert (before.parents, before.scratch.parents) == ((-1, 0), (-1,))


def distinct(draft: Draft) -> Draft:
    """The draft with one node for siblings of equal token."""
    return EMPTY.joined(draft, -1)[0]


def _labels(draft: Draft) -> list[tuple[int, ...]]:
    """Tokens from the root to each row."""
    labels: list[tuple[int, ...]] = []
    for token, parent in zip(draft.row_token_ids, draft.row_parents, strict=True):
        labels.append((*(labels[parent] if parent >= 0 else ()), token))
    return labels


@settings(max_examples=300, deadline=None, derandomize=True)
@given(trees().map(distinct), trees().map(distinct), st.booleans(), st.booleans())
def test_every_row_of_both_parts_keeps_its_path(head: Draft, tail: Draft, head_probs: bool, tail_probs: bool) -> None:
    if head_probs:
        head = dataclasses.replace(head, draft_probs=torch.rand(head.num_draws, 3))
    if tail_probs:
        tail = dataclasses.replace(tail, draft_probs=torch.rand(tail.num_draws, 3, dtype=torch.float64))
    joined = extended(head, tail)
    size, both = len(head), len(head) + len(tail)
    root = _labels(head)[head.deepest] if size else ()
    own, other, found = _labels(head), [(*root, *label) for label in _labels(tail)], _labels(joined)
    assert found[:size] == own[:size]
    assert found[size:both] == other[: len(tail)]
    assert found[both:] == own[size:] + other[len(tail) :]
    assert joined.laws == head.laws + tail.laws
    assert all(-1 <= parent < row for row, parent in enumerate(joined.row_parents)), "parents come first"
    assert depths_of(joined.row_parents) == [len(label) for label in found]
    if len(tail):
        assert joined.depth == head.depth + tail.depth
    if not head.num_rows or not tail.num_rows:
        return  # one of them as it is
    if not (head_probs or tail_probs):
        assert joined.draft_probs is None
        return
    zeros = [torch.zeros(draft.num_draws, 3) for draft in (head, tail)]
    parts = [
        zero if draft.draft_probs is None else draft.draft_probs for draft, zero in zip((head, tail), zeros, strict=True)
    ]
    assert joined.draft_probs is not None
    assert joined.draft_probs.shape == (joined.num_draws, 3)
    assert torch.allclose(joined.draft_probs, torch.cat([part.to(joined.draft_probs) for part in parts]))


@pytest.mark.parametrize("head", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tail", [torch.bfloat16, torch.float32, torch.float64])
def test_going_on_rounds_nobodys_probabilities(head: torch.dtype, tail: torch.dtype) -> None:
    third = torch.tensor([[1.0, 2.0]], dtype=torch.float64) / 3
    one, other = (Draft.chain([1], Law.SAMPLED, third.to(dtype)) for dtype in (head, tail))
    joined = extended(one, other)
    assert joined.draft_probs is not None
    for row, part in zip(joined.draft_probs, (one, other), strict=True):
        assert part.draft_probs is not None
        assert torch.equal(row.double(), part.draft_probs[0].double()), "what its token was drawn from, to the bit"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees().map(distinct), trees().map(distinct), trees().map(distinct))
def test_going_on_twice_is_going_on_with_both(one: Draft, two: Draft, three: Draft) -> None:
    joined = extended(extended(one, two), three)
    assert joined.row_token_ids[: len(joined)] == one.token_ids + two.token_ids + three.token_ids
    assert joined.scratch.token_ids == one.scratch.token_ids + two.scratch.token_ids + three.scratch.token_ids
    assert _labels(joined) == _labels(extended(one, extended(two, three)))


def test_drafts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TREE.token_ids = ()  # type: ignore[misc]


# -- beside another draft ----------------------------------------------------------------------------------------------


def test_nodes_that_two_members_propose_are_shared() -> None:
    one = Draft((1, 2), (-1, 0), (Law.SAMPLED,) * 2, torch.full((2, 4), 0.25), scratch=ScratchRows((3,), (1,)))
    other = Draft((1, 3, 2), (-1, 0, -1), (Law.OPAQUE,) * 3, scratch=ScratchRows((0, 0), (2, 3)))
    both, places = one.joined(other, -1)
    assert (both.token_ids, both.parents) == ((1, 2, 3, 2), (-1, 0, 0, -1))
    assert places == (0, 2, 3)
    assert both.nodes == (0, 1, 0, 2, 3), "node 0 has two draws"
    assert both.members == (0, 0, 1, 1, 1)
    assert both.laws == (Law.SAMPLED,) * 2 + (Law.OPAQUE,) * 3
    assert both.draft_probs is not None
    assert both.draft_probs[:, 0].tolist() == [0.25, 0.25, 0.0, 0.0, 0.0]
    assert both.scratch == ScratchRows((3, 0, 0), (1, 3, 5))
    first = both.first(3)
    assert (first.nodes, first.members) == ((0, 1, 0, 2), (0, 0, 1, 1))
    third, places = both.joined(Draft((2,), (-1,), (Law.COUPLED,)), 0)
    assert (len(third), places, third.nodes[-1], third.members[-1]) == (4, (1,), 1, 2), (
        "below a node that is not the deepest"
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(trees(), trees(), st.data())
def test_a_joined_draft_holds_the_paths_of_both_once(one: Draft, other: Draft, data: st.DataObject) -> None:
    one = distinct(one)
    node = data.draw(st.integers(-1, len(one) - 1))
    both, places = one.joined(other, node)
    root = _labels(one)[node] if node >= 0 else ()
    labels = _labels(both)[: len(both)]
    assert len(set(labels)) == len(labels)
    assert set(labels) == {*_labels(one)[: len(one)], *((*root, *label) for label in _labels(other)[: len(other)])}
    assert [labels[place] for place in places] == [(*root, *label) for label in _labels(other)[: len(other)] if places]
    assert both.num_draws == one.num_draws + other.num_draws
    drawn = sorted((labels[n], m >= one.num_members) for n, m in zip(both.nodes, both.members, strict=True))
    mine = [(_labels(one)[n], False) for n in one.nodes] if other.num_rows else []
    theirs = [((*root, *_labels(other)[n]), True) for n in other.nodes]
    if other.num_rows:
        assert drawn == sorted([*mine, *theirs])

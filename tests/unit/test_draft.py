"""Drafts: shape, depths, and cutting."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.propose.draft import EMPTY, Draft, Law

TREE = Draft((5, 6, 7, 5, 8), (-1, -1, 0, 1, 2), (Law.DETERMINISTIC,) * 5)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(0, 8))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    tokens = tuple(draw(st.integers(0, 2)) for _ in range(size))
    laws = tuple(draw(st.sampled_from(list(Law))) for _ in range(size))
    return Draft(tokens, parents, laws)


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
    assert len(EMPTY) == EMPTY.depth == 0
    assert EMPTY.depths == []
    assert EMPTY.is_chain
    assert EMPTY.candidate_laws == set()
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
        fitting = [
            i
            for i in range(len(draft))
            if draft.parents[i] == node and draft.token_ids[i] == token and draft.laws[i] is not Law.SCRATCH
        ]
        assert draft.child(node, token) == (fitting[0] if fitting else None)


def test_scratch_rows_are_no_candidates() -> None:
    draft = Draft((5, 5), (-1, -1), (Law.SCRATCH, Law.OPAQUE))
    assert draft.child(-1, 5) == 1
    assert Draft((5,), (-1,), (Law.SCRATCH,)).child(-1, 5) is None


def test_one_law_for_all_or_none() -> None:
    assert TREE.candidate_laws == {Law.DETERMINISTIC}
    assert Draft((1, 2, 3), (-1, 0, 0), (Law.SAMPLED, Law.OPAQUE, Law.SCRATCH)).candidate_laws == {Law.SAMPLED, Law.OPAQUE}


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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees())
def test_an_opaque_draft_claims_nothing_and_guesses_the_same(draft: Draft) -> None:
    opaque = dataclasses.replace(draft, draft_probs=torch.rand(len(draft), 3)).opaque()
    assert (opaque.token_ids, opaque.parents) == (draft.token_ids, draft.parents)
    assert opaque.draft_probs is None
    assert [law is Law.SCRATCH for law in opaque.laws] == [law is Law.SCRATCH for law in draft.laws]
    assert set(opaque.laws) <= {Law.SCRATCH, Law.OPAQUE}


def test_drafts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TREE.token_ids = ()  # type: ignore[misc]

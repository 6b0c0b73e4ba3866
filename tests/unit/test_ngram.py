"""Prompt lookup: the continuation of the latest earlier occurrence of the longest suffix."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft import EMPTY, Draft, Law
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.propose.ngram import NgramProposer
from outrider.verify.noise import KeyedNoise
from tests.unit.builders import make_sequence

NOISE = DraftNoise(KeyedNoise())


def lookup(tokens: list[int], budget: int = 5, *, longest: int = 3, shortest: int = 1) -> list[int]:
    proposer = NgramProposer(longest, shortest)
    view = make_sequence(tokens).view
    proposer.begin(view)
    (draft,) = proposer.propose([ProposeRequest(view, budget)], NOISE)
    return list(draft.token_ids)


def brute_force(tokens: list[int], budget: int, longest: int, shortest: int) -> list[int]:
    """By definition, trying every length and every place."""
    for length in range(longest, shortest - 1, -1):
        if length >= len(tokens):
            continue
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + budget]
    return []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 9, 2, 7, 1, 2], [9, 2, 7, 1, 2]),  # the longer suffix wins over the later place
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest of two places
        ([1, 2, 3], []),  # nothing occurs twice
        ([5, 5, 5], [5]),  # an occurrence may overlap the suffix
        ([5], []),
        ([5, 5], [5]),
        ([1, 2, 3, 2], [3, 2]),
    ],
)
def test_worked_examples(tokens: list[int], expected: list[int]) -> None:
    assert lookup(tokens) == expected == brute_force(tokens, 5, 3, 1)


def test_suffixes_shorter_than_the_shortest_are_not_looked_up() -> None:
    assert lookup([1, 2, 3, 2], shortest=2) == []
    assert lookup([1, 2, 3, 1, 2], shortest=2) == [3, 1, 2]


def test_suffixes_longer_than_the_longest_do_not_count() -> None:
    tokens = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    assert lookup(tokens, 1, longest=3) == [7]
    assert lookup(tokens, 1, longest=2) == [8]


@pytest.mark.parametrize("budget", [1, 2, 3, 9])
def test_the_budget_cuts_the_draft(budget: int) -> None:
    assert lookup([1, 2, 3, 4, 1, 2], budget) == [3, 4, 1, 2][:budget]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 4).flatmap(
        lambda shortest: st.tuples(st.just(shortest), st.integers(shortest, 5))
    ),
)  # fmt: skip
def test_lookup_equals_brute_force(tokens: list[int], budget: int, lengths: tuple[int, int]) -> None:
    shortest, longest = lengths
    assert lookup(tokens, budget, longest=longest, shortest=shortest) == brute_force(tokens, budget, longest, shortest)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_growing_text_is_looked_up_as_if_it_were_new(data: st.DataObject) -> None:
    token = st.integers(0, 2)
    seq = make_sequence(data.draw(st.lists(token, min_size=1, max_size=6)), max_tokens=100)
    proposer = NgramProposer(3, 1)
    proposer.begin(seq.view)
    for _ in range(6):
        (draft,) = proposer.propose([ProposeRequest(seq.view, 4)], NOISE)
        assert list(draft.token_ids) == brute_force(seq.token_ids, 4, 3, 1)
        seq.token_ids += data.draw(st.lists(token, min_size=1, max_size=5))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.lists(st.integers(0, 2), max_size=4).map(tuple),
    st.integers(1, 3),
)
def test_behind_what_another_proposer_drafted_it_looks_up_the_suffix_with_that(
    tokens: list[int], path: tuple[int, ...], shortest: int
) -> None:
    """The path is no part of what may be copied: it is a guess."""
    proposer, view = NgramProposer(3, shortest), make_sequence(tokens).view
    proposer.begin(view)
    (draft,) = proposer.propose([ProposeRequest(view, 4, path=path)], NOISE)
    whole, expected = [*tokens, *path], list[int]()
    for length in range(3, shortest - 1, -1):
        # With a path, the end of the text itself is an earlier occurrence, unless nothing comes behind it there.
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == whole[-length:]]
        if length <= len(whole) and ends:
            expected = tokens[ends[-1] : ends[-1] + 4]
            break
    assert list(draft.token_ids) == expected


def test_drafts_are_deterministic_chains() -> None:
    proposer = NgramProposer(3, 1)
    view = make_sequence([1, 2, 1]).view
    proposer.begin(view)
    assert proposer.propose([ProposeRequest(view, 5)], NOISE) == [Draft.chain([2, 1], Law.DETERMINISTIC)]


def test_sequences_do_not_learn_from_each_other() -> None:
    proposer = NgramProposer(3, 1)
    one, other = make_sequence([1, 2, 1]).view, make_sequence([7, 8, 1]).view
    for view in (one, other):
        proposer.begin(view)
    assert proposer.propose([ProposeRequest(one, 5), ProposeRequest(other, 5)], NOISE)[1] == EMPTY


def test_a_finished_sequence_is_forgotten() -> None:
    proposer = NgramProposer(3, 1)
    view = make_sequence([1, 2, 1]).view
    proposer.begin(view)
    proposer.finish(view)
    assert proposer._indices == {}
    proposer.finish(view)  # once more is no error

"""Drafts from a text that the caller predicted: along it, behind a divergence, and never past it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.draft import EMPTY, Draft, Law
from outrider.propose.base import DraftNoise, ProposeRequest, ProposerSequence
from outrider.propose.ngram import PredictionProposer
from outrider.verify.noise import KeyedNoise
from tests.unit.builders import make_sequence

NOISE = DraftNoise(KeyedNoise())
PROMPT = [9, 9]
PREDICTION = (1, 2, 3, 4, 5, 6, 7, 8)


def begun(proposer: PredictionProposer, prediction: tuple[int, ...] = PREDICTION) -> tuple[ProposerSequence, list[int]]:
    seq = make_sequence(list(PROMPT))
    seq.view.prediction = prediction
    proposer.begin(seq.view)
    return seq.view, seq.token_ids


def draft(
    output: list[int], prediction: tuple[int, ...] = PREDICTION, *, budget: int = 3, path: tuple[int, ...] = ()
) -> Draft:
    proposer = PredictionProposer(2)
    view, tokens = begun(proposer, prediction)
    tokens += output
    (found,) = proposer.propose([ProposeRequest(view, budget, path=path)], NOISE)
    return found


def test_it_drafts_what_comes_next() -> None:
    found = draft([])
    assert found.token_ids == (1, 2, 3)
    assert set(found.laws) == {Law.OPAQUE}
    assert draft([1, 2]).token_ids == (3, 4, 5)
    assert draft([1, 2, 3, 4, 5, 6], budget=9).token_ids == (7, 8)
    assert draft(list(PREDICTION)) is EMPTY


def test_without_a_prediction_it_drafts_nothing() -> None:
    assert draft([1, 2], ()) is EMPTY


def test_after_a_divergence_it_waits_for_as_many_tokens_as_must_agree() -> None:
    assert draft([1, 2, 70]) is EMPTY
    assert draft([1, 2, 70, 4]) is EMPTY
    assert draft([1, 2, 70, 4, 5]).token_ids == (6, 7, 8)


def test_what_was_left_out_and_put_in_is_skipped() -> None:
    assert draft([1, 5, 6]).token_ids == (7, 8)
    assert draft([1, 2, 70, 71, 72, 3, 4]).token_ids == (5, 6, 7)


def test_it_goes_on_at_the_next_such_place_and_not_at_an_earlier_one() -> None:
    twice = (1, 2, 3, 40, 1, 2, 5, 60, 1, 2, 7)
    assert draft([1, 2, 3, 40, 70, 1, 2], twice, budget=1).token_ids == (5,)
    assert draft([1, 2, 3, 40, 1, 2, 5, 70, 60, 1, 2], twice, budget=1).token_ids == (7,)
    assert draft([*twice, 3, 40], twice, budget=1).token_ids == (1,), "where there is none behind it, before it"


def test_it_goes_on_behind_what_another_proposer_drafted_and_forgets_that() -> None:
    proposer = PredictionProposer(2)
    view, _ = begun(proposer)
    asked = [ProposeRequest(view, 3, path=path) for path in ((1, 2), (), (1, 70))]
    assert [found.token_ids for found in proposer.propose(asked, NOISE)] == [(3, 4, 5), (1, 2, 3), ()]


def test_budget_and_depth_are_kept() -> None:
    proposer = PredictionProposer(2)
    view, _ = begun(proposer)
    (found,) = proposer.propose([ProposeRequest(view, 5, 2)], NOISE)
    assert found.token_ids == (1, 2)


def test_a_sequence_that_has_ended_leaves_nothing() -> None:
    proposer = PredictionProposer(2)
    view, _ = begun(proposer)
    proposer.finish(view)
    proposer.finish(view)
    assert not proposer._readers


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 3))
def test_one_token_at_a_time_it_says_what_it_says_at_once(output: list[int], predicted: list[int], shortest: int) -> None:
    """The drafts do not depend on how many tokens a step committed."""
    at_once, by_one = PredictionProposer(shortest), PredictionProposer(shortest)
    view, tokens = begun(by_one, tuple(predicted))
    for token in output:
        by_one.propose([ProposeRequest(view, 4)], NOISE)
        tokens.append(token)
    other, all_tokens = begun(at_once, tuple(predicted))
    all_tokens += output
    assert by_one.propose([ProposeRequest(view, 4)], NOISE) == at_once.propose([ProposeRequest(other, 4)], NOISE)

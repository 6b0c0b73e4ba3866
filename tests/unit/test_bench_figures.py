"""The arithmetic of the benchmark, compared with cases by hand and with a simulation."""

from __future__ import annotations

import random

import pytest

from outrider.lab.measure.figures import (
    Spread,
    conditional_acceptance,
    expected_tokens,
    percentile,
    repeated_8grams,
    row_cost_ratio,
)
from outrider.results import RequestStats


@pytest.mark.parametrize(("acceptance", "length"), [(0.0, 4), (0.3, 1), (0.6, 3), (0.9, 7), (1.0, 5)])
def test_expected_tokens_is_the_sum_of_the_chances(acceptance: float, length: int) -> None:
    assert expected_tokens(acceptance, length) == pytest.approx(sum(acceptance**i for i in range(length + 1)))


def test_expected_tokens_agrees_with_drafts_that_are_drawn() -> None:
    rng, counts, written = random.Random(3), RequestStats(), 0
    for _ in range(4000):
        stood = next((i for i in range(3) if rng.random() >= 0.7), 3)
        counts.observe_draft(3, 3, stood, rejected=stood < 3)
        written += stood + 1
    measured = sum(counts.accepted_per_position) / sum(counts.tried_per_position)
    assert measured == pytest.approx(0.7, abs=0.02)
    assert expected_tokens(measured, 3) == pytest.approx(written / 4000, rel=0.02)


def test_conditional_acceptance_counts_only_positions_whose_fate_was_decided() -> None:
    counts = RequestStats()
    counts.observe_draft(3, 3, 2, rejected=True)  # the third was refused
    counts.observe_draft(1, 1, 1, rejected=False)  # a draft of one
    counts.observe_draft(2, 2, 0, rejected=True)
    assert (counts.accepted_per_position, counts.tried_per_position) == ([2, 1, 0], [3, 1, 1])
    assert conditional_acceptance([2, 1, 0, 0], [3, 1, 1, 0]) == [pytest.approx(2 / 3), 1.0, 0.0, None]


@pytest.mark.parametrize(
    ("tokens", "share"),
    [(range(40), 0.0), ([1] * 16, 8 / 9), (range(7), 0.0), ([*range(8), *range(8)], 1 / 9), ([*range(10)] * 2, 3 / 13)],
)
def test_repeated_8grams(tokens: list[int], share: float) -> None:
    assert repeated_8grams(tuple(tokens)) == pytest.approx(share)


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 0.0)) == (3.0, 5.0, 1.0)
    assert percentile([], 0.5) is None


def test_spread_holds_the_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)
    assert Spread.of([]) is None


def test_row_costs_are_read_between_measured_counts_and_never_beyond() -> None:
    seconds = {1: 1.0, 2: 1.5, 4: 2.5, 8: 6.0}
    assert row_cost_ratio(seconds, 4) == 2.5
    assert row_cost_ratio(seconds, 3) == 2.0
    assert row_cost_ratio(seconds, 8, base_rows=2) == 4.0
    assert row_cost_ratio(seconds, 8.5) is None
    assert row_cost_ratio({}, 1) is None

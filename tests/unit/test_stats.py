"""Counts and what they add up to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine import stats as module
from outrider.engine.stats import PHASES, EngineStats
from outrider.results import RequestStats


def observed(*drafts: tuple[int, int, int]) -> RequestStats:
    stats = RequestStats()
    for draft in drafts:
        stats.observe_draft(*draft, rejected=draft[2] < draft[1])
    return stats


def test_nothing_drafted_is_all_zero() -> None:
    counts = RequestStats()
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (0, 0, 0)
    assert counts.acceptance_histogram == counts.drafted_per_position == []
    assert (counts.acceptance_rate, counts.mean_acceptance_length) == (0.0, 1.0)


def test_counts_are_written_as_json() -> None:
    counts = observed((3, 3, 3), (3, 3, 1), (2, 2, 0))
    written = json.loads(json.dumps(counts.as_mapping()))
    assert (written["num_drafts"], written["acceptance_histogram"]) == (3, [1, 1, 0, 1])
    assert (written["acceptance_rate"], written["mean_acceptance_length"]) == (4 / 8, 1 + 4 / 3)
    del written["acceptance_rate"], written["mean_acceptance_length"]
    assert RequestStats(**written) == counts


def test_a_worked_example() -> None:
    counts = observed((3, 3, 3), (3, 3, 1), (2, 2, 0))
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 8, 4)
    assert counts.drafted_per_position == [3, 3, 2]
    assert counts.accepted_per_position == [2, 1, 1]
    assert counts.tried_per_position == [3, 2, 1]
    assert counts.acceptance_histogram == [1, 1, 0, 1]
    assert counts.acceptance_rate == 0.5
    assert counts.mean_acceptance_length == pytest.approx(1 + 4 / 3)


def test_a_tree_counts_nodes_as_drafted_and_depth_as_positions() -> None:
    counts = observed((7, 3, 2))
    assert counts.num_draft_tokens == 7
    assert (counts.drafted_per_position, counts.accepted_per_position) == ([1, 1, 1], [1, 1, 0])


rounds = st.lists(
    st.integers(1, 6).flatmap(lambda depth: st.tuples(st.integers(depth, 9), st.just(depth), st.integers(0, depth))),
    max_size=12,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rounds)
def test_the_counts_agree_with_each_other(drafts: list[tuple[int, int, int]]) -> None:
    counts = observed(*drafts)
    assert counts.num_drafts == len(drafts) == sum(counts.acceptance_histogram)
    assert counts.num_accepted_tokens == sum(counts.accepted_per_position) == sum(a for _, _, a in drafts)
    assert counts.num_draft_tokens == sum(n for n, _, _ in drafts)
    assert len(counts.drafted_per_position) == len(counts.accepted_per_position)
    for i, (drafted, accepted) in enumerate(zip(counts.drafted_per_position, counts.accepted_per_position, strict=True)):
        assert drafted == sum(depth > i for _, depth, _ in drafts)
        assert accepted == sum(a > i for _, _, a in drafts)
    for i, tried in enumerate(counts.tried_per_position):
        assert tried == sum(a > i or (a == i and a < depth) for _, depth, a in drafts)
    assert all(n == sum(a == i for _, _, a in drafts) for i, n in enumerate(counts.acceptance_histogram))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rounds, rounds)
def test_adding_is_observing_both(one: list[tuple[int, int, int]], other: list[tuple[int, int, int]]) -> None:
    total = observed(*one)
    total.add(observed(*other))
    assert total == observed(*one, *other)


def test_adding_sums_every_plain_count() -> None:
    names = ("num_target_passes", "num_proposer_faults", "num_cached_tokens", "num_preemptions")
    one, other = RequestStats(), RequestStats()
    for value, name in enumerate(names, 1):
        setattr(one, name, value)
        setattr(other, name, 10 * value)
    one.add(other)
    assert [getattr(one, name) for name in names] == [11, 22, 33, 44]
    assert [getattr(other, name) for name in names] == [10, 20, 30, 40]


def test_adding_sums_the_counts_of_each_stage() -> None:
    one, other = RequestStats(), RequestStats()
    one.observe_stage("staged.suffix", 4, 3)
    one.observe_stage("staged.suffix", 0, 0)
    other.observe_stage("staged.suffix", 2, 1)
    other.observe_stage("staged.staged.ngram", 5, 0)
    one.add(other)
    assert one.passes_by_stage == {"staged.suffix": 3, "staged.staged.ngram": 1}
    assert one.drafted_by_stage == {"staged.suffix": 6, "staged.staged.ngram": 5}
    assert one.accepted_by_stage == {"staged.suffix": 4, "staged.staged.ngram": 0}


def test_a_text_that_ended_inside_a_draft_decided_no_further_position() -> None:
    stats = RequestStats()
    stats.observe_draft(3, 3, 1, rejected=False)
    assert (stats.drafted_per_position, stats.tried_per_position, stats.accepted_per_position) == (
        [1, 1, 1],
        [1],
        [1, 0, 0],
    )


def test_copies_do_not_move_with_the_running_counts() -> None:
    stats = observed((2, 2, 1))
    counts = stats.copy()
    stats.observe_draft(2, 2, 2, rejected=False)
    assert counts == observed((2, 2, 1))


def test_time_is_booked_to_its_phase_even_where_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 14.0, 20.0, 25.0])
    monkeypatch.setattr(module, "perf_counter", lambda: next(clock))
    stats = EngineStats()
    with stats.timed("forward"):
        pass
    with stats.timed("verify"):
        pass
    with pytest.raises(ValueError, match="oops"), stats.timed("forward"):
        raise ValueError("oops")
    assert stats.seconds == {**dict.fromkeys(PHASES, 0.0), "forward": 7.0, "verify": 4.0}


def test_shares_sum_to_one_and_host_is_schedule_and_commit() -> None:
    stats = EngineStats(seconds=dict(zip(PHASES, (1.0, 2.0, 10.0, 4.0, 3.0), strict=True)))
    assert stats.shares() == pytest.approx({"propose": 0.1, "forward": 0.5, "verify": 0.2, "host": 0.2})


def test_shares_before_any_step_are_zero() -> None:
    assert set(EngineStats().shares().values()) == {0.0}


def test_reset_forgets_everything() -> None:
    stats = EngineStats(num_steps=3, num_rows=9, num_committed_tokens=5)
    stats.seconds["forward"] = 2.0
    stats.finished.observe_draft(2, 2, 1, rejected=True)
    stats.reset()
    assert stats == EngineStats()

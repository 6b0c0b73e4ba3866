"""Whether places of a batch stay empty, and what tokens of its texts are worth."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outrider.govern.shadows import Places, lateness, worths


def end(places: Places, step: int, batch: set[int], request: int, *, at_length: bool = True) -> None:
    places.see(step, batch)
    places.leave(step, request, at_length=at_length)


def test_places_that_are_taken_at_once_do_not_stay_empty() -> None:
    places = Places()
    for step in range(60):
        end(places, step, {step, step + 1, step + 2}, step)
    assert places.stay_empty < 0.1


def test_places_of_batches_that_begin_and_end_together_stay_empty() -> None:
    places = Places()
    for step in range(0, 600, 3):
        end(places, step, {step, step + 1, step + 2}, step)
        end(places, step + 1, {step + 1, step + 2}, step + 1)
        end(places, step + 2, {step + 2}, step + 2)
    assert places.stay_empty == 1.0


def test_an_end_that_nobody_could_foresee_tells_of_no_empty_place() -> None:
    places = Places()
    for step in range(60):
        end(places, step, {1000, 1001, step}, step, at_length=False)
    assert places.stay_empty < 0.1


@pytest.mark.parametrize(("waits", "empty"), [(5, False), (40, True)])
def test_who_comes_late_takes_no_place(waits: int, empty: bool) -> None:
    places = Places()
    for request in range(60):
        end(places, waits * request, {1000, request}, request)
        places.see(waits * request + 1, {1000})
    assert (places.stay_empty > 0.9) is empty


def test_one_text_alone_tells_nothing() -> None:
    places = Places()
    for step in range(60):
        end(places, step, {step}, step, at_length=False)
    assert places.stay_empty == 1.0


def seconds(texts: int) -> float:
    return 1.0 + 0.1 * texts * texts


def cheap_rows(texts: int) -> float:
    return 1.0 + 0.05 * texts


def test_texts_that_are_as_far_are_worth_the_same() -> None:
    assert worths([40] * 5, seconds, 1.5) == pytest.approx([1.0] * 5)


def test_a_sure_lead_is_worth_what_a_text_less_saves() -> None:
    """Counted out: a token less lets one step have a text less, at the end of this text."""
    to_write = [10, 100, 1000]
    saved = [seconds(3) - seconds(2), seconds(2) - seconds(1), seconds(1)]
    assert worths(to_write, seconds, 1.0) == pytest.approx([3.0 * each / sum(saved) for each in saved])


def test_the_faster_texts_draft_the_less_a_lead_counts() -> None:
    """A text that drafts no more ends before the others only if they, drafting, have still more to write."""
    slow, fast, faster = (worths([40, 60, 60], cheap_rows, speed)[0] for speed in (1.0, 2.0, 3.0))
    assert slow < 0.3 < fast < 0.8 < faster == pytest.approx(1.0)


def test_worths_change_without_jumps() -> None:
    ahead = [worths([100 - lead, 100, 100], cheap_rows, 1.0)[0] for lead in range(60)]
    assert all(later <= sooner + 1e-9 for sooner, later in pairwise(ahead))
    assert max(sooner - later for sooner, later in pairwise(ahead)) < 0.3


def test_chance_makes_the_last_of_many_texts_late() -> None:
    assert lateness([1.0], 1.5, 64) == 0.0
    assert lateness([1.0] * 8, 1.0, 64) == 0.0
    few, many = lateness([1.0] * 2, 1.5, 64), lateness([1.0] * 8, 1.5, 64)
    assert 0.03 < few < many < 0.1
    assert lateness([1.0] * 8, 1.5, 256) == pytest.approx(many / 2.0)
    assert lateness([6.0, *[0.0] * 7], 1.5, 64) == 0.0

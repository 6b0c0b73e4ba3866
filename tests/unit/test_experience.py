"""What earlier processes learnt of methods: checked by meaning, believed as little as a few drafts, and soon forgotten."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf, nan

import pytest

from outrider.govern import acceptance
from outrider.govern.acceptance import KEPT, POSITIONS, AcceptanceModel, Counts, Experience, Shares
from outrider.govern.decision import MethodCandidate
from tests.unit.governor_world import FLAT, STEEP, CountingGovernor, Log, Method, World, always, run


def learnt(chance: float, drafts: int = 400) -> Experience:
    """What drafts of five tokens show of which each stands with this chance."""
    model, rng = AcceptanceModel({"draft": 0.6}), random.Random(1)
    model.begin(0, None)
    for _ in range(drafts):
        fates = [float(rng.random() < chance) for _ in range(5)]
        tried = fates.index(0.0) + 1 if 0.0 in fates else 5
        model.observe(0, "draft", fates[:tried], 1.0 + sum(fates[:tried]), asked=5, offered=5)
    return model.learnt("draft")


def written(
    truth: float, earlier: Experience | None, passes: dict[int, float], *, texts: int = 1, steps: int = 60
) -> list[Log]:
    """What a governor does that begins with this experience, under three lucks."""
    found = []
    for seed in range(3):
        world = World({"draft": Method(0.06, always(truth))}, passes, seed=seed)
        governor = CountingGovernor([MethodCandidate("draft", 16, experience=earlier)], world.table())
        found.append(run(world, governor, steps=60))
    return found


def lost(logs: list[Log]) -> float:
    return sum(sum(log.true) - sum(log.plain) for log in logs)


def pace(logs: list[Log]) -> float:
    return sum(sum(log.plain) for log in logs) / sum(sum(log.true) for log in logs)


@pytest.mark.parametrize("passes", [FLAT, STEEP], ids=["rows cost little", "rows cost much"])
def test_drafts_that_never_paid_are_hardly_tried_again(passes: dict[int, float]) -> None:
    before, after = (lost(written(0.05, earlier, passes)) for earlier in (None, learnt(0.05)))
    assert before > 0.0
    assert after < 0.5 * before


@pytest.mark.parametrize("passes", [FLAT, STEEP], ids=["rows cost little", "rows cost much"])
@pytest.mark.parametrize(("earlier", "truth"), [(0.02, 0.85), (0.95, 0.05), (0.95, 0.3), (0.3, 0.85)])
def test_what_holds_no_more_is_forgotten_within_three_seconds(
    earlier: float, truth: float, passes: dict[int, float]
) -> None:
    assert pace(written(truth, learnt(earlier), passes)) >= 0.93 * pace(written(truth, None, passes))


def test_who_believes_others_more_than_what_he_sees_never_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Counts.chances
    monkeypatch.setattr(Counts, "chances", lambda self, prior, weight: stock(self, prior, 1e6 * weight))
    monkeypatch.setattr(acceptance, "KEPT", 1e6)
    with pytest.raises(AssertionError):
        test_what_holds_no_more_is_forgotten_within_three_seconds(0.02, 0.85, FLAT)


def test_it_is_believed_as_little_as_a_few_drafts() -> None:
    model = AcceptanceModel({"draft": 0.6}, {"draft": learnt(0.9)})
    found = model.learnt("draft")
    assert found.stands.tried[0] == found.exists.tried[0] == pytest.approx(KEPT)
    assert found.stands.stood[0] / found.stands.tried[0] == pytest.approx(0.9, abs=0.06)
    assert AcceptanceModel({"draft": 0.6}, {"draft": learnt(0.9, 3)}).learnt("draft").stands.tried[0] == pytest.approx(
        3.0, 0.1
    )


def test_what_is_kept_goes_on_from_what_was_known() -> None:
    model = AcceptanceModel({"draft": 0.6}, {"draft": learnt(0.9)})
    model.begin(0, None)
    for _ in range(200):
        model.observe(0, "draft", [0.0])
    found = model.learnt("draft").stands
    assert found.stood[0] / found.tried[0] < 0.1


GOOD = learnt(0.7).stands


@pytest.mark.parametrize(
    "damaged",
    [
        replace(GOOD, tried=GOOD.tried[:-1]),
        replace(GOOD, stood=(*GOOD.stood, 1.0)),
        replace(GOOD, tried=(inf, *GOOD.tried[1:])),
        replace(GOOD, stood=(nan, *GOOD.stood[1:])),
        replace(GOOD, stood=(-1.0, *GOOD.stood[1:])),
        replace(GOOD, stood=(2.0 * GOOD.tried[0], *GOOD.stood[1:])),
        replace(GOOD, gained=0.0),
        replace(GOOD, gained=1e300),
        replace(GOOD, gained=nan),
    ],
    ids=str,
)
def test_counts_that_cannot_be_are_refused(damaged: Shares) -> None:
    GOOD.check()
    with pytest.raises(ValueError, match=r"positions|cannot have"):
        damaged.check()


def test_counts_of_nothing_are_counts() -> None:
    empty = AcceptanceModel({"draft": 0.6}).learnt("draft")
    empty.stands.check()
    assert empty.stands.tried == (0.0,) * POSITIONS
    model = AcceptanceModel({"draft": 0.6}, {"draft": empty})
    model.begin(0, None)
    assert model.outlook(0, "draft").stands[0] == pytest.approx(0.6)

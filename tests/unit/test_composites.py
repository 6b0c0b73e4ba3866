"""What is expected of methods that draft together, beside what comes of scripted drafts; and who drafts in a plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from outrider.govern.acceptance import Outlook
from outrider.govern.choice import Chooser, Option, Text, UnreadTokens
from outrider.govern.costs import CostModel, CostTable
from outrider.govern.decision import Composite, Differences, MemberDraft, MethodCandidate, Running, Together, forecast
from outrider.govern.governor import Governor

LOOKUP = Outlook([0.9, 0.8, 0.7] + [0.7] * 9, [0.6, 0.6, 0.5, 0.3] + [0.0] * 8)
MODEL = Outlook([0.7, 0.6, 0.5] + [0.5] * 9, [1.0] * 12)
OUTLOOKS = {"lookup": LOOKUP, "model": MODEL}
MERGED, CHAINED = Together(("lookup", "model"), in_line=False), Together(("lookup", "model"), in_line=True)
NUM_DRAFTS = 40_000


def halves(rows: int) -> tuple[int, int]:
    return rows // 2, rows - rows // 2


def offered(outlook: Outlook, rows: int, rng: random.Random) -> int:
    luck = rng.random()
    return sum(luck < outlook.exists_at(place) for place in range(rows))


def stood(outlook: Outlook, offer: int, rng: random.Random) -> int:
    return next((place for place in range(offer) if rng.random() >= outlook.stands[place]), offer)


def simulated(in_line: bool, shares: Sequence[int]) -> float:
    """Tokens of a draft whose members do not depend on each other. What the lookup leaves is the model's."""
    rng, total = random.Random(3), 0
    for _ in range(NUM_DRAFTS):
        first = offered(LOOKUP, shares[0], rng)
        kept = stood(LOOKUP, first, rng)
        rest = stood(MODEL, shares[1] + round(shares[0] - 0.6 * min(shares[0], 2) - 0.5 * (shares[0] > 2)), rng)
        total += (kept + rest if kept == first else kept) if in_line else max(kept, rest)
    return total / NUM_DRAFTS


@pytest.mark.parametrize("together", [MERGED, CHAINED], ids=["merge", "then"])
@pytest.mark.parametrize("rows", [1, 2, 4, 6])
def test_it_is_expected_what_comes_where_members_do_not_depend_on_each_other(together: Together, rows: int) -> None:
    found = forecast(Composite(together, halves), OUTLOOKS, {"lookup"}, rows, share=1.0).outlook
    tokens = found.tokens(rows)
    assert tokens == pytest.approx(simulated(together.in_line, halves(rows)), rel=0.02)


def test_members_that_are_right_in_the_same_places_bring_what_the_better_one_brings() -> None:
    apart, alike = (forecast(Composite(MERGED, halves), OUTLOOKS, (), 2, share).outlook for share in (1.0, 0.0))
    assert alike.exists_at(0) * alike.reach(0) == pytest.approx(0.7)
    both = alike.tokens(2)
    assert both == pytest.approx(0.7, abs=1e-5), "the lookup's row stands where the model's does"
    assert apart.tokens(2) == pytest.approx(1 - 0.3 * (1 - 0.54))


def test_every_row_is_somebodys_and_brings_no_more_than_the_one_before() -> None:
    inner = Together((CHAINED, "model"), in_line=False)
    composite = Composite(inner, lambda rows: (rows // 3, rows // 3, rows - 2 * (rows // 3)))
    found = forecast(composite, OUTLOOKS, {"lookup"}, 16, 0.5)
    reaches = [found.outlook.exists_at(place) * found.outlook.reach(place) for place in range(16)]
    assert all(one >= other - 1e-9 for one, other in pairwise(reaches))
    assert [name for name, _ in found.levels[15]] == ["lookup", "model", "model"]
    assert all(rows > 0 for levels in found.levels for _, rows in levels)


def test_rows_that_a_lookup_leaves_are_those_of_the_next_one() -> None:
    silent = {"lookup": Outlook([0.9] * 12, [0.0] * 12), "model": MODEL}
    found = forecast(Composite(CHAINED, lambda rows: (rows, 0)), silent, {"lookup"}, 4, 0.5)
    assert found.levels[3] == (("lookup", 4), ("model", 4))
    tokens = sum(found.outlook.exists_at(place) * found.outlook.reach(place) for place in range(4))
    assert tokens == pytest.approx(0.7 + 0.42 + 0.21 + 0.105, abs=1e-3)


def test_it_is_learnt_how_far_members_differ() -> None:
    for truth in (0.0, 0.6, 1.0):
        rng, learnt = random.Random(5), Differences()
        for _ in range(3000):
            learnt.observe([0.5, 0.6], stood=rng.random() < 0.6 + truth * 0.2)
        assert learnt.share == pytest.approx(truth, abs=0.25)


# -- the governor ------------------------------------------------------------------------------------------------------


def governor() -> Governor:
    """Rows cost next to nothing. The merge may be chosen, and its model by itself may not."""
    table = CostTable({1: 1.0, 32: 1.2}, 0.0, {"model": {1: 0.01, 32: 0.01}})
    merge = MethodCandidate("merge", 8, composite=Composite(MERGED, halves))
    return Governor([MethodCandidate("lookup", 8, lookup=True), MethodCandidate("model", 8, alone=False), merge], table)


RUNNING = [Running(1, 10, 8, ("lookup", "model", "merge"))]


def test_what_is_learnt_of_members_decides_about_the_merge() -> None:
    """Nothing is ever learnt of the merge itself, and it is chosen for what its members show."""
    chosen = {}
    for of_lookup in (0.05, 0.95):
        judged, rng = governor(), random.Random(1)
        judged.begin(1)
        for _ in range(200):
            scores = [[float(rng.random() < chance)] for chance in (of_lookup, 0.6)]
            drafts = [MemberDraft(name, 1, 1, score) for name, score in zip(("lookup", "model"), scores, strict=True)]
            judged.observe_members(1, "merge", drafts, 1 if [1.0] in scores else 0)
            decision = judged.decide(RUNNING)[1]
        assert decision.method != "model", "it is no choice by itself"
        assert judged.acceptance.outlook(1, "lookup").stands[0] == pytest.approx(of_lookup, abs=0.1)
        assert judged.acceptance.outlook(1, "model").stands[0] == pytest.approx(0.6, abs=0.15)
        chosen[of_lookup] = decision
    assert chosen[0.05].method == "merge"
    assert chosen[0.05].num_draft_tokens > 0


@pytest.mark.parametrize(("more", "chosen"), [(0.02, "model"), (0.25, "a merge")])
def test_several_methods_must_clearly_beat_one(more: float, chosen: str) -> None:
    """A forecast that is better by a little is mostly one that was guessed too high."""
    costs = CostModel(CostTable({1: 1.0, 16: 1.0}, 0.0, {"model": {1: 0.01}}))
    alone = Option("model", Outlook([0.5], [1.0]), 1)
    merge = Option(
        "a merge", Outlook([0.5 + more], [1.0]), 1, members=(UnreadTokens("model", 0, 0),), levels=((("model", 1),),)
    )
    plan = Chooser(costs, [Text(0, {"a merge": merge, "model": alone})], 0, 16).best()
    assert plan.rows == {0: (chosen, 1)}


def test_members_of_the_merge_that_drafts_are_not_idle() -> None:
    judged = governor()
    judged.begin(1)
    judged.decide(RUNNING)
    judged._shadows._saved = dict.fromkeys(judged._shadows._saved, 10.0)
    lagging = [Running(1, 10, 8, ("lookup", "model", "merge"), {"model": 40})]
    used = judged._plan.rows[1][0]
    idle = {each.method for each in judged._shadows._idle(lagging, judged._plan.rows, judged._step, judged._here.costs)}
    assert idle == {"lookup", "model"} - set(judged.candidates[used].members)
    judged._plan.rows.clear()
    judged._step += 1
    assert {
        each.method for each in judged._shadows._idle(lagging, judged._plan.rows, judged._step, judged._here.costs)
    } == {"lookup", "model"}, "and the merge has nothing of its own"

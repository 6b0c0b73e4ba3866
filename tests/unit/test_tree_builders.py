"""Trees that adapt: what they cost, what they learn, and that no row depends on its own token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.draft import Confidence, Draft, Law
from outrider.propose.base import DraftNoise, Drawn, ProposeRequest
from outrider.propose.tree import CHAIN, AcceptanceRates, StaticTree, TreeBuilder, cut, tried
from outrider.propose.trees.adaptive import (
    AcceptanceProfile,
    BestFirstTree,
    FixedPace,
    JudgedChain,
    Pace,
    SequoiaTree,
    best_tree,
)
from outrider.propose.trees.growth import Growth, add_level
from outrider.verify.noise import KeyedNoise
from tests.unit.builders import make_sequence

FREE = FixedPace({1: 1.0, 64: 1.0})
DRAWN = (Law.SAMPLED, False)
LIKELIEST = (Law.DETERMINISTIC, True)
FLAT = Confidence(1 / 6, 1 / 6)


def request(builder: TreeBuilder, budget: int, max_depth: int = 99, **how: Any) -> ProposeRequest:
    asked = {name: how.pop(name) for name in ("greedy", "coupled") if name in how}
    return ProposeRequest(make_sequence([0, 1, 2], **how).view, budget, max_depth, builder=builder, **asked)


def grow(asked: Sequence[ProposeRequest], logits: Callable[[tuple[int, ...]], Tensor], **how: Any) -> list[Growth]:
    growths = [Growth.of(replace(each, drawn=Drawn()), each.budget, each.max_depth, **how) for each in asked]
    noise = DraftNoise(KeyedNoise())
    while active := [growth for growth in growths if growth.growing]:
        rows = [logits(growth.path(node)) for growth in active for node in growth.level]
        add_level(active, torch.stack(rows), noise)
    return growths


def sharp(path: tuple[int, ...]) -> Tensor:
    """One token is almost sure."""
    row = torch.zeros(6)
    row[len(path) % 6] = 12.0
    return row


def flat(path: tuple[int, ...]) -> Tensor:
    return torch.zeros(6)


# -- best first --------------------------------------------------------------------------------------------------------


def taught(rate_by_rank: Sequence[float], mode: Any) -> BestFirstTree:
    """A builder that has seen flat places where a sibling of each rank stands so often once it is tried, and paths of
    first siblings that went on as often."""
    builder, generator = BestFirstTree(FREE), torch.Generator().manual_seed(1)
    parents = (-1,) * len(rate_by_rank)
    draft = Draft((0,) * len(parents), parents, (mode[0],) * len(parents), confidences=(FLAT,) * len(parents))
    for _ in range(800):
        coins = torch.rand(len(parents), generator=generator).tolist()
        stands = next((rank for rank, rate in enumerate(rate_by_rank) if coins[rank] < rate), None)
        builder.learn(draft, set() if stands is None else {stands}, mode)
        path = Draft((0,) * 6, tuple(range(-1, 5)), (mode[0],) * 6, confidences=(FLAT,) * 6)
        length = next((i for i in range(6) if float(torch.rand(1, generator=generator)) >= rate_by_rank[0]), 6)
        builder.learn(path, set(range(length)), mode)
    return builder


def test_it_goes_deep_where_the_draft_is_sure_and_branches_where_it_is_in_doubt() -> None:
    (sure,) = grow([request(BestFirstTree(FREE), 8, temperature=0.0)], sharp)
    (doubtful,) = grow([request(taught((0.3, 0.3, 0.3), LIKELIEST), 8, temperature=0.0)], flat)
    assert sure.draft().is_chain
    assert sure.depth == 8
    assert len(doubtful.children(-1)) >= 3


def test_rows_are_spent_by_value() -> None:
    """With three in four rows standing, a chain is best; with siblings as good as the first, a bush is."""
    (deep,) = grow([request(taught((0.75, 0.05), DRAWN), 6)], flat)
    (wide,) = grow([request(taught((0.4, 0.5), DRAWN), 6)], flat)
    assert deep.depth >= 5
    assert len(wide.children(-1)) >= 2
    assert len(deep.nodes) == len(wide.nodes) == 6


def test_a_row_that_costs_more_than_it_brings_is_left_out() -> None:
    def size(slope: float) -> int:
        builder = BestFirstTree(FixedPace({1: 1.0, 64: 1.0 + 63 * slope}))
        return len(grow([request(builder, 32, temperature=1.0)], flat)[0].nodes)

    sizes = [size(slope) for slope in (0.0, 0.02, 0.2, 2.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 24
    assert sizes[-1] == 0
    assert 0 < sizes[2] < sizes[1] < 32


def test_more_drafts_in_one_pass_leave_each_fewer_rows_where_rows_cost() -> None:
    """The pass is longer with every row of the batch."""
    pace = FixedPace({1: 1.0, 16: 1.0, 64: 6.0})
    (alone,) = grow([request(BestFirstTree(pace), 16)], flat)
    together = grow([request(BestFirstTree(pace), 16, seed=seed) for seed in range(8)], flat)
    assert max(len(growth.nodes) for growth in together) < len(alone.nodes)


def test_levels_that_cost_more_than_they_bring_are_not_asked_for() -> None:
    slow = FixedPace({1: 1.0, 64: 1.0})
    slow._level_seconds = 5.0
    (growth,) = grow([request(BestFirstTree(slow), 12)], flat)
    assert growth.depth == 1
    assert len(growth.nodes) > 1, "siblings need no further level"


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"greedy": True}, {"coupled": True}])
def test_budget_depth_and_vocabulary_bound_every_tree(how: dict[str, Any]) -> None:
    two = torch.tensor([float("-inf"), 1.0, float("-inf"), 2.0, float("-inf"), float("-inf")])
    for budget in (0, 1, 2, 5, 40):
        for max_depth in (0, 1, 3):
            for logits in (flat, sharp, lambda path: two):
                (growth,) = grow([request(BestFirstTree(FREE), budget, max_depth, **how)], logits)
                draft = growth.draft()
                assert len(draft) <= budget
                assert draft.depth <= max_depth
                for node in range(-1, len(draft)):
                    siblings = [draft.token_ids[child] for child in draft.children(node)]
                    assert len(set(siblings)) == len(siblings)


def test_whether_a_row_exists_does_not_depend_on_its_own_token() -> None:
    """With one level only, every row is decided before any token is drawn: all seeds draw as many."""
    asked = [request(BestFirstTree(FREE), 6, 1, seed=seed) for seed in range(200)]
    sizes = {len(growth.nodes) for growth in (grow([each], lambda path: torch.arange(6.0))[0] for each in asked)}
    assert len(sizes) == 1


def test_a_draft_does_not_depend_on_its_company_where_time_is_free() -> None:
    builder = BestFirstTree(FixedPace({1: 1.0, 64: 1.0}))
    builder.pace._level_seconds = 0.0
    asked = [request(builder, budget, seed=seed) for seed, budget in enumerate((3, 7, 12))]
    alone = [grow([each], flat)[0].draft() for each in asked]
    together = [growth.draft() for growth in grow(asked, flat)]
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.parents) == (other.token_ids, other.parents)


def test_a_bad_stretch_does_not_end_drafting_for_good() -> None:
    """Rows that do not pay are left out, and only rows can show that they would pay again."""
    builder = BestFirstTree(FixedPace({1: 1.0, 64: 1.0 + 63 * 0.4}))

    def drafted(stands: bool, count: int) -> list[int]:
        sizes = []
        for seed in range(count):
            (growth,) = grow([request(builder, 8, temperature=0.0, seed=seed)], sharp)
            draft = growth.draft()
            sizes.append(len(draft))
            builder.learn(draft, set(range(len(draft))) if stands else (), LIKELIEST)
        return sizes

    assert drafted(True, 50)[-1] > 0
    bad = drafted(False, 400)
    assert bad[-1] == 0 or sum(bad[-32:]) <= 4
    assert sum(bad[-64:]) > 0, "it goes on trying"
    assert min(drafted(True, 400)[-20:]) > 0


def test_what_is_never_seen_does_not_fade_to_nothing() -> None:
    rates = AcceptanceRates()
    before = rates.usual(DRAWN, 0, 1), rates.before(DRAWN, 0, 1, 0.5)
    for _ in range(2000):
        rates.fade()
    assert (rates.usual(DRAWN, 0, 1), rates.before(DRAWN, 0, 1, 0.5)) == pytest.approx(before, abs=0.2)


def test_no_budget_is_no_tree() -> None:
    for builder in (BestFirstTree(FREE), JudgedChain(FREE), SequoiaTree(FREE), CHAIN):
        for budget, max_depth in ((0, 9), (9, 0), (0, 0)):
            assert not grow([request(builder, budget, max_depth)], flat)[0].nodes


# -- chains from heads that guess the chances of places ----------------------------------------------------------------


def priced(price: float) -> JudgedChain:
    """A builder where each row must bring so many tokens."""
    return JudgedChain(FixedPace({1: 1.0, 64: 1.0 + 63 * price}))


def judged(asked: Sequence[ProposeRequest], *chances: Callable[[tuple[int, ...]], float]) -> list[Growth]:
    """Chains whose head guesses these chances of the place behind a path."""
    growths = [Growth.of(replace(each, drawn=Drawn()), each.budget, each.max_depth) for each in asked]
    while active := [i for i, growth in enumerate(growths) if growth.growing]:
        for i in active:
            growths[i].chances |= {node: chances[i](growths[i].path(node)) for node in growths[i].level}
        going = [growths[i] for i in active]
        add_level(going, torch.stack([flat(()) for growth in going]), DraftNoise(KeyedNoise()))
    return growths


def test_a_chain_ends_where_the_chance_of_its_next_place_is_below_the_price_of_a_row() -> None:
    sizes = [len(judged([request(priced(price), 12)], lambda path: 0.7)[0].nodes) for price in (0.0, 0.1, 0.2, 0.6, 0.9)]
    assert sizes == [12, 6, 4, 1, 0]  # 0.7 ** 6 is 0.12, and 0.7 ** 4 is 0.24


def test_each_chain_of_a_batch_has_its_own_length() -> None:
    pace = priced(0.05)
    asked = [request(pace, 12, seed=seed) for seed in range(3)]
    growths = judged(asked, lambda path: 0.95, lambda path: 0.5, lambda path: 0.95 if len(path) < 2 else 0.01)
    assert [len(growth.nodes) for growth in growths] == [12, 4, 2]


def test_whether_a_place_is_drafted_does_not_depend_on_its_own_token() -> None:
    """A token decides what comes behind it: behind an even one nothing pays."""
    lengths = set()
    for seed in range(60):
        (growth,) = judged([request(priced(0.2), 3, seed=seed)], lambda path: 0.1 if path and path[-1] % 2 == 0 else 0.9)
        tokens = [node.token_id for node in growth.nodes]
        lengths.add(len(tokens))
        assert all(token % 2 for token in tokens[:-1])
        assert len(tokens) == 3 or tokens[-1] % 2 == 0
    assert lengths == {1, 2, 3}


def test_how_often_a_head_is_right_that_is_too_sure_is_learnt() -> None:
    builder = priced(0.3)

    def length(stood: int, count: int) -> int:
        for seed in range(count):
            (growth,) = judged([request(builder, 6, seed=seed)], lambda path: 0.9)
            builder.learn(growth.draft(), set(range(min(stood, len(growth.nodes)))), DRAWN)
        return len(growth.nodes)

    assert length(1, 60) <= 2, "of two tokens one stands"
    assert length(0, 150) <= 1
    assert length(6, 400) == 6, "it goes on trying"


# -- low confidence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", [CHAIN, StaticTree.of_widths((2, 2, 2)), BestFirstTree(FREE)])
def test_nothing_is_drafted_behind_a_token_of_low_confidence_and_the_token_stays(builder: TreeBuilder) -> None:
    growths = grow(
        [request(builder, 12, seed=seed) for seed in range(60)],
        lambda path: torch.tensor([2.0, 1.0, 0, 0, 0, 0]),
        min_confidence=0.3,
    )
    unlikely = 0
    for growth in growths:
        for node, made in enumerate(growth.nodes):
            probability = float(growth.laws[made.parent].probs[made.token_id])
            if probability < 0.3:
                unlikely += 1
                assert not growth.children(node)
    assert unlikely > 20


# -- what is learnt ----------------------------------------------------------------------------------------------------


def test_only_rows_whose_fate_was_decided_are_tried() -> None:
    draft = Draft((1, 2, 3, 4, 5), (-1, -1, 0, 0, 2), (Law.SAMPLED,) * 5, confidences=(Confidence(0.5, 0.25),) * 5)
    assert [(node, rank) for node, rank, _ in tried(draft, {0, 3})] == [(0, 0), (2, 0), (3, 1)]
    assert [(node, rank, taken) for node, rank, taken in tried(draft, ())] == [(0, 0, 0), (1, 1, 0.25)]


def test_rates_follow_what_was_seen() -> None:
    rates = AcceptanceRates()
    sure, doubt = Confidence(0.95, 0.95), Confidence(0.15, 0.15)
    for turn in range(600):
        for confidence, stands in ((sure, True), (doubt, turn % 5 == 0)):
            rates.learn(Draft((1,), (-1,), (Law.SAMPLED,), confidences=(confidence,)), {0} if stands else (), DRAWN)
    assert rates.before(DRAWN, 0, 1, 0.95) > 0.93
    assert 0.15 < rates.before(DRAWN, 0, 1, 0.15) < 0.3
    assert rates.behind(DRAWN, 0, 1, 0.15) < rates.behind(DRAWN, 0, 1, 0.95)
    assert rates.before(LIKELIEST, 0, 1, 0.95) == AcceptanceRates().before(LIKELIEST, 0, 1, 0.95), "kept apart"


# -- Sequoia -----------------------------------------------------------------------------------------------------------


def all_trees(size: int) -> Iterator[tuple[int, ...]]:
    """Parents of every tree of so many nodes."""

    def more(parents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(parents) == size:
            yield parents
            return
        for parent in range(max(parents[-1:] or (-1,)), len(parents)):
            yield from more((*parents, parent))

    return more(())


def expected(parents: Sequence[int], profile: AcceptanceProfile) -> float:
    values, depths, ranks = list[float](), list[int](), dict[int, int]()
    for parent in parents:
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        depths.append(0 if parent < 0 else depths[parent] + 1)
        values.append((1.0 if parent < 0 else values[parent]) * profile.chance(depths[-1], rank))
    return sum(values)


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_is_expected_to_bring_more(seed: int) -> None:
    """Against every tree; chances need not fall with the rank."""
    generator = torch.Generator().manual_seed(seed)
    counts = (torch.rand(4, 4, generator=generator) * 200).int().tolist()
    profile = AcceptanceProfile([[200] * 4 for _ in range(4)], counts)
    for size in range(1, 7):
        planned = best_tree(profile, size, 16)
        best = max(expected(parents, profile) for n in range(1, size + 1) for parents in all_trees(n))
        assert planned.expected == pytest.approx(best)
        assert expected(planned.parents, profile) == pytest.approx(best)
        assert cut(planned.parents, size, 16) == planned.parents, "level by level"


def test_the_shape_follows_the_profile() -> None:
    builder = SequoiaTree(FREE)
    first = builder.plan(DRAWN, 8)
    bush = Draft(tuple(range(5)), (-1,) * 5, (Law.SAMPLED,) * 5, confidences=(FLAT,) * 5)
    for turn in range(100):
        builder.learn(bush, {turn % 5}, DRAWN)
    later = builder.plan(DRAWN, 8)
    assert later.parents.count(-1) == 5 > first.parents.count(-1)


def test_a_profile_counts_rows_whose_parent_stands() -> None:
    profile = AcceptanceProfile()
    profile.learn(Draft((1, 2, 3, 4), (-1, -1, 0, 1), (Law.SAMPLED,) * 4), {1, 3})
    assert profile.offered == [[1, 1], [1]]
    assert profile.stood == [[0, 1], [1]]


# -- pace --------------------------------------------------------------------------------------------------------------


def test_a_staircase_is_spread_over_the_rows_that_it_makes_free() -> None:
    pace = Pace({1: 1.0, 4: 1.0, 5: 1.8, 8: 1.8, 16: 2.6})
    prices = [pace.row_price(rows) for rows in range(1, 40)]
    assert prices == sorted(prices)
    assert sum(prices[:15]) == pytest.approx(1.6 * pace.tokens_per_second)


def test_prices_follow_the_clock() -> None:
    pace = Pace({1: 0.02, 8: 0.03})
    before = pace.row_price(4)
    for _ in range(300):
        pace.observe_step(4, 0.02)
        pace.observe_levels(3, 0.006)
    assert pace.tokens_per_second == pytest.approx(200, rel=0.02)
    assert pace.level_seconds == pytest.approx(0.002, rel=0.02)
    assert pace.row_price(4) > before
    fixed = FixedPace({1: 0.02, 8: 0.03})
    fixed.observe_step(4, 0.02)
    fixed.observe_levels(3, 0.5)
    assert fixed.row_price(4) == before


@cache
def chain(size: int) -> tuple[int, ...]:
    return tuple(range(-1, size - 1))


def test_a_shape_is_cut_by_rows_and_by_depth() -> None:
    assert cut(chain(9), 4, 9) == chain(4)
    assert cut(chain(9), 9, 3) == chain(3)
    assert cut((-1, -1, 0, 0, 1), 4, 2) == (-1, -1, 0, 0)
    assert cut((-1, -1, 0, 0, 1), 9, 1) == (-1, -1)
    assert cut(chain(9), 0, 3) == cut(chain(9), 3, 0) == ()

"""Drafts that grow level by level: their shape, their laws, and that chance comes from keys alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

from outrider.draft import EMPTY, Draft, Law
from outrider.propose.base import DraftNoise, Drawn, ProposeRequest
from outrider.propose.host import sound_prefix
from outrider.propose.tree import CHAIN, StaticTree
from outrider.propose.trees.growth import Growth, add_level
from outrider.verify.noise import Key, KeyedNoise, Stream
from tests.unit.builders import make_sequence

VOCAB = 5
SURE = 1e-6  # chance that a chi-square test of the right law fails; seeds are fixed, so it fails always or never

LogitsOf = Callable[[tuple[int, ...]], Tensor]


def logits_of(path: tuple[int, ...]) -> Tensor:
    """Made-up logits [VOCAB] after a path, other ones after each."""
    seed = 1 + sum((token + 1) * (VOCAB + 1) ** place for place, token in enumerate(path))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def request(budget: int = 5, max_depth: int = 99, *, path: tuple[int, ...] = (), **how: Any) -> ProposeRequest:
    asked = {name: how.pop(name) for name in ("builder", "greedy", "coupled", "drafter") if name in how}
    if "tree" in how:
        tree = how.pop("tree")
        asked["builder"] = StaticTree.of_widths(tree) if tree else CHAIN
    return ProposeRequest(make_sequence([0, 1, 2], **how).view, budget, max_depth, path, **asked)


def grown(requests: Sequence[ProposeRequest], of: LogitsOf = logits_of, noise: DraftNoise | None = None) -> list[Draft]:
    """Drafts as a proposer grows them, all together."""
    noise = noise or DraftNoise(KeyedNoise())
    fresh = [replace(asked, drawn=Drawn()) for asked in requests]
    growths = [Growth.of(asked, asked.budget, asked.max_depth) for asked in fresh]
    while active := [growth for growth in growths if growth.growing]:
        rows = [of(growth.request.path + growth.path(index)) for growth in active for index in growth.level]
        add_level(active, torch.stack(rows), noise)
    return [growth.draft() for growth in growths]


def full_shape(widths: tuple[int, ...], budget: int) -> list[int]:
    """Parents of the first `budget` nodes of a shape, level by level."""
    parents, level = list[int](), [-1]
    for width in widths:
        children = [parent for parent in level for _ in range(width)]
        level = list(range(len(parents), len(parents) + len(children)))
        parents += children
    return parents[:budget]


# -- shape -------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 3), max_size=3).map(tuple), st.integers(0, 14), st.integers(0, 4), st.sampled_from([0.0, 1.0])
)
def test_a_draft_is_the_first_nodes_of_its_shape(
    tree: tuple[int, ...], budget: int, max_depth: int, temperature: float
) -> None:
    (draft,) = grown([request(budget, max_depth, tree=tree, temperature=temperature)])
    widths = (tree or (1,) * budget)[:max_depth]
    assert list(draft.parents) == full_shape(widths, budget)
    assert len(draft) <= budget
    assert draft.depth <= max_depth
    assert sound_prefix(draft, budget, max_depth, VOCAB) == (draft, None)


@pytest.mark.parametrize(("budget", "max_depth"), [(0, 5), (5, 0), (-1, 5), (5, -1), (0, 0)])
def test_no_room_is_no_draft(budget: int, max_depth: int) -> None:
    assert Growth.of(request(), budget, max_depth).draft() is EMPTY
    assert not Growth.of(request(), budget, max_depth).growing
    assert not Growth.of(request(tree=(2, 2)), budget, max_depth).growing


def test_a_growing_tree_knows_where_it_stands() -> None:
    growth = Growth.of(request(tree=(2, 2), temperature=0.0), 5, 9)
    assert (growth.branches, growth.draws, growth.growing, growth.depth, growth.level) == (True, False, True, 0, [-1])
    add_level([growth], logits_of(())[None], DraftNoise(KeyedNoise()))
    assert (growth.growing, growth.depth, growth.level) == (True, 1, [0, 1])
    assert growth.path(1) == (growth.node(1).token_id,)
    add_level([growth], torch.stack([logits_of(growth.path(i)) for i in (0, 1)]), DraftNoise(KeyedNoise()))
    assert (growth.growing, growth.depth, growth.level) == (False, 2, [])
    assert growth.path(4) == (growth.node(1).token_id, growth.node(4).token_id)
    assert not Growth.of(request(), 5, 9).branches
    assert not Growth.of(request(tree=(1, 1)), 5, 9).branches


# -- most likely first -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"greedy": True}])
def test_without_drawing_the_likeliest_come_first(how: dict[str, Any]) -> None:
    chain, tree = grown([request(4, **how), request(12, tree=(3, 2), **how)])
    path: tuple[int, ...] = ()
    for token in chain.token_ids:
        assert token == int(logits_of(path).argmax())
        path += (token,)
    for node in range(-1, len(tree)):
        children = [tree.token_ids[child] for child in tree.children(node)]
        before = tree.paths[node] if node >= 0 else ()
        assert children == logits_of(before).argsort(descending=True).tolist()[: len(children)]
    for draft in (chain, tree):
        assert set(draft.laws) == {Law.DETERMINISTIC}
        assert draft.draft_probs is None


def test_among_equals_the_lowest_token_comes_first() -> None:
    level = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0])
    chain, tree = grown([request(1, temperature=0.0), request(4, tree=(4,), temperature=0.0)], lambda path: level)
    assert chain.token_ids == (1,)
    assert tree.token_ids == (1, 2, 4, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_impossible_is_no_child(temperature: float) -> None:
    two = torch.tensor([float("-inf"), 1.0, float("-inf"), 2.0, float("-inf")])
    (draft,) = grown([request(20, tree=(3, 3), temperature=temperature)], lambda path: two)
    for node in range(-1, 2):
        assert {draft.token_ids[child] for child in draft.children(node)} == {1, 3}
    assert len(draft) == 2 + 4
    assert sound_prefix(draft, 20, 9, VOCAB) == (draft, None)


# -- drawn -------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 3), max_size=3).map(tuple), st.integers(1, 14), st.floats(0.3, 2.0), st.integers(0, 99))
def test_drawn_tokens_carry_what_they_were_drawn_from(
    tree: tuple[int, ...], budget: int, temperature: float, seed: int
) -> None:
    (draft,) = grown([request(budget, tree=tree, temperature=temperature, seed=seed)])
    assert set(draft.laws) == {Law.SAMPLED}
    assert draft.draft_probs is not None
    for node, parent in enumerate(draft.parents):
        expected = (logits_of(draft.paths[parent] if parent >= 0 else ()).double() / temperature).softmax(-1)
        assert torch.allclose(draft.draft_probs[node].double(), expected, atol=1e-6)
    for node in range(-1, len(draft)):
        siblings = [draft.token_ids[child] for child in draft.children(node)]
        assert len(set(siblings)) == len(siblings), "drawn without replacement"
        for child in draft.children(node)[1:]:
            assert torch.equal(draft.draft_probs[child], draft.draft_probs[draft.children(node)[0]])


@pytest.mark.parametrize("tree", [(), (2,), (3,), (1, 2)])
def test_siblings_are_drawn_one_after_another_without_replacement(tree: tuple[int, ...]) -> None:
    """Against the law of such draws, multiplied out."""
    n, width = 1500, tree[-1] if tree else 1
    asked = [request(sum(tree) if tree else 1, tree=tree, seed=seed) for seed in range(n)]
    level = torch.tensor([0.1, 0.3, 0.4, 0.15, 0.05]).log()
    drafts = grown(asked, lambda path: level)
    last = [tuple(draft.token_ids[child] for child in draft.children(len(tree[:-1]) - 1)) for draft in drafts]
    law = level.exp().tolist()
    expected = {}
    for order in permutations(range(VOCAB), width):
        chance, left = 1.0, 1.0
        for token in order:
            chance *= law[token] / left
            left -= law[token]
        expected[order] = n * chance
    counts = Counter(last)
    assert set(counts) <= set(expected)
    statistic = sum((counts[order] - e) ** 2 / e for order, e in expected.items())
    assert chi2.sf(statistic, len(expected) - 1) > SURE


def test_every_draw_has_a_key_of_its_own_place() -> None:
    class Recorded(KeyedNoise):
        keys: list[Key] = []  # noqa: RUF012

        def categorical(self, probs: Tensor, keys: Sequence[Key]) -> Tensor:
            self.keys += keys
            return super().categorical(probs, keys)

    noise = Recorded()
    asked = request(9, tree=(2, 2), path=(4, 4), drafter=3)
    grown([asked], noise=DraftNoise(noise))
    places = [(key.stream, key.position, key.branch, key.drafter) for key in noise.keys]
    assert sorted(places) == [(Stream.DRAFT, 5, b, 3) for b in (0, 1)] + [(Stream.DRAFT, 6, b, 3) for b in (0, 1, 2, 3)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_draft_does_not_depend_on_its_company(data: st.DataObject) -> None:
    asked = [
        request(
            data.draw(st.integers(0, 9)),
            data.draw(st.integers(0, 4)),
            tree=data.draw(st.sampled_from([(), (2, 2), (3, 1, 2), (1, 3)])),
            greedy=data.draw(st.booleans()),
            coupled=data.draw(st.booleans()),
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
            path=data.draw(st.sampled_from([(), (3,), (1, 2)])),
            seed=data.draw(st.integers(0, 9)),
        )
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    together = grown(asked)
    for one, draft in zip(asked, together, strict=True):
        (alone,) = grown([one])
        assert (alone.token_ids, alone.parents, alone.laws) == (draft.token_ids, draft.parents, draft.laws)
        if alone.draft_probs is not None:
            assert draft.draft_probs is not None
            assert torch.allclose(alone.draft_probs, draft.draft_probs)


def test_how_many_children_a_node_has_does_not_depend_on_what_was_drawn() -> None:
    shapes = {grown([request(7, tree=(2, 2, 2), seed=seed)])[0].parents for seed in range(50)}
    assert len(shapes) == 1


# -- guessing with the target's noise ----------------------------------------------------------------------------------


def test_a_coupled_chain_is_what_the_target_would_write_with_the_same_logits() -> None:
    asked = request(5, coupled=True, seed=7, path=(3,))
    (draft,) = grown([asked])
    assert set(draft.laws) == {Law.COUPLED}
    target, path = KeyedNoise(), (3,)
    for offset, token in enumerate(draft.token_ids):
        probs = logits_of(path).softmax(-1)[None]
        assert token == int(target.categorical(probs, [Key(0, 7, 0, Stream.TARGET, 4 + offset)]))
        path += (token,)


def test_the_first_child_of_a_coupled_tree_is_that_guess_too() -> None:
    chain, tree = grown([request(2, coupled=True, seed=7), request(6, coupled=True, seed=7, tree=(2, 2))])
    assert tree.token_ids[0] == chain.token_ids[0]
    assert tree.token_ids[tree.children(0)[0]] == chain.token_ids[1]
    for node in range(-1, 2):
        siblings = [tree.token_ids[child] for child in tree.children(node)]
        assert len(set(siblings)) == len(siblings) == 2


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [(), (2, 2, 1)])
def test_parameters_apply_along_each_nodes_own_path(tree: tuple[int, ...]) -> None:
    """A token that has been drafted or stands in the path counts as written."""
    how: dict[str, Any] = {"tree": tree, "temperature": 0.0, "frequency_penalty": 2.0}
    flat = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    (draft,) = grown([request(8, 3, path=(4, 4), **how)], lambda path: flat)
    for node in range(-1, len(draft)):
        before = (4, 4, *(draft.paths[node] if node >= 0 else ()))
        penalised = flat - 2.0 * torch.tensor([float(before.count(token)) for token in range(VOCAB)])
        children = [draft.token_ids[child] for child in draft.children(node)]
        assert children == penalised.sort(stable=True, descending=True).indices.tolist()[: len(children)]


def test_tokens_that_are_not_allowed_are_never_drawn() -> None:
    drafts = grown([request(6, tree=(2, 2), allowed_token_ids=[1, 3], seed=seed) for seed in range(40)])
    assert {token for draft in drafts for token in draft.token_ids} == {1, 3}


def test_a_processor_that_fails_costs_the_draft_its_fit_and_nothing_else() -> None:
    def broken(token_ids: Any, logits: Tensor) -> Tensor:
        raise RuntimeError("no luck")

    asked, plain = request(3, temperature=0.0, logits_processors=[broken]), request(3, temperature=0.0)
    failing, expected = grown([asked, plain])
    assert failing == expected

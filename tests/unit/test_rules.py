"""Acceptance rules on cases worked by hand, and the law they leave on short chains by enumeration."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.verify.rules import block_acceptance, residual, token_acceptance

pytestmark = pytest.mark.usefixtures("kernels")


def law(*rows: list[float]) -> Tensor:
    """[1, len(rows), v]"""
    return torch.tensor([rows], dtype=torch.float64)


def ids(*tokens: int) -> Tensor:
    return torch.tensor([tokens])


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "k", "v"), [(1, 1, 2), (3, 1, 5), (2, 4, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_dtypes(b: int, k: int, v: int, dtype: torch.dtype) -> None:
    torch.manual_seed(b * k * v)
    p, q = torch.rand(b, k + 1, v).softmax(-1).to(dtype), torch.rand(b, k, v).softmax(-1).to(dtype)
    tokens = torch.randint(v, (b, k))
    chances = token_acceptance(p, q, tokens)
    coins, weights = block_acceptance(p, q, tokens)
    assert chances.shape == coins.shape == (b, k)
    assert weights.shape == (b, k + 1)
    owed = residual(p[:, 0], q[:, 0], weights[:, 0])
    assert owed.shape == (b, v)
    assert {chances.dtype, coins.dtype, weights.dtype, owed.dtype} == {dtype}
    for values in (chances, coins, weights):
        assert bool(((values >= 0) & (values <= 1)).all())


def test_drafts_of_a_batch_do_not_meet() -> None:
    torch.manual_seed(1)
    p, q = torch.rand(3, 4, 5).double().softmax(-1), torch.rand(3, 3, 5).double().softmax(-1)
    tokens = torch.randint(5, (3, 3))
    for rule in (lambda *a: (token_acceptance(*a),), block_acceptance):
        together = rule(p, q, tokens)
        for i in range(3):
            alone = rule(p[i : i + 1], q[i : i + 1], tokens[i : i + 1])
            assert all(torch.equal(t[i : i + 1], a) for t, a in zip(together, alone, strict=True))


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_token_rule_is_the_ratio_capped_at_one() -> None:
    p = law([0.2, 0.8], [0.9, 0.1], [0.5, 0.5])
    q = law([0.5, 0.5], [0.3, 0.7])
    assert token_acceptance(p, q, ids(0, 0)).tolist() == [pytest.approx([0.4, 1.0])]
    assert token_acceptance(p, q, ids(1, 1)).tolist() == [pytest.approx([1.0, 1 / 7])]


def test_block_rule_worked_by_hand() -> None:
    # Ratios 0.4, 3, 0.5: P1 = .4, P2 = min(1, .4 * 3) = 1, P3 = 1 * .5 = .5
    p = law([0.2, 0.8], [0.9, 0.1], [0.3, 0.7], [0.5, 0.5])
    q = law([0.5, 0.5], [0.3, 0.7], [0.6, 0.4])
    coins, weights = block_acceptance(p, q, ids(0, 0, 0))
    assert weights.tolist() == [pytest.approx([1.0, 0.4, 1.0, 0.5])]
    # A1 = (.4*.9 - .3)+ + (.4*.1 - .7)+ = .06, h1 = .06 / (.06 + .6)
    # A2 = (.3 - .6)+ + (.7 - .4)+ = .3, h2 = .3 / (.3 + 0) = 1
    assert coins.tolist() == [pytest.approx([0.06 / 0.66, 1.0, 0.5])]


def test_a_chain_of_one_is_the_same_under_both_rules() -> None:
    p, q = law([0.2, 0.8], [0.5, 0.5]), law([0.5, 0.5])
    for token in (0, 1):
        coins, weights = block_acceptance(p, q, ids(token))
        assert torch.equal(coins, token_acceptance(p, q, ids(token)))
        assert weights[:, 0].tolist() == [1.0]


def test_a_perfect_draft_always_stands() -> None:
    p = law([0.25, 0.75], [0.5, 0.5], [0.1, 0.9], [0.6, 0.4])
    for tokens in product(range(2), repeat=3):
        assert token_acceptance(p, p[:, :-1], ids(*tokens)).tolist() == [[1.0, 1.0, 1.0]]
        coins, weights = block_acceptance(p, p[:, :-1], ids(*tokens))
        assert coins.tolist() == [[1.0, 1.0, 1.0]]
        assert weights.tolist() == [[1.0, 1.0, 1.0, 1.0]]


def test_a_token_the_target_forbids_never_stands_and_takes_the_rest_along() -> None:
    p = law([0.0, 1.0], [0.5, 0.5], [0.5, 0.5])
    q = law([0.5, 0.5], [0.5, 0.5])
    assert token_acceptance(p, q, ids(0, 0)).tolist() == [[0.0, 1.0]]
    coins, weights = block_acceptance(p, q, ids(0, 0))
    assert coins.tolist() == [[0.0, 0.0]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


def test_a_token_its_own_law_could_not_draw_never_stands() -> None:
    p, q = law([0.5, 0.5], [0.5, 0.5]), law([0.0, 1.0])
    assert token_acceptance(p, q, ids(0)).tolist() == [[0.0]]
    coins, _ = block_acceptance(p, q, ids(0))
    assert coins.tolist() == [[0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_draft_probability_makes_no_infinity_or_nan(dtype: torch.dtype) -> None:
    small = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # subnormal
    p = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]], dtype=dtype)
    q = torch.tensor([[[0.5, 0.5], [small, 1.0]]], dtype=dtype)
    assert float(q[0, 1, 0]) > 0
    coins, weights = block_acceptance(p, q, ids(0, 0))
    assert weights.tolist() == [[1.0, 0.0, 0.0]], "impossible stays impossible, however unlikely the draft"
    assert coins.tolist() == [[0.0, 0.0]]
    assert token_acceptance(p, q, ids(0, 0)).tolist() == [[0.0, 1.0]]


def test_a_coin_is_certain_where_the_weight_is_whole_and_never_above_certain() -> None:
    torch.manual_seed(0)  # laws so alike that what the target still has to place drowns in float32 next to 1
    p = torch.rand(2000, 3, 5).mul(3).softmax(-1)
    q = (p[:, :-1] * (1 + 3e-8 * torch.randn(2000, 2, 5))).contiguous()
    q[:, 0] = p[:, 0]
    coins, weights = block_acceptance(p, q, torch.randint(5, (2000, 2)))
    assert bool((coins <= 1).all())
    whole = weights[:, 1] == 1
    assert int(whole.sum()) > 1000
    assert bool((coins[:, 0][whole] == 1).all())


def test_a_residual_is_what_the_target_has_above_the_draft() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.2, 0.6, 0.2]]).double()
    assert residual(p, q, torch.ones(1).double()).tolist() == [[1.0, 0.0, 0.0]]
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.4, 0.6, 0.0]]).double()
    assert residual(p, q, torch.ones(1).double()).tolist() == [pytest.approx([1 / 3, 0.0, 2 / 3])]


def test_a_residual_weighs_the_target() -> None:
    p, q = torch.tensor([[0.5, 0.5]]).double(), torch.tensor([[0.1, 0.9]]).double()
    assert residual(p, q, torch.tensor([0.4]).double()).tolist() == [[1.0, 0.0]]
    assert residual(p, torch.tensor([[0.1, 0.1]]).double(), torch.tensor([0.4]).double()).tolist() == [[0.5, 0.5]]


def test_an_empty_residual_falls_back_to_the_target() -> None:
    p = torch.tensor([[0.3, 0.7]]).double()
    assert torch.equal(residual(p, p, torch.ones(1).double()), p)
    assert torch.equal(residual(p, torch.tensor([[1.0, 1.0]]).double(), torch.zeros(1).double()), p)


def test_full_acceptance_leaves_the_targets_own_law() -> None:
    p = torch.tensor([[0.3, 0.7]]).double()
    for weight in (1.0, 0.25, 1e-6):
        owed = residual(p, torch.zeros_like(p), torch.tensor([weight]).double())
        torch.testing.assert_close(owed, p, rtol=1e-12, atol=0)


# -- the law that is left ----------------------------------------------------------------------------------------------

weights_of = st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any).map(lambda w: [x / sum(w) for x in w])


@st.composite
def models(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First law [v] and second laws [v, v] of target and draft; zeros, equal and disjoint laws among them."""
    tables = [torch.tensor([draw(weights_of) for _ in range(4)], dtype=torch.float64) for _ in range(2)]
    if draw(st.booleans()):
        tables[1][draw(st.integers(0, 3))] = tables[0][0]
    return tables[0][0], tables[0][1:], tables[1][0], tables[1][1:]


def joint(rule: str, p1: Tensor, p2: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
    """[v, v] law of the first two tokens written from drafts of two, by enumeration of drafts and coins."""
    v = len(p1)
    out = torch.zeros(v, v, dtype=torch.float64)
    nothing = torch.zeros(1, v, dtype=torch.float64)
    for a, b in product(range(v), repeat=2):
        chance = q1[a] * q2[a, b]
        if chance == 0:
            continue
        p = torch.stack([p1, p2[a], torch.full((v,), 1 / v, dtype=torch.float64)])[None]
        q = torch.stack([q1, q2[a]])[None]
        if rule == "token":
            coins, weight = token_acceptance(p, q, ids(a, b)), torch.ones(1, 3, dtype=torch.float64)
            (c1, c2) = coins[0]
            lengths = [1 - c1, c1 * (1 - c2), c1 * c2]  # leading coins
        else:
            coins, weight = block_acceptance(p, q, ids(a, b))
            (c1, c2) = coins[0]
            lengths = [(1 - c1) * (1 - c2), c1 * (1 - c2), c2]  # the largest coin
        first = residual(p[:, 0], q[:, 0], weight[:, 0])[0]
        second = residual(p[:, 1], q[:, 1], weight[:, 1])[0]
        assert nothing.shape == first[None].shape
        out += chance * lengths[0] * first[:, None] * p2  # the second token comes from a later, plain pass
        out[a] += chance * lengths[1] * second
        out[a, b] += chance * lengths[2]
    return out


@pytest.mark.parametrize("rule", ["token", "block"])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(models())
def test_two_tokens_have_exactly_the_targets_law(rule: str, model: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    p1, p2, q1, q2 = model
    torch.testing.assert_close(joint(rule, p1, p2, q1, q2), p1[:, None] * p2, rtol=0, atol=1e-12)


def test_block_verification_accepts_no_less_than_the_token_rule() -> None:
    generator = torch.Generator().manual_seed(3)
    gains = []
    for _ in range(50):
        p = torch.rand(3, 4, generator=generator, dtype=torch.float64).pow(3)
        q = torch.rand(2, 4, generator=generator, dtype=torch.float64).pow(3)
        p, q = (p / p.sum(-1, keepdim=True))[None], (q / q.sum(-1, keepdim=True))[None]
        lengths = {"token": 0.0, "block": 0.0}
        for a, b in product(range(4), repeat=2):
            chance = float(q[0, 0, a] * q[0, 1, b])
            (t1, t2) = token_acceptance(p, q, ids(a, b))[0].tolist()
            (b1, b2) = block_acceptance(p, q, ids(a, b))[0][0].tolist()
            lengths["token"] += chance * (t1 * (1 - t2) + 2 * t1 * t2)
            lengths["block"] += chance * (b1 * (1 - b2) + 2 * b2)
        gains.append(lengths["block"] - lengths["token"])
    assert min(gains) > -1e-12
    assert max(gains) > 0.01

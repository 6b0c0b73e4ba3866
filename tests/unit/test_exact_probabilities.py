"""Probabilities against a slow definition that sorts and sums exactly, with the kernels of every instruction set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.params import SamplingParams
from outrider.verify.logits import target_probs
from tests.unit.test_sampling_kernels import SETS, with_kernels

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels are not compiled here: no C compiler at build")
#: How far weights may be from e^z by rounding: z is at most 87 in float32 and 745 in float64, and its error counts.
ROUNDING = {torch.float32: 2e-5, torch.float64: 2e-13}


def weights_of(logits: Tensor, temperature: float, top_k: int) -> list[float]:
    """Weights [vocab_size] after temperature and top_k, rounded to the dtype; the largest is 1.

    All tokens whose logit is at least the k-th largest stay; the zeros of both signs are one number."""
    values = logits.tolist()
    most, least = max(values), torch.finfo(logits.dtype).tiny
    edge = sorted(values, reverse=True)[top_k - 1] if 0 < top_k < len(values) else -math.inf
    kept = (value if value >= edge else -math.inf for value in values)
    with np.errstate(over="ignore"):
        exponents = (np.array(list(kept)) - most) / max(temperature, least)
    rounded = torch.tensor(np.exp(exponents)).to(logits.dtype)
    return rounded.tolist()


def probs_of(weights: Sequence[float], top_p: Fraction, min_p: Fraction) -> list[float]:
    """Probabilities [vocab_size] after top_p and min_p.

    A token stays while the mass of those before it is below top_p of all. The largest weights come first, the lowest ids
    first among equals."""
    order = sorted((i for i, weight in enumerate(weights) if weight > 0), key=lambda i: (-weights[i], i))
    units = [_units(weight) for weight in weights]
    limit, mass, kept = top_p * sum(units), 0, []
    for i in order:
        if mass >= limit:
            break
        mass += units[i]
        kept.append(i)
    kept = [i for i in kept if weights[i] >= min_p]
    total = sum(units[i] for i in kept)
    probs = [0.0] * len(weights)
    for i in kept:
        probs[i] = units[i] / total  # rounded once
    return probs


def _units(weight: float) -> int:
    """A weight as a multiple of the least float: exact, and added in a hundredth of the time that a fraction takes."""
    numerator, denominator = weight.as_integer_ratio()
    return numerator * (2**1074 // denominator)


def possible_probs(logits: Tensor, params: SamplingParams) -> list[Tensor]:
    """What the definition allows: one row, or several where rounding decides on which side of a limit a token lies."""
    if params.greedy:
        values = logits.tolist()
        return [torch.eye(len(values), dtype=torch.float64)[values.index(max(values))]]
    weights = weights_of(logits, params.temperature, params.top_k)
    total = math.fsum(weights)
    top_p, min_p = Fraction(params.top_p), Fraction(params.min_p)
    # Sums of ones are exact, and then a limit that is exact, too, leaves no choice.
    exact = set(weights) <= {0.0, 1.0} and Fraction(params.top_p * total) == top_p * int(total)
    slack = Fraction(ROUNDING[logits.dtype])
    shares = {top_p} if exact or params.top_p == 1 else {top_p * (1 - slack), top_p * (1 + slack)}
    floors = {min_p * (1 - slack), min_p * (1 + slack)} if 0 < params.min_p < 1 else {min_p}
    return [torch.tensor(probs_of(weights, *limits), dtype=torch.float64) for limits in product(shares, floors)]


def is_one_of(probs: Tensor, possible: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return any(torch.allclose(probs.double(), other, rtol=2 * ROUNDING[dtype], atol=1e-30) for other in possible)


def assert_exact(logits: Tensor, params: SamplingParams) -> None:
    possible = possible_probs(logits, params)
    for name in SETS:
        probs = with_kernels(name, target_probs, logits[None], [params])[0]
        assert is_one_of(probs, possible, logits.dtype), (
            name,
            int((probs > 0).sum()),
            [int((p > 0).sum()) for p in possible],
        )


@st.composite
def palettes(draw: st.DrawFn, denormal: float) -> list[float]:
    """A few values, so that ties are common, or many that differ, as real logits do."""
    if draw(st.booleans()):
        return [-n / 1024 for n in range(1, draw(st.sampled_from([300, 30_000])))]
    eighths = st.integers(-900, 0).map(lambda n: n / 8)
    special = st.sampled_from([0.0, -0.0, denormal, -denormal, -math.inf])
    return draw(st.lists(eighths | special, min_size=1, max_size=40))


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Logits [vocab_size] with ties, zeros of both signs, numbers too small to be normal, minus infinity and any maximum.

    Some sizes are just above the number of entries from which on the kernels search."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    palette = np.array(draw(palettes(torch.finfo(dtype).tiny / 2)))
    size = draw(st.sampled_from([513, 514, 1, 2, 5, 17, 64, 1200, 17_000]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = torch.tensor(palette[generator.integers(len(palette), size=size)], dtype=dtype)
    logits[int(generator.integers(size))] = draw(st.sampled_from([0.0, -0.0, 0.125]))  # so that not all are minus infinity
    return logits + draw(st.sampled_from([0.0, 0.0, 0.0, 64.0, -64.0, -(2.0**13)]))


kinds = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 5e-324, 1e-45, 1e-3, 0.01, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 20, 400, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.25, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows(), kinds)
def test_probabilities_are_what_the_parameters_mean(logits: Tensor, params: SamplingParams) -> None:
    assert_exact(logits, params)


@settings(max_examples=200, deadline=None, derandomize=True)
@pytest.mark.by_change("src/outrider/verify/", "src/outrider/kernels/")
@given(
    size=st.integers(511, 516) | st.sampled_from([1200, 17_000]),  # the kernels search until few entries are left: 512
    zeros=st.lists(st.sampled_from([0.0, -0.0]), min_size=1, max_size=4),
    shift=st.sampled_from([0.0, 0.0, 0.0, 2.0**-140, 8.0, -8.0]),
    top_k=st.integers(1, 40) | st.integers(1, 600),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**32),
)
def test_top_k_keeps_the_largest_whatever_the_largest_is(
    size: int, zeros: list[float], shift: float, top_k: int, dtype: torch.dtype, seed: int
) -> None:
    below = [-n / 1024 for n in range(1, size + 1 - len(zeros))]
    logits = torch.tensor(np.random.default_rng(seed).permutation([*zeros, *below]), dtype=dtype) + shift
    assert_exact(logits, SamplingParams(temperature=0.3, top_k=top_k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_k_under_a_largest_logit_of_zero(dtype: torch.dtype) -> None:
    logits = -torch.arange(513, dtype=dtype) / 1000
    for top_k in (1, 2, 3, 50, 512):
        assert_exact(logits, SamplingParams(temperature=0.01, top_k=top_k))


def test_the_definition_tells_wrong_probabilities_from_right_ones() -> None:
    logits = torch.tensor([0.0, -0.0, -1.0, -1.0, -2.0, -math.inf])
    assert [probs.gt(0).tolist() for probs in possible_probs(logits, SamplingParams(top_k=3))] == [[True] * 4 + [False] * 2]
    (probs,) = {tuple(probs.gt(0).tolist()) for probs in possible_probs(logits, SamplingParams(top_p=0.8))}
    assert probs == (True, True, True, False, False, False)
    (probs,) = {tuple(probs.gt(0).tolist()) for probs in possible_probs(logits, SamplingParams(min_p=0.3))}
    assert probs == (True, True, True, True, False, False)
    level = possible_probs(torch.zeros(4), SamplingParams(top_p=0.5))
    assert [probs.tolist() for probs in level] == [[0.5, 0.5, 0.0, 0.0]]
    assert not is_one_of(torch.tensor([0.5, 0.0, 0.5, 0.0]), level, torch.float32)
    assert not is_one_of(torch.full((4,), 0.25), level, torch.float32)

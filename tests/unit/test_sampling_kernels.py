"""The compiled probabilities and draws equal the stock ones, with the same sets, ties and tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.library import available_sets
from outrider.params import SamplingParams
from outrider.verify import noise
from outrider.verify.logits import argmax, finite_argmax, largest_chances, target_probs
from outrider.verify.rules import block_acceptance, residual
from tests.kernel_sets import instruction_sets

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
SETS = available_sets()


def with_kernels(instruction_set: str, function, *arguments):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", instruction_set)
        return function(*arguments)


def assert_same_probs(logits: Tensor, rows: list[SamplingParams]) -> None:
    want = with_kernels("off", target_probs, logits, rows)
    for name in SETS:
        got = with_kernels(name, target_probs, logits, rows)
        assert torch.equal(got > 0, want > 0), name
        tolerance = 1e-14 if logits.dtype == torch.float64 else 2e-6
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 3, 20])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.4, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3])),
    )


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.lists(params(), min_size=1, max_size=5),
    size=st.sampled_from([1, 2, 7, 16, 61, 300]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_probabilities_are_the_stock_ones(seed: int, rows: list[SamplingParams], size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), size, generator=generator, dtype=dtype) * 3
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = float("-inf")
    logits[:, 0] = 0.5
    assert_same_probs(logits, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 64, 500, 1025])
def test_the_likeliest_are_the_first_of_the_largest(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(40, 2 * size, dtype=dtype).mul_(2).round_()[:, ::2][:, :size]
    rows = torch.cat(
        [logits.contiguous(), torch.full((1, size), float("-inf"), dtype=dtype), torch.zeros(1, size, dtype=dtype)]
    )
    for values in (rows, logits, rows[:, : max(1, size - 1)]):
        want = with_kernels("off", argmax, values)
        assert all(int(place) == values[row].tolist().index(values[row].max()) for row, place in enumerate(want))
        for name in SETS:
            assert torch.equal(with_kernels(name, argmax, values), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 16, 61, 300])
def test_rows_from_which_no_token_can_be_chosen_are_told(size: int, dtype: torch.dtype) -> None:
    sound = torch.randn(1, size, dtype=dtype).mul_(2).round_()
    rows, want = [sound, torch.full_like(sound, float("-inf"))], [int(argmax(sound)), -1]
    for place in range(size):
        for strange in ("nan", "inf", "-inf"):
            row = sound.clone()
            row[0, place] = float(strange)
            rows.append(row)
            values = [value for value in row[0].tolist() if value != float("-inf")]
            want.append(row[0].tolist().index(max(values)) if strange == "-inf" and values else -1)
    for name in ("off", *SETS):
        assert with_kernels(name, finite_argmax, torch.cat(rows)) == want, name
        assert with_kernels(name, finite_argmax, torch.cat(rows)[:0]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 16, 61, 1300])
def test_the_chances_of_the_largest_are_the_stock_ones(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 2 * size, dtype=dtype).mul_(4)
    logits[0, :size] = 900.0  # whose exponentials are infinite
    logits[1, 1:] = float("-inf")
    want = logits[:, :size].softmax(-1).amax(-1).tolist()
    for name in ("off", *SETS):
        for rows in (logits[:, :size], logits[:, :size].contiguous()):
            assert with_kernels(name, largest_chances, rows) == pytest.approx(want, rel=1e-6), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_at_the_edges(dtype: torch.dtype) -> None:
    level = torch.zeros(1, 8, dtype=dtype)
    for top_p in (0.1, 0.125, 0.3, 0.5, 0.51, 0.99):
        assert_same_probs(level, [SamplingParams(top_p=top_p)])
    assert_same_probs(torch.tensor([[1.0, 2, 2, 2, 0, 2]], dtype=dtype), [SamplingParams(top_k=2)])
    for zero in (0.0, -0.0):
        assert_same_probs(torch.tensor([[zero, -zero, zero, -1]], dtype=dtype), [SamplingParams(top_k=1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_limit_that_rounding_keeps_out_of_reach(dtype: torch.dtype) -> None:
    for size in (600, 2000, 32_000):
        logits = torch.cat([torch.zeros(2, size, dtype=dtype), torch.randn(6, size, dtype=dtype) * 3])
        for top_p in (0.999999, 0.9999999, 0.99999999, 1 - 2**-53):
            for name in SETS:
                got = with_kernels(name, target_probs, logits, [SamplingParams(top_p=top_p, min_p=1e-9)] * 8)
                torch.testing.assert_close(got.sum(-1), torch.ones(8, dtype=dtype), rtol=1e-5, atol=0)


@pytest.mark.parametrize("grid", [0.0, 0.5])  # with a grid, thousands of entries are equal
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
def test_large_vocabularies(spread: float, grid: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, 30_011, dtype=torch.float64) * spread
    logits = (logits / grid).round() * grid if grid else logits
    logits[:, ::7] = float("-inf")
    for top_k in (0, 1, 50, 600, 20_000):
        assert_same_probs(logits, [SamplingParams(top_k=top_k, top_p=top_p) for top_p in (1.0, 0.95, 0.2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_min_p_behind_a_limit_that_rounding_keeps_out_of_reach(instruction_set: str, dtype: torch.dtype) -> None:
    for seed in range(20):
        logits = (torch.randn(1, 32_000, generator=torch.Generator().manual_seed(seed)) * 2).round(decimals=1).to(dtype)
        want = target_probs(logits, [SamplingParams(min_p=0.5)]) > 0
        for top_k, top_p in ((0, 1 - 2**-53), (3000, 1 - 1e-8), (3000, 1 - 1e-9)):
            params = SamplingParams(top_k=top_k, top_p=top_p, min_p=0.5)
            assert torch.equal(with_kernels(instruction_set, target_probs, logits, [params]) > 0, want)


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_top_k_where_denormals_are_zero(instruction_set: str) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        for logits in (torch.tensor([[-3.0, -3, -3, -3, 0]]), -torch.arange(5000.0)[None] * 0.01):
            assert (with_kernels(instruction_set, target_probs, logits, [SamplingParams(top_k=1)]) > 0).sum() == 1
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_the_smallest_debt_becomes_probabilities(instruction_set: str) -> None:
    target = torch.full((1, 10), 0.1, dtype=torch.float64)
    target[0, 3] = 5e-310
    draft = target.clone()
    draft[0, 3] = 0
    probs = with_kernels(instruction_set, residual, target, draft, torch.ones(1, dtype=torch.float64))
    assert torch.equal(probs, torch.eye(10, dtype=torch.float64)[3:4])


def test_flat_probabilities_over_a_large_vocabulary() -> None:
    logits = torch.randn(2, 50_000) * 1e-4
    want = with_kernels("off", target_probs, logits, [SamplingParams(top_p=0.95)] * 2)
    for name in SETS:
        got = with_kernels(name, target_probs, logits, [SamplingParams(top_p=0.95)] * 2)
        # Where thousands of entries differ by a rounding, sums in another order may end a few tokens apart.
        assert ((got > 0) != (want > 0)).sum() <= 20
        torch.testing.assert_close(got.sum(-1), torch.ones(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 64, 65, 1000])
def test_draws_are_the_stock_ones(size: int, dtype: torch.dtype) -> None:
    probs = (torch.randn(200, size, dtype=dtype) * 4).softmax(-1)
    probs[:, ::3] = 0
    probs[:, -1] += 1e-3
    bits = torch.from_numpy(noise.mix_fields(torch.arange(1000).view(200, 5).numpy().astype("uint64")))
    for draw in (noise.gumbel_max, noise.invert_cdf):
        want = with_kernels("off", draw, probs, bits)
        for name in SETS:
            got = with_kernels(name, draw, probs, bits)
            assert torch.equal(got, want)
            assert (probs.gather(-1, got[:, None]) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_debts_are_the_stock_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for size in (3, 16, 601):
        p, q = (torch.randn(2, n, size, dtype=dtype).mul(3).softmax(-1) for n in (4, 3))
        q[0, 1] = p[0, 1]  # a debt of nothing
        x = torch.randint(size, (2, 3))
        want = with_kernels("off", block_acceptance, p, q, x)
        stock = with_kernels("off", residual, p[:, 1], q[:, 1], want[1][:, 1])
        for name in SETS:
            got = with_kernels(name, block_acceptance, p, q, x)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                with_kernels(name, residual, p[:, 1], q[:, 1], want[1][:, 1]), stock, rtol=1e-5, atol=1e-6
            )

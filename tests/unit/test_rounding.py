"""Rounding to int8 by the kernels gives the bits of PyTorch's operators, on every instruction set and any threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.kernels.formats import FORMATS
from outrider.kernels.library import available_sets
from outrider.kernels.rounding import parts, rounded, unrounded
from outrider.kernels.weights import quantise_linears
from tests.kernel_sets import instruction_sets

DTYPES = [torch.float32, torch.bfloat16]
needs_kernels = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")


def weights(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, and some that are odd."""
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    found = torch.randn(rows, cols, generator=generator) * 10.0 ** torch.randint(-30, 30, (rows, 1), generator=generator)
    if rows > 6 and cols:
        found[0] = 0.0
        found[1] = 1e-42  # below the least normal number
        found[2] = -3.0e38
        found[3] = torch.arange(cols) - 63.5  # halves, which go to the even number
        found[4, 0] = 127.0
        found[4, 1:] = (torch.arange(cols - 1) % 127 + 0.5).neg()
    return found.to(dtype)


@pytest.fixture(params=instruction_sets())
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTRIDER_KERNELS", request.param)
    return str(request.param)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (8, 31), (64, 65), (33, 700), (5, 0), (0, 5)])
def test_kernels_round_as_operators_do(
    instruction_set: str, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, threads = weights(*shape, dtype), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            data, scale = rounded(weight)
            product = unrounded(data, scale, dtype)
            with monkeypatch.context() as without:
                without.setenv("OUTRIDER_KERNELS", "off")
                if weight.numel():
                    want_data, want_scale = rounded(weight)
                    assert torch.equal(data, want_data)
                    assert torch.equal(scale, want_scale)
                assert torch.equal(product, unrounded(data, scale, dtype))
            assert product.dtype == dtype
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kernels", ["", "off"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
def test_the_nearest_whole_numbers_are_taken(kernels: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", kernels)
    weight = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    data, scale = rounded(weight)
    assert (data.abs().amax(1) == 127).all()
    error = (data.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= 0.5001 * scale.double()[:, None]).all()


def test_a_view_that_is_not_contiguous_is_rounded_alike() -> None:
    weight = weights(40, 64, torch.float32)
    for ours, theirs in zip(rounded(weight.t().contiguous().t()), rounded(weight), strict=True):
        assert torch.equal(ours, theirs)


def test_a_layer_multiplies_with_all_parts_of_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.kernels.rounding._AT_ONCE", 700)
    layer = torch.nn.Linear(64, 50).requires_grad_(False)
    assert len(parts(layer.weight)) == 5
    stored = rounded(layer.weight.data)
    want = torch.nn.functional.linear(rows := torch.randn(3, 2, 64), unrounded(*stored, torch.float32), layer.bias)
    quantise_linears(layer, FORMATS["int8"])
    torch.testing.assert_close(layer(rows), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    """transformers changes it for the whole process while it builds a model."""
    weight = weights(33, 700, dtype)
    data, scale = rounded(weight)
    torch.set_default_dtype(torch.bfloat16)
    try:
        data_then, scale_then = rounded(weight)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale_then.dtype == torch.float32
    assert torch.equal(data, data_then)
    assert torch.equal(scale, scale_then)

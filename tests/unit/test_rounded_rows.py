"""Activations of 8 bits: products are those of the rounded rows, with the same bits on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from outrider.config import QUANTIZATIONS
from outrider.errors import InvalidParameterError
from outrider.kernels.formats import FORMATS
from outrider.kernels.layout import Operand
from outrider.kernels.library import available_sets, kernels_for
from outrider.kernels.linear import use_packed_linear
from outrider.kernels.packed import PackedWeights, product
from outrider.kernels.weights import quantise_linears, rounded_rows, row_group, unrounded_rows
from tests.kernel_sets import instruction_sets

needs_kernels = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
FORMS = {name: replace(FORMATS[name], rounds_rows=True) for name in sorted(set(QUANTIZATIONS) - {"int4"})}
DTYPES = [torch.float32, torch.bfloat16]


def packed(instruction_set: str, name: str, rows: int, cols: int, dtype: torch.dtype) -> tuple[PackedWeights, Tensor]:
    """Weights of very different sizes, and what they stand for."""
    generator = torch.Generator().manual_seed(cols)
    weight = torch.randn(rows, cols, generator=generator) * 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)
    stored = FORMS[name].store(weight.to(dtype))
    bias = torch.linspace(-1, 1, rows)
    return PackedWeights(kernels_for(instruction_set), stored, bias), stored.format.dequantise(stored, torch.float64)


def multiplied(weight: PackedWeights, rows: Tensor) -> Tensor:
    return product(kernels_for(weight.kernels), weight.struct, rows)[:, : weight.out_features]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_the_rounded_rows_on_every_instruction_set(name: str, dtype: torch.dtype) -> None:
    for cols in (128, 640, 1152, 2176):  # one group, several, and more than a block of steps
        rows = torch.randn(40, cols) * 10.0 ** torch.randint(-2, 3, (40, 1))
        rows[1, :128], rows[2, 5] = 0, 1000.0
        found = []
        for instruction_set in available_sets():
            weight, exact = packed(instruction_set, name, 70, cols, dtype)
            assert weight.operand is Operand.BYTES
            found.append(multiplied(weight, rows))
        near = unrounded_rows(rows, row_group(weight.format, cols)).double()
        size = rows.double().abs() @ exact.abs().t() + 1
        assert ((found[0] - near @ exact.t() - torch.linspace(-1, 1, 70)).abs() <= 2e-6 * size).all()
        assert all(torch.equal(found[0], other) for other in found[1:])


@needs_kernels
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("name", FORMS)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(instruction_set: str, name: str) -> None:
    weight, _ = packed(instruction_set, name, 70, 1152, torch.float32)
    rows, threads = torch.randn(40, 1152), torch.get_num_threads()
    alone = torch.cat([multiplied(weight, row[None]) for row in rows])
    try:
        for count in (*range(1, 10), 15, 16, 17, 31, 32, 33, 40):
            torch.set_num_threads(1 + count % 3)
            assert torch.equal(multiplied(weight, rows[:count]), alone[:count])
            assert torch.equal(multiplied(weight, rows[-count:]), alone[-count:])
        many = torch.arange(600) * 7 % 40  # more than a block of rows
        assert torch.equal(multiplied(weight, rows[many]), alone[many])
    finally:
        torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.parametrize("name", ["int8", "int8-g64", "int4-g32", "int4-g128-asym"])
def test_odd_rows(name: str) -> None:
    rows = torch.randn(6, 256)
    rows[0, 7], rows[1, 200] = float("nan"), -float("inf")
    rows[2], rows[3] = 0, 1e-35
    rows[4], rows[5] = 3e38 * torch.linspace(-1, 1, 256), 1e-20
    for instruction_set in available_sets():
        weight, exact = packed(instruction_set, name, 20, 256, torch.float32)
        found = multiplied(weight, rows)
        assert found[:2].isnan().all(), "a row that is not finite is noticed"
        bias = torch.linspace(-1, 1, 20)
        assert torch.equal(found[2], bias)
        assert torch.equal(found[3], bias), "nothing is as near to zero as to overflow when it is inverted"
        want = unrounded_rows(rows[4:], row_group(weight.format, 256)).double() @ exact.t() + bias
        inside = want.abs() < 0.9 * torch.finfo(torch.float32).max
        assert found[4:][inside].isfinite().all()
        torch.testing.assert_close(found[5].double(), want[1], rtol=1e-5, atol=1e-7)


@needs_kernels
@pytest.mark.parametrize("name", ["int8", "int8-g32", "int8-g128"])
def test_the_largest_weights_and_rows_do_not_saturate(name: str) -> None:
    """Products of pairs and quads of bytes are as large as can be, of every sign; files may hold -128."""
    fmt = FORMS[name]
    stored = fmt.store(torch.randn(64, 1024))
    signs = torch.tensor([1, -1, 1, 1, -1, -1, 1, -1]).repeat(128)
    numbers = torch.where(signs > 0, 127, -128).to(torch.int8).repeat(64, 1)
    numbers[1::2] = torch.where(signs > 0, -128, 127).to(torch.int8)
    stored = replace(stored, data=numbers)
    rows = torch.stack([signs, -signs, torch.ones(1024), -torch.ones(1024)]).float() * 127
    exact = rows.double() @ fmt.dequantise(stored, torch.float64).t()
    for instruction_set in available_sets():
        found = multiplied(PackedWeights(kernels_for(instruction_set), stored), rows)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_numbers_are_at_most_127_and_rounded_to_the_nearest() -> None:
    rows = torch.randn(50, 256) * 10.0 ** torch.randint(-20, 20, (50, 1))
    numbers, scale = rounded_rows(rows, 64)
    assert torch.equal(numbers.abs().amax(-1), torch.full((50, 4), 127.0))
    wide = rows.view(50, 4, 64).double()
    assert ((numbers.double() * scale - wide).abs() <= 0.50001 * scale.double()).all()


def test_the_inverse_of_a_scale_is_rounded_once() -> None:
    rows = torch.randn(20_000, 128, generator=torch.Generator().manual_seed(1))
    numbers, _ = rounded_rows(rows, 128)
    inverse = np.float32(127) / rows.abs().amax(-1, keepdim=True).numpy()
    assert np.array_equal(numbers.squeeze(1).numpy(), np.rint(rows.numpy() * inverse))


@needs_kernels
@pytest.mark.parametrize("name", ["int8", "int8-g32", "int4-g64", "int4-g32-asym"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_without_kernels_round_rows_alike(name: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(256, 70, dtype=dtype).requires_grad_(False)
    plain = nn.Linear(256, 70, dtype=dtype).requires_grad_(False)
    plain.load_state_dict(layer.state_dict())
    quantise_linears(layer, FORMS[name])
    quantise_linears(plain, FORMATS[name])
    rows = torch.randn(2, 3, 256, dtype=dtype)
    want, whole = layer(rows), plain(rows)
    use_packed_linear(layer, kernels_for(available_sets()[-1]))
    within = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(layer(rows), want, **within)
    if dtype == torch.float32:
        assert (want - whole).abs().max() > 1e-4, "rows are rounded"


def test_inputs_that_no_group_divides_are_refused_at_once() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8))
    with pytest.raises(InvalidParameterError, match=r"activations='int8': 1\.weight has 48 inputs") as caught:
        quantise_linears(model, FORMS["int8"])
    assert caught.value.remedy == "Leave activations out."
    assert all(type(layer) is nn.Linear for layer in model)

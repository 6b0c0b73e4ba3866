"""Every format of weights: products are those of the weights that it stands for, and bits of a row are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.config import QUANTIZATIONS
from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.kernels import rounding
from outrider.kernels.formats import FORMATS, StoredWeight, WeightFormat, folded, plain, unfolded
from outrider.kernels.library import available_sets, kernels_for
from outrider.kernels.linear import use_packed_linear, use_stock_linear
from outrider.kernels.packed import PackedWeights, product
from outrider.kernels.weights import quantise_linears
from tests.kernel_sets import instruction_sets

needs_kernels = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
NAMES = sorted(QUANTIZATIONS)
SHAPES = [(1, 128), (33, 256), (100, 640), (40, 1152)]
DTYPES = [torch.float32, torch.bfloat16]


def weights(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    found = torch.randn(rows, cols, generator=generator)
    found *= 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)
    return found.to(dtype)


def packed(instruction_set: str, name: str, rows: int, cols: int, dtype: torch.dtype) -> tuple[StoredWeight, PackedWeights]:
    stored = FORMATS[name].store(weights(rows, cols, dtype))
    return stored, PackedWeights(kernels_for(instruction_set), stored, torch.linspace(-1, 1, rows))


def multiplied(weight: PackedWeights, rows: Tensor) -> Tensor:
    library = kernels_for(weight.kernels)
    return product(library, weight.struct, rows)[:, : weight.out_features]


def test_every_name_has_a_format() -> None:
    assert set(QUANTIZATIONS) == {name for name, fmt in FORMATS.items() if fmt.quantised}


@needs_kernels
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_dequantised_weights(instruction_set: str, dtype: torch.dtype, name: str) -> None:
    for shape in SHAPES:
        stored, weight = packed(instruction_set, name, *shape, dtype)
        exact = stored.format.dequantise(stored, torch.float64)
        for count in (1, 2, 3, 5, 6, 7, 13, 25):
            rows = torch.randn(count, shape[1]).to(dtype).float()  # in pairs, rows are rounded to bf16
            want = rows.double() @ exact.t() + torch.linspace(-1, 1, shape[0])
            size = rows.double().abs() @ exact.abs().t() + 1
            assert ((multiplied(weight, rows) - want).abs() <= 2e-6 * size).all()


@needs_kernels
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(instruction_set: str, dtype: torch.dtype, name: str) -> None:
    _, weight = packed(instruction_set, name, 70, 1152, dtype)
    rows, threads = torch.randn(40, 1152), torch.get_num_threads()
    alone = torch.cat([multiplied(weight, row[None]) for row in rows])
    try:
        for count in (*range(1, 14), 16, 23, 40):
            torch.set_num_threads(1 + count % 3)
            assert torch.equal(multiplied(weight, rows[:count]), alone[:count])
            assert torch.equal(multiplied(weight, rows[-count:]), alone[-count:])
        many = torch.arange(600) * 7 % 40  # more than a block of rows
        assert torch.equal(multiplied(weight, rows[many]), alone[many])
    finally:
        torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_weights_come_back_as_they_were_stored(instruction_set: str, dtype: torch.dtype, name: str) -> None:
    for shape in SHAPES:
        stored, weight = packed(instruction_set, name, *shape, dtype)
        back = weight.unpacked()
        for column in ("data", "scale", "zero"):
            ours, theirs = getattr(back, column), getattr(stored, column)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)


@needs_kernels
@pytest.mark.parametrize("name", ["int8-g32", "int4-g64", "int4-g32-asym"])
def test_large_rows_overflow_only_where_their_product_does(name: str) -> None:
    for instruction_set in available_sets():
        stored, weight = packed(instruction_set, name, 50, 640, torch.float32)
        exact, rows = stored.format.dequantise(stored, torch.float64), torch.zeros(2, 640)
        rows[0] = torch.linspace(-3e38, 3e38, 640)
        want = rows.double() @ exact.t()
        inside = want.abs() < 0.9 * torch.finfo(torch.float32).max
        assert multiplied(weight, rows)[inside].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_weights_stay_near(name: str) -> None:
    fmt, weight = FORMATS[name], weights(64, 512)
    stored = fmt.store(weight)
    error = (fmt.dequantise(stored, torch.float64) - weight).norm(dim=1) / weight.norm(dim=1)
    assert error.max() < (0.012 if fmt.bits == 8 else 0.12)
    if fmt.group is not None:
        assert stored.scale is not None
        assert stored.scale.shape == (64, 512 // fmt.group)
    num_bytes = sum(t.nbytes for t in (stored.data, stored.scale, stored.zero) if t is not None)
    assert num_bytes == fmt.nbytes(64, 512)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("int4")])
def test_the_search_leaves_less_error_than_the_largest_weight_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, weight = FORMATS[name], weights(64, 512)

    def error() -> Tensor:
        found = fmt.dequantise(fmt.store(weight), torch.float64) - weight
        return found.unflatten(1, (-1, fmt.group or 1)).square().sum(-1)

    searched = error()
    monkeypatch.setattr(rounding, "_STRETCHES", (1.0,))
    monkeypatch.setattr(rounding._Best, "fitted_scale", lambda best: best.first_scale)
    plainly = error()
    assert (searched <= plainly).all()
    assert searched.sum() < 0.95 * plainly.sum()


@pytest.mark.parametrize("name", NAMES)
def test_odd_weights(name: str) -> None:
    fmt, weight = FORMATS[name], torch.zeros(6, 128)
    weight[1] = 1e-42  # below the least normal number
    weight[2] = 3e38
    weight[3] = -3e38
    weight[4] = torch.linspace(5.0, 6.0, 128)  # far from zero
    weight[5, 0] = 1.0
    back = fmt.dequantise(fmt.store(weight), torch.float64)
    assert back[0].eq(0).all()
    assert back.isfinite().all()
    assert ((back - weight).abs().amax(1) <= 0.11 * weight.abs().amax(1) + 1e-37).all()


def test_nibbles_are_folded_and_unfolded() -> None:
    numbers = torch.arange(256).to(torch.uint8).view(8, 32) % 16
    assert torch.equal(unfolded(folded(numbers)), numbers)


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_layers_without_kernels_compute_the_same_model(name: str) -> None:
    layer = nn.Linear(256, 70).requires_grad_(False)
    quantise_linears(layer, FORMATS[name])
    rows = torch.randn(2, 3, 256)
    want = layer(rows)
    use_packed_linear(layer, kernels_for(available_sets()[-1]))
    torch.testing.assert_close(layer(rows), want, rtol=1e-5, atol=1e-5)
    use_stock_linear(layer)
    assert torch.equal(layer(rows), want)


@pytest.mark.parametrize(
    ("inputs", "name", "remedy"),
    [
        ([256, 96], "int4-g64", "Use int4-g32 or int8."),
        ([192], "int4", "Use int4-g32 or int4-g64 or int8."),
        ([192, 64], "int4-g128-asym", "Use int4-g32-asym or int4-g64-asym or int8."),
        ([100], "int8-g32", "Use int8."),
    ],
)
def test_groups_that_do_not_divide_are_refused_at_once(inputs: list[int], name: str, remedy: str) -> None:
    model = nn.Sequential(*(nn.Linear(count, 8) for count in inputs))
    with pytest.raises(InvalidParameterError, match=r"\.weight has \d+ inputs, which groups") as caught:
        quantise_linears(model, FORMATS[name])
    assert caught.value.remedy == remedy
    assert all(type(layer) is nn.Linear for layer in model)


@pytest.mark.parametrize("name", ["int8", "int8-g64", "int4-g32", "int4-g32-asym"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(name: str, bad: float) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 8), nn.Linear(64, 8)).requires_grad_(False)
    model[1].weight[3, 5] = bad
    with pytest.raises(UnsupportedModelError, match=r"model 'm': 1\.weight holds weights that are not finite"):
        quantise_linears(model, FORMATS[name], name="m")


def test_weights_of_one_format_are_joined() -> None:
    fmt: WeightFormat = FORMATS["int4-g32-asym"]
    stored = fmt.store(weights(20, 64))
    back = StoredWeight.of([stored.rows(0, 7), stored.rows(7, 20)])
    assert torch.equal(fmt.dequantise(back, torch.float32), fmt.dequantise(stored, torch.float32))
    with pytest.raises(AssertionError, match="one format"):
        StoredWeight.of([stored, plain(weights(3, 64))])

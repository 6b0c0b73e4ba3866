"""Weights in the blocks of files: their values are the gguf package's to the bit, and products are those of these
values."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels import gguf_blocks
from outrider.kernels.formats import StoredWeight, plain
from outrider.kernels.gguf_blocks import (
    GGUF_TYPES,
    NARROWED_TYPES,
    Blocks,
    folded_codes,
    in_order,
    stored_blocks,
    unfolded_codes,
    whole_numbers,
)
from outrider.kernels.layout import Operand
from outrider.kernels.library import available_sets, kernels_for
from outrider.kernels.packed import PackedWeights, product
from outrider.kernels.weights import unrounded_rows_for
from tests.kernel_sets import instruction_sets

gguf = pytest.importorskip("gguf")
needs_kernels = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
ROWS, COLS = 70, 768
#: Where the scales of 16 bits lie in a block.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
TWO = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def random_rows(name: str, rows: int = ROWS, cols: int = COLS) -> np.ndarray:
    """Bytes of blocks of a type: all bits are random, but scales are finite."""
    kind, random = GGUF_TYPES[name], np.random.default_rng(sum(name.encode()))
    blocks = random.integers(0, 256, (rows * cols // kind.inputs, kind.nbytes), dtype=np.uint8)
    if name in ("F16", "BF16"):
        values = torch.from_numpy(random.standard_normal((rows, cols)).astype(np.float32))
        values[0, :3] = torch.tensor([6e-8, -6e-5, 0.0])  # the first two are no normal numbers of 16 bits
        return values.to(torch.float16 if name == "F16" else torch.bfloat16).view(torch.uint8).numpy()
    if name == "MXFP4":
        blocks[:, 0] = random.integers(0, 140, len(blocks))
    for at in SCALES.get(name, (0, 2) if name in TWO else (0,)):
        scale = (random.standard_normal(len(blocks)) / 16).astype(np.float16)
        scale[:2] = 6e-8, -0.0
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def read(name: str) -> tuple[StoredWeight, Tensor]:
    """Weights as we keep them, and as the gguf package unpacks them."""
    rows = random_rows(name)
    want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    return GGUF_TYPES[name].stored(torch.from_numpy(rows), torch.float32), torch.from_numpy(want)


def whole(bits: int, group: int, dtype: torch.dtype, *, zeros: bool, ordered: bool) -> tuple[StoredWeight, Tensor]:
    """Weights in groups as safetensors files keep them, and what they stand for."""
    generator = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(0, 2**bits, (ROWS, COLS), generator=generator, dtype=torch.uint8)
    scale = torch.randn(ROWS, COLS // group, generator=generator).to(dtype)
    zero = torch.randint(0, 2**bits, scale.shape, generator=generator, dtype=torch.uint8) if zeros else None
    order = torch.randperm(COLS, generator=generator) if ordered else None
    stored = in_order(
        stored_blocks(whole_numbers(bits, group, dtype, has_zeros=zeros), torch.float32, codes, scale, zero), order
    )
    less = (2 ** (bits - 1) if zero is None else zero.int().repeat_interleave(group, 1)) * torch.ones(
        ROWS, COLS, dtype=torch.int32
    )
    want = (codes.int() - less).float() * scale.float().repeat_interleave(group, 1)
    return stored, want if order is None else want[:, torch.argsort(order)]


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


WHOLE = [(4, 128, torch.float16, True, True), (4, 64, torch.bfloat16, False, False), (8, 768, torch.float16, False, True)]
CASES = [*sorted(GGUF_TYPES), *WHOLE]


def case(which: str | tuple[int, int, torch.dtype, bool, bool]) -> tuple[StoredWeight, Tensor]:
    if isinstance(which, str):
        return read(which)
    return whole(*which[:3], zeros=which[3], ordered=which[4])


@pytest.mark.parametrize("which", CASES, ids=str)
def test_values_are_those_of_the_file_to_the_bit(which: str | tuple[int, int, torch.dtype, bool, bool]) -> None:
    stored, want = case(which)
    ours = stored.format.dequantise(stored, torch.float32)
    assert same_bits(ours + 0.0, want + 0.0)  # ggml has zeros with either sign
    assert torch.equal(stored.format.dequantise(stored, torch.bfloat16), want.to(torch.bfloat16))
    num_bytes = sum(t.nbytes for t in (stored.data, stored.scale, stored.zero) if t is not None)
    assert num_bytes == stored.format.nbytes(ROWS, COLS)
    part = stored.rows(5, 9)
    assert torch.equal(part.format.dequantise(part, torch.float32), want[5:9])


@needs_kernels
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_units_and_weights_are_those_of_the_stock_operators(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for library in (kernels_for(instruction_set), None):
        for module in (gguf_blocks, gguf_blocks):
            monkeypatch.setattr(module, "kernel_library", lambda library=library: library)
        stored = [case(which)[0] for which in CASES]
        weights = [[each.format.dequantise(each, dtype) for dtype in (torch.float32, torch.bfloat16)] for each in stored]
        found.append((stored, weights))
    for which, ours, stock, *weights in zip(CASES, found[0][0], found[1][0], found[0][1], found[1][1], strict=True):
        assert torch.equal(ours.data, stock.data), which
        assert ours.scale is None or torch.equal(ours.scale.view(torch.int16), stock.scale.view(torch.int16)), which
        for left, right in zip(*weights, strict=True):
            assert torch.equal(left.view(torch.int16), right.view(torch.int16)), which


@pytest.mark.parametrize("name", NARROWED_TYPES)
def test_blocks_become_the_nearest_ones_of_4_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every instruction set and with stock operators alike. Halves go to even codes, so that errors have no sign."""
    rows = random_rows(name)
    rows.reshape(-1, GGUF_TYPES[name].nbytes)[3, 2:] = 255 if name == "Q5_0" else 0  # all numbers of a block are equal
    found = []
    for library in (*(kernels_for(instruction_set) for instruction_set in available_sets()), None):
        monkeypatch.setattr(gguf_blocks, "kernel_library", lambda library=library: library)
        found.append(NARROWED_TYPES[name].stored(torch.from_numpy(rows), torch.float32))
    for each in found:
        assert torch.equal(each.data, found[-1].data)
        assert torch.equal(each.scale.view(torch.int16), found[-1].scale.view(torch.int16))
    assert found[0].format is GGUF_TYPES["Q4_0"].format
    want = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])).reshape(-1, 32)
    got = found[0].format.dequantise(found[0], torch.float32).reshape(-1, 32)
    steps = found[0].scale.float().reshape(-1, 1)
    clear = steps[:, 0].abs() > 1e-5  # smaller ones are no normal numbers of 16 bits
    errors = torch.where(clear[:, None], (got - want) / steps, 0.0)
    inside = got.abs() < 6.9 * steps.abs()  # there is a code 8 steps below 0, and none 8 steps above it
    assert errors[clear].abs().max() < 1.02
    assert errors[clear][inside[clear]].abs().max() < 0.51
    assert abs(errors[clear][inside[clear]].mean()) < 0.005


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("which", CASES, ids=str)
def test_products_are_those_of_the_values_and_the_same_for_any_number_of_rows(
    instruction_set: str, which: str | tuple[int, int, torch.dtype, bool, bool], dtype: torch.dtype
) -> None:
    stored, want = case(which)
    stored = replace(stored, dtype=dtype)
    library, bias = kernels_for(instruction_set), torch.linspace(-1, 1, ROWS)
    ours = PackedWeights(library, stored, bias)
    rows = torch.randn(30, COLS, generator=torch.Generator().manual_seed(1))
    entered = (rows.bfloat16() if ours.operand is Operand.PAIRS else rows).double()
    exact = entered @ want.double().T + bias
    sizes = entered.abs() @ largest_nearby(want).double().T + 1
    found = product(library, ours.struct, rows)[:, :ROWS]
    assert ((found - exact).abs() / sizes).max() < 2**-20
    for count in (1, 2, 3, 5, 8, 13):
        assert same_bits(product(library, ours.struct, rows[:count])[:, :ROWS].contiguous(), found[:count].contiguous())


@needs_kernels
@pytest.mark.parametrize("which", [which for which in CASES if which not in ("F16", "BF16")], ids=str)
def test_products_with_rounded_rows_have_the_same_bits_on_every_instruction_set_and_for_any_number_of_rows(
    which: str | tuple[int, int, torch.dtype, bool, bool],
) -> None:
    stored, want = case(which)
    stored = replace(stored, format=replace(stored.format, rounds_rows=True))
    rows = torch.randn(40, COLS, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 40)[:, None]
    rows[1, :COLS:2], rows[2] = 127.0, -127.0  # all numbers are as large as can be
    entered = unrounded_rows_for(rows, stored).double()
    exact, sizes = entered @ want.double().T, entered.abs() @ largest_nearby(want).double().T + 1e-3
    found = []
    for instruction_set in available_sets():
        library = kernels_for(instruction_set)
        ours = PackedWeights(library, stored)
        assert ours.operand is Operand.BYTES
        assert torch.equal(ours.unpacked().data, stored.data)
        found.append(product(library, ours.struct, rows)[:, :ROWS])
        for count in range(1, 41):
            assert torch.equal(product(library, ours.struct, rows[:count])[:, :ROWS], found[-1][:count])
    assert ((found[0] - exact).abs() / sizes).max() < 2**-20
    assert all(torch.equal(found[0], other) for other in found[1:])


def largest_nearby(weights: Tensor) -> Tensor:
    """The size of the largest weight among 16, which says how precise a sum over them can be."""
    return weights.abs().reshape(len(weights), -1, 16).amax(-1).repeat_interleave(16, 1)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("which", CASES, ids=str)
def test_packed_weights_come_back_and_rows_are_read_to_the_bit(
    instruction_set: str, which: str | tuple[int, int, torch.dtype, bool, bool], dtype: torch.dtype
) -> None:
    stored, want = case(which)
    library = kernels_for(instruction_set)
    ours = PackedWeights(library, replace(stored, dtype=dtype))
    back = ours.unpacked()
    assert torch.equal(back.data, stored.data)
    for column in ("scale", "zero", "order"):
        left, right = getattr(back, column), getattr(stored, column)
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)
    values = want if stored.order is None else want[:, stored.order.long()]
    for row in (0, 31, ROWS - 1):
        found = torch.empty(COLS)
        library.function("unpack_row", torch.float32)(
            ctypes.byref(ours.struct), ctypes.c_int64(row), ctypes.c_void_p(found.data_ptr())
        )
        assert same_bits(found + 0.0, values[row] + 0.0)


@needs_kernels
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_rows_of_several_formats_are_one_matrix(instruction_set: str) -> None:
    library = kernels_for(instruction_set)
    parts = [
        GGUF_TYPES[name].stored(torch.from_numpy(random_rows(name, 64)), torch.float32) for name in ("Q4_K", "Q6_K", "Q6_K")
    ]
    bias, rows = torch.linspace(-1, 1, 192), torch.randn(7, COLS)
    stacked = PackedWeights(library, [*parts, plain(torch.randn(20, COLS))][:3], bias)
    alone = [PackedWeights(library, part, bias[64 * i : 64 * i + 64]) for i, part in enumerate(parts)]
    assert same_bits(
        product(library, stacked.struct, rows)[:, :192],
        torch.cat([product(library, part.struct, rows)[:, :64] for part in alone], 1).contiguous(),
    )
    assert stacked.out_features == 192
    assert stacked.tail is not None
    assert stacked.tail.own_outputs == 128
    odd = parts[0].rows(0, 30)
    with pytest.raises(ValueError, match="30 outputs and others of another format"):
        PackedWeights(library, [odd, parts[1]])
    rounding = replace(parts[0], format=replace(parts[0].format, rounds_rows=True))
    with pytest.raises(ValueError, match="cannot stack q4_k and q6_k, whose rows differ"):
        PackedWeights(library, [rounding, parts[1]])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_come_back_from_their_planes(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 2, 32), dtype=torch.uint8)
    folded = folded_codes(codes, bits)
    assert folded.shape[-1] == 4 * bits
    assert torch.equal(unfolded_codes(folded, bits), codes)


def test_blocks_are_read_and_never_rounded_to() -> None:
    fmt: Blocks = GGUF_TYPES["Q4_K"].format
    assert fmt.takes(512)
    assert not fmt.takes(384)
    with pytest.raises(TypeError, match="files bring weights in q4_k"):
        fmt.store(torch.ones(2, 256))

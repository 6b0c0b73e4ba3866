"""Weights in the blocks that files keep them in, which are computed from without being rounded again.

A weight is a code of a few bits, less something, times the scale of its block, and perhaps times the scale of its part of
the block; then something may be added. One description says which of these there are, so that every such format of GGUF,
GPTQ, AWQ and compressed-tensors is one value of `Blocks`. Numbers are computed in float32, in the order that the files' own
packages have, and so have their bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from outrider.kernels.formats.format import WeightFormat
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.formats.units import weights_of_units
from outrider.kernels.layout import BlocksStruct, BlockValues, FormatCode, Lows, Operand, Scales
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.kernels.pages import room
from outrider.kernels.rounding import parts

#: The inputs whose codes lie together.
UNIT = 32
#: What the codes of the formats with tables stand for: IQ4_NL, and E2M1 of the Open Compute Project's MX formats, doubled.
_TABLES = {
    BlockValues.NL: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    BlockValues.MX: (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
#: The planes of bits that codes of so many bits are kept as, the lowest bits first.
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,), 16: (16,)}


@dataclass(frozen=True)
class Blocks(WeightFormat):
    """Codes in blocks. `group` are the inputs of a block, and None where there are no scales.

    A stored weight has these tensors:

    - data: uint8 [out_features, units * unit_bytes]. A unit of 32 inputs begins with the scales of its parts (int8), then
      the lows of its parts (uint8), then its codes in planes of bits, the lowest bits first.
    - scale: [out_features, blocks], or [out_features, 2 * blocks], each scale with its low.
    - zero: uint8 [out_features, blocks] where there are zero points.

    Attributes:
        code_bits: The bits of a code.
        values: What codes stand for.
        subtracted: What is subtracted from codes where there are no zero points.
        part: The inputs that share a scale of 8 bits: 16 or 32. 0 where there are no such scales.
        scales: The kind of the scales of blocks.
        lows: What is added to scaled codes. Lows of parts are multiplied with the low of their block and subtracted.
    """

    code: ClassVar[FormatCode] = FormatCode.BLOCKS
    quantised: ClassVar[bool] = True
    code_bits: int = 8
    values: BlockValues = BlockValues.WHOLE
    subtracted: int = 0
    part: int = 0
    scales: Scales = Scales.NONE
    lows: Lows = Lows.NONE

    @property
    def bits(self) -> int:  # type: ignore[override]
        """The bits of a weight, without scales."""
        return self.code_bits

    @property
    def num_parts(self) -> int:
        """The parts of a unit that have scales of 8 bits."""
        return UNIT // self.part if self.part else 0

    @property
    def extra_bytes(self) -> int:
        """The bytes of a unit before its codes."""
        return self.num_parts * (2 if self.lows is Lows.OF_PARTS else 1)

    @property
    def unit_bytes(self) -> int:
        """The bytes of a unit of a row."""
        return self.extra_bytes + UNIT * self.code_bits // 8

    @property
    def per_head(self) -> int:
        """The numbers of 16 bits of a block: its scale, and its low."""
        return (self.scales is not Scales.NONE) + (self.lows is not Lows.NONE)

    def store(self, weight: Tensor) -> StoredWeight:
        raise TypeError(f"files bring weights in {self.name}; none are rounded to it")

    def takes(self, in_features: int) -> bool:
        return in_features % (self.group or UNIT) == 0 and in_features % UNIT == 0

    def nbytes(self, rows: int, cols: int) -> int:
        heads = cols // self.group if self.group else 0
        return rows * (cols // UNIT * self.unit_bytes + heads * (2 * self.per_head + self.has_zeros))

    def inputs(self, data: Tensor) -> int:
        return data.shape[-1] // self.unit_bytes * UNIT

    def empty(self, dtype: torch.dtype, rows: int, cols: int) -> StoredWeight:
        # Such memory goes back to the system as soon as it is freed, when the weights have been packed.
        data = room(rows * (cols // UNIT * self.unit_bytes)).view(rows, -1)
        if self.group is None:
            return StoredWeight(self, dtype, data)
        heads = cols // self.group
        scale = room(2 * rows * heads * self.per_head).view(_SCALE_DTYPES[self.scales]).view(rows, -1)
        return StoredWeight(
            self, dtype, data, scale, torch.empty(rows, heads, dtype=torch.uint8) if self.has_zeros else None
        )

    @property
    def may_round_rows(self) -> bool:
        return self.code_bits <= 8  # others are floats

    def operand(self, dtype: torch.dtype, *, pairs: bool) -> Operand:
        exact = self.code_bits <= 8  # in bf16, before they are scaled
        return super().operand(dtype, pairs=pairs and exact)

    def struct(self) -> BlocksStruct:
        return BlocksStruct(self.code_bits, self.values, self.subtracted, self.part, self.scales, self.lows)

    def dequantise(self, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
        cols = self.inputs(stored.data)
        found = torch.empty(*stored.data.shape[:-1], cols, dtype=dtype)
        flat, source = found.view(-1, cols), stored.each(lambda tensor: tensor.flatten(0, -2))
        library = self._library_for(source, dtype)
        for rows in parts(flat):
            part = source.rows(rows.start, rows.stop)
            if library is not None:
                weights = weights_of_units(library, self, part, dtype)
            else:
                weights = self._unfolded(part, cols).to(dtype)
            if stored.order is None:
                flat[rows] = weights
            else:
                flat[rows, stored.order.long()] = weights
        return found

    def _library_for(self, stored: StoredWeight, dtype: torch.dtype) -> KernelLibrary | None:
        """The kernels that make such weights of units, if there are some."""
        columns = [column for column in (stored.data, stored.scale, stored.zero) if column is not None]
        fits = self.code_bits <= 8 and dtype in (torch.float32, torch.bfloat16)
        fits &= all(column.is_contiguous() and column.device.type == "cpu" for column in columns)
        return kernel_library() if fits else None

    def _unfolded(self, stored: StoredWeight, cols: int) -> Tensor:
        """float32 [rows, cols]"""
        units = stored.data.reshape(len(stored.data), -1, self.unit_bytes)
        codes = unfolded_codes(units[..., self.extra_bytes :], self.code_bits)
        if self.code_bits == 16:
            halves = codes.view(torch.bfloat16 if self.values is BlockValues.BF16 else torch.float16)
            return halves.flatten(1).to(torch.float32)
        assert stored.scale is not None, "codes have scales"
        if self.values in _TABLES:
            weights = torch.tensor(_TABLES[self.values], dtype=torch.float32)[codes.long()]
        else:
            weights = codes.to(torch.float32)
        heads = stored.scale.to(torch.float32).reshape(len(units), -1, self.per_head)
        return self._scaled(weights, units, heads, stored.zero, cols // UNIT)

    def _scaled(self, weights: Tensor, units: Tensor, heads: Tensor, zero: Tensor | None, num_units: int) -> Tensor:
        """Weights [rows, units, UNIT] of codes; heads [rows, blocks, per_head]."""
        assert self.group is not None, "codes have scales"
        each = self.group // UNIT

        def of_units(column: Tensor) -> Tensor:  # [rows, blocks] -> [rows, units, 1, 1]
            return column.repeat_interleave(each, 1)[:, :num_units, None, None]

        weights = weights.reshape(*weights.shape[:2], self.num_parts or 1, -1)
        weights = weights - (self.subtracted if zero is None else of_units(zero.to(torch.float32)))
        scale = of_units(heads[..., 0])
        if self.part:
            count = self.num_parts
            scale = scale * units[..., :count].view(torch.int8).to(torch.float32)[..., None]
        weights = weights * scale
        if self.lows is Lows.OF_BLOCKS:
            weights = weights + of_units(heads[..., 1])
        elif self.lows is Lows.OF_PARTS:
            low = of_units(heads[..., 1]) * units[..., count : 2 * count].to(torch.float32)[..., None]
            weights = weights - low
        return weights.flatten(1)


_SCALE_DTYPES = {Scales.HALF: torch.float16, Scales.BF16: torch.bfloat16}
_KINDS = {dtype: kind for kind, dtype in _SCALE_DTYPES.items()}


def stored_blocks(
    fmt: Blocks,
    dtype: torch.dtype,
    codes: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    extras: Tensor | None = None,
) -> StoredWeight:
    """Weights in blocks from their parts.

    Args:
        fmt: What they are.
        dtype: The dtype that they stand for.
        codes: uint8 [out_features, in_features], or 16 bits each.
        scale, zero: As StoredWeight keeps them.
        extras: uint8 [out_features, units, extra_bytes], the scales and the lows of parts.
    """
    units = folded_codes(codes.reshape(len(codes), -1, UNIT), fmt.code_bits)
    if extras is not None:
        units = torch.cat([extras, units], -1)
    return StoredWeight(fmt, dtype, units.flatten(1), scale, zero)


def folded_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., UNIT] in planes of bits, bytes [..., UNIT * bits / 8]. An input with a smaller number has the lower bits
    of a byte."""
    if bits == 16:
        return codes.contiguous().view(torch.uint8)
    planes, shift = [], 0
    for width in _PLANES[bits]:
        plane = (codes >> shift) & (2**width - 1)
        together = plane.reshape(*plane.shape[:-1], -1, 8 // width)
        folded = together[..., 0].clone()
        for i in range(1, 8 // width):
            folded |= together[..., i] << (i * width)
        planes.append(folded)
        shift += width
    return torch.cat(planes, -1) if len(planes) > 1 else planes[0]


def unfolded_codes(data: Tensor, bits: int) -> Tensor:
    """Undo `folded_codes`: uint8 [..., UNIT], or int16 where codes have 16 bits."""
    if bits == 16:
        return data.contiguous().view(torch.int16)
    codes = data.new_zeros(*data.shape[:-1], UNIT)
    shift, begin = 0, 0
    for width in _PLANES[bits]:
        size = UNIT * width // 8
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)
        codes |= ((data[..., begin : begin + size, None] >> shifts) & (2**width - 1)).flatten(-2) << shift
        begin, shift = begin + size, shift + width
    return codes


def in_order(stored: StoredWeight, order: Tensor | None) -> StoredWeight:
    """The same weights, whose inputs lie in another order: at place i those of input order[i]."""
    return stored if order is None else replace(stored, order=order.to(torch.int32).contiguous())


def whole_numbers(bits: int, group: int, scale: torch.dtype, *, has_zeros: bool) -> Blocks:
    """The format of whole numbers of 4 or 8 bits in groups, as GPTQ, AWQ and compressed-tensors keep them. Without zero
    points the middle of their range is subtracted.

    Raises:
        KeyError: Scales are neither float16 nor bfloat16.
    """
    kind = _KINDS[scale]
    name = f"int{bits}-g{group}{'-asym' * has_zeros}-{'f16' if kind is Scales.HALF else 'bf16'}"
    middle = 0 if has_zeros else 2 ** (bits - 1)
    return Blocks(name, group, has_zeros, code_bits=bits, subtracted=middle, scales=kind)

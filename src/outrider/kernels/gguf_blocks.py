"""Weights in the blocks of GGUF files: their types, their units, and products without another rounding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from outrider.kernels.formats import StoredWeight, WeightFormat
from outrider.kernels.layout import BlocksStruct, BlockValues, FormatCode, LinearStruct, Lows, Operand, Scales
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.kernels.packed import release, room
from outrider.kernels.rounding import parts

# --- Weights in the blocks that files keep them in, which are computed from without being rounded again.
#
# A weight is a code of a few bits, less something, times the scale of its block, and perhaps times the scale of its
# part of the block; then something may be added. One description says which of these there are, so that every such
# format of GGUF, GPTQ, AWQ and compressed-tensors is one value of `Blocks`. Numbers are computed in float32, in the
# order that the files' own packages have, and so have their bits.


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
    """

    code: ClassVar[FormatCode] = FormatCode.BLOCKS
    quantised: ClassVar[bool] = True
    code_bits: int = 8  # the bits of a code
    values: BlockValues = BlockValues.WHOLE  # what codes stand for
    subtracted: int = 0  # what is subtracted from codes where there are no zero points
    part: int = 0  # the inputs that share a scale of 8 bits: 16 or 32. 0 where there are no such scales.
    scales: Scales = Scales.NONE  # the kind of the scales of blocks
    # What is added to scaled codes. Lows of parts are multiplied with the low of their block and subtracted.
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
        codes: uint8 [out_features, in_features], or 16 bits each.
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
    """Returns the same weights, whose inputs lie in another order: at place i those of input order[i]."""
    return stored if order is None else replace(stored, order=order.to(torch.int32).contiguous())


def whole_numbers(bits: int, group: int, scale: torch.dtype, *, has_zeros: bool) -> Blocks:
    """The format of whole numbers of 4 or 8 bits in groups, as GPTQ, AWQ and compressed-tensors keep them. Without zero
    points the middle of their range is subtracted."""
    kind = _KINDS[scale]
    name = f"int{bits}-g{group}{'-asym' * has_zeros}-{'f16' if kind is Scales.HALF else 'bf16'}"
    middle = 0 if has_zeros else 2 ** (bits - 1)
    return Blocks(name, group, has_zeros, code_bits=bits, subtracted=middle, scales=kind)


# --- The kernels that bring the blocks of GGUF files into units, and that make weights of units, with all threads.
#
# PyTorch's operators give the same bits where there are no kernels (`gguf.py`, `blocks.py`).


_I64 = ctypes.c_int64


def bring_into_units(library: KernelLibrary, number: int, blocks: Tensor, fmt: Blocks, found: StoredWeight) -> None:
    """Fill an empty weight from blocks of a file.

    Args:
        blocks: uint8 [count, bytes of a block], contiguous: those of all rows.
    """
    inputs = fmt.inputs(found.data) * len(found.data) // len(blocks)
    lows = fmt.extra_bytes - fmt.num_parts
    sizes = (number, *blocks.shape[:1], inputs, *blocks.shape[1:], fmt.code_bits, fmt.num_parts, lows, fmt.per_head)
    tensors = (blocks, found.data, found.scale)
    threads = _I64(library.num_threads)
    library.function("bring_into_units", torch.float32)(*map(_I64, sizes), *map(_address, tensors), threads)


def weights_of_units(library: KernelLibrary, fmt: Blocks, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """The weights [out_features, in_features] that rows of units stand for, in the order in which their inputs lie.

    Args:
        stored: The rows, contiguous.
    """
    found = torch.empty(len(stored.data), fmt.inputs(stored.data), dtype=dtype)
    struct = LinearStruct(fmt.code, Operand.REAL, *found.shape, fmt.group or 0, fmt.has_zeros, blocks=fmt.struct())
    tensors = map(_address, (stored.data, stored.scale, stored.zero, found))
    narrow, threads = _I64(dtype == torch.bfloat16), _I64(library.num_threads)
    library.function("unpack_units", torch.float32)(ctypes.byref(struct), narrow, *tensors, threads)
    return found


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


# --- The types of tensors in GGUF files, and how their blocks become weights that the kernels take.
#
# The layouts are those of ggml, as the gguf package unpacks them. Only the places of bits change: codes come into the
# order of the inputs, and scales of 6 bits become bytes.


#: The weights of a matrix that are converted at a time: by PyTorch's operators, and by kernels.
_AT_ONCE, _AT_ONCE_BY_KERNELS = 2**22, 2**24
#: What a block turns into: codes [blocks, inputs], the scale and low [blocks, per_head], and scales and lows of parts
#: [blocks, units, extra_bytes].
_Parts = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class GgufType:
    """A type of tensors whose blocks stay packed."""

    number: int  # that of the type in files
    format: Blocks  # what its blocks are kept as
    inputs: int  # of a block
    nbytes: int  # of a block
    parted: Callable[[Tensor], _Parts]  # makes the parts of blocks [n, nbytes]

    def stored(self, rows: Tensor, dtype: torch.dtype) -> StoredWeight:
        """The weights of rows of blocks, uint8 [out_features, bytes of a row], which stand for `dtype`. Pages of a file are
        given back as soon as they have been read."""
        cols = rows.shape[1] // self.nbytes * self.inputs
        found, library = self.format.empty(dtype, len(rows), cols), kernel_library()
        if library is not None and rows.is_contiguous() and rows.numel():
            step = max(1, _AT_ONCE_BY_KERNELS // cols)
            for begin in range(0, len(rows), step):
                some, target = rows[begin : begin + step], found.rows(begin, begin + step)
                bring_into_units(library, self.number, some.view(-1, self.nbytes), self.format, target)
                release(some)
            return found
        step = max(1, _AT_ONCE // max(1, cols))
        for begin in range(0, len(rows), step):
            piece = self._stored(rows[begin : begin + step], dtype, cols)
            found.data[begin : begin + step] = piece.data
            if found.scale is not None and piece.scale is not None:
                found.scale[begin : begin + step] = piece.scale
        return found

    def _stored(self, rows: Tensor, dtype: torch.dtype, cols: int) -> StoredWeight:
        codes, heads, extras = self.parted(rows.reshape(-1, self.nbytes))
        return stored_blocks(
            self.format,
            dtype,
            codes.reshape(len(rows), cols),
            None if heads is None else heads.reshape(len(rows), -1),
            extras=None if extras is None else extras.reshape(len(rows), cols // UNIT, -1),
        )


def _halves(blocks: Tensor, begin: int, count: int) -> Tensor:
    """float16 [n, count]"""
    return blocks[:, begin : begin + 2 * count].contiguous().view(torch.float16)


def _nibbles(data: Tensor) -> Tensor:
    """Codes of bytes [..., n]: the lower halves of all bytes, then the upper ones, [..., 2 * n]."""
    return torch.cat([data & 15, data >> 4], -1)


def _fields(data: Tensor, width: int) -> Tensor:
    """Fields of `width` bits of bytes [..., n]: the lowest one of all bytes, then the next ones, [..., 8 / width * n]."""
    return torch.cat([(data >> shift) & (2**width - 1) for shift in range(0, 8, width)], -1)


def _bits(data: Tensor) -> Tensor:
    """The bits of bytes [..., n] one after another, [..., 8 * n]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((data[..., None] >> shifts) & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0, 1), None


def _q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0, 2), None


def _q5_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, _halves(blocks, 0, 1), None


def _q5_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4, _halves(blocks, 0, 2), None


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0, 1), None  # int8 numbers, from -128 on


def _q2_k(blocks: Tensor) -> _Parts:
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).flatten(1)
    scales = blocks[:, :16].reshape(-1, 8, 2)
    return codes, _halves(blocks, 80, 2), torch.cat([scales & 15, scales >> 4], -1)


def _q3_k(blocks: Tensor) -> _Parts:
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    high = _fields(blocks[:, :32], 1)
    scales = _nibbles(blocks[:, 96:104]) | _fields(blocks[:, 104:108], 2) << 4
    return low | high << 2, _halves(blocks, 108, 1), (scales - 32).reshape(-1, 8, 2)  # bytes wrap, as int8 does


def _six_bits(packed: Tensor) -> Tensor:
    """Scales and lows [n, 8, 2] of 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], 1)
    lows = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], 1)
    return torch.stack([scales, lows], -1)


def _q4_k(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return codes, _halves(blocks, 0, 2), _six_bits(blocks[:, 4:16])


def _q5_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1)
    return low | _fields(blocks[:, 16:48], 1) << 4, _halves(blocks, 0, 2), _six_bits(blocks[:, 4:16])


def _q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    return low | high << 4, _halves(blocks, 208, 1), blocks[:, 192:208].reshape(-1, 8, 2)


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _q4_0(blocks)


def _mxfp4(blocks: Tensor) -> _Parts:
    exponent = blocks[:, :1].to(torch.int32)  # 2 ** (exponent - 128), since the table holds doubled numbers
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp_max(1), (exponent - 1) << 23)
    return _nibbles(blocks[:, 1:]), bits.view(torch.float32).to(torch.bfloat16), None


def _f16(blocks: Tensor) -> _Parts:
    return blocks.contiguous().view(torch.int16), None, None


def _narrowed(middle: int, parted: Callable[[Tensor], _Parts]) -> Callable[[Tensor], _Parts]:
    """Parts of blocks whose codes are rounded to 4 bits. The number that is farthest from 0 becomes the code 0, and those
    between two codes take the even one, so that sums of many are neither larger nor smaller."""

    def found(blocks: Tensor) -> _Parts:
        codes, scale, _ = parted(blocks)
        assert scale is not None
        numbers = codes.to(torch.float32) - middle
        least, most = numbers.aminmax(dim=1, keepdim=True)
        farthest = torch.where(-least >= most, least, most)
        step = farthest / -8
        narrow = torch.where(farthest == 0, 0.0, numbers / step).round() + 8
        return narrow.clamp_max(15).to(torch.uint8), (scale.float() * step).half(), None

    return found


def _blocks(name: str, bits: int, group: int, subtracted: int = 0, **details: object) -> Blocks:
    return Blocks(name, group, code_bits=bits, subtracted=subtracted, scales=Scales.HALF, **details)  # type: ignore[arg-type]


_PARTS, _LOWS = {"lows": Lows.OF_PARTS}, {"lows": Lows.OF_BLOCKS}
#: The types whose blocks stay packed, by their names in the gguf package. Vectors and F32 are floats as they are.
GGUF_TYPES = {
    "F16": GgufType(1, Blocks("float16", code_bits=16, values=BlockValues.HALF), UNIT, 2 * UNIT, _f16),
    "BF16": GgufType(30, Blocks("bfloat16-blocks", code_bits=16, values=BlockValues.BF16), UNIT, 2 * UNIT, _f16),
    "Q8_0": GgufType(8, _blocks("q8_0", 8, 32, 128), 32, 34, _q8_0),
    "Q4_0": GgufType(2, _blocks("q4_0", 4, 32, 8), 32, 18, _q4_0),
    "Q4_1": GgufType(3, _blocks("q4_1", 4, 32, **_LOWS), 32, 20, _q4_1),
    "Q5_0": GgufType(6, _blocks("q5_0", 5, 32, 16), 32, 22, _q5_0),
    "Q5_1": GgufType(7, _blocks("q5_1", 5, 32, **_LOWS), 32, 24, _q5_1),
    "Q2_K": GgufType(10, _blocks("q2_k", 2, 256, part=16, **_PARTS), 256, 84, _q2_k),
    "Q3_K": GgufType(11, _blocks("q3_k", 3, 256, 4, part=16), 256, 110, _q3_k),
    "Q4_K": GgufType(12, _blocks("q4_k", 4, 256, part=32, **_PARTS), 256, 144, _q4_k),
    "Q5_K": GgufType(13, _blocks("q5_k", 5, 256, part=32, **_PARTS), 256, 176, _q5_k),
    "Q6_K": GgufType(14, _blocks("q6_k", 6, 256, 32, part=16), 256, 210, _q6_k),
    "IQ4_NL": GgufType(20, _blocks("iq4_nl", 4, 32, values=BlockValues.NL), 32, 18, _iq4_nl),
    "MXFP4": GgufType(39, Blocks("mxfp4", 32, code_bits=4, values=BlockValues.MX, scales=Scales.BF16), 32, 17, _mxfp4),
}
#: Types of more than 4 bits, as they are read where 4 bits are enough.
NARROWED_TYPES = {
    name: replace(
        GGUF_TYPES[name], format=GGUF_TYPES["Q4_0"].format, parted=_narrowed(2 ** (bits - 1), GGUF_TYPES[name].parted)
    )
    for name, bits in (("Q5_0", 5), ("Q8_0", 8))
}

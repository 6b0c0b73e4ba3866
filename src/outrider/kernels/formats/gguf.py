"""The types of tensors in GGUF files, and how their blocks become weights that the kernels take.

The layouts are those of ggml, as the gguf package unpacks them. Only the places of bits change: codes come into the order
of the inputs, and scales of 6 bits become bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.formats.blocks import UNIT, Blocks, stored_blocks
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.formats.units import bring_into_units
from outrider.kernels.layout import BlockValues, Lows, Scales
from outrider.kernels.library import kernel_library
from outrider.kernels.pages import release

#: The weights of a matrix that are converted at a time: by PyTorch's operators, and by kernels.
_AT_ONCE, _AT_ONCE_BY_KERNELS = 2**22, 2**24
#: What a block turns into: codes [blocks, inputs], the scale and low [blocks, per_head], and scales and lows of parts
#: [blocks, units, extra_bytes].
_Parts = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class GgufType:
    """A type of tensors whose blocks stay packed.

    Attributes:
        number: That of the type in files.
        format: What its blocks are kept as.
        inputs, nbytes: Of a block.
        parted: Makes the parts of blocks [n, nbytes].
    """

    number: int
    format: Blocks
    inputs: int
    nbytes: int
    parted: Callable[[Tensor], _Parts]

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

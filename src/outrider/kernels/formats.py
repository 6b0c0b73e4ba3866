"""The formats of weights that we round ourselves: real numbers, bfloat16, int8 and int4."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from outrider.kernels import rounding
from outrider.kernels.layout import BlocksStruct, FormatCode, Operand

# --- What the rest of the package must know of a format of weights.


@dataclass(frozen=True)
class WeightFormat(ABC):
    """A way to keep a weight matrix."""

    code: ClassVar[FormatCode]  # the format's number in C, where an unfolding function belongs to it
    bits: ClassVar[int]  # the bits of a weight, without scales
    quantised: ClassVar[bool]  # whether weights are rounded to whole numbers
    name: str  # as users write it
    group: int | None = None  # how many inputs share a scale. None where all do, or where there are no scales.
    has_zeros: bool = False  # whether each group has a zero point of its own
    # Whether rows are rounded to 8 bits before they are multiplied with the weights (`weights.py`).
    rounds_rows: bool = False

    @property
    def may_round_rows(self) -> bool:
        """Tells whether the kernels have products of rows that are rounded to 8 bits with such weights."""
        return self.quantised

    @abstractmethod
    def store(self, weight: Tensor) -> StoredWeight:
        """Keep a matrix [out_features, in_features] of finite numbers in this format."""

    @abstractmethod
    def dequantise(self, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
        """The weights [out_features, in_features] that the stored numbers stand for."""

    def takes(self, in_features: int) -> bool:
        """Tells whether a matrix of so many inputs can be kept."""
        return self.group is None or in_features % self.group == 0

    def nbytes(self, rows: int, cols: int) -> int:
        """The bytes of a matrix [rows, cols] with its scales."""
        if self.group is None:
            return rows * cols * self.bits // 8 + (4 * rows if self.quantised else 0)
        return rows * cols * self.bits // 8 + rows * (cols // self.group) * (3 if self.has_zeros else 2)

    def inputs(self, data: Tensor) -> int:
        """The in_features of stored numbers [..., n]."""
        return data.shape[-1]

    def empty(self, dtype: torch.dtype, rows: int, cols: int) -> StoredWeight:
        """Room for a matrix [rows, cols] that stands for `dtype`."""
        if not self.quantised:
            return StoredWeight(self, dtype, torch.empty(rows, cols, dtype=dtype))
        data = torch.empty(rows, cols, dtype=torch.int8)
        if self.bits == 4:
            data = torch.empty(rows, cols // 2, dtype=torch.uint8)
        if self.group is None:
            return StoredWeight(self, dtype, data)
        scale = torch.empty(rows, cols // self.group, dtype=torch.bfloat16)
        return StoredWeight(
            self, dtype, data, scale, torch.empty(scale.shape, dtype=torch.uint8) if self.has_zeros else None
        )

    def struct(self) -> BlocksStruct:
        """Returns what the kernels must know of weights in blocks."""
        return BlocksStruct()

    def operand(self, dtype: torch.dtype, *, pairs: bool) -> Operand:
        """Says as what rows enter products with weights that stand for `dtype`. `pairs` says whether the kernels multiply
        pairs of bf16, which is precise enough for bf16 models."""
        if self.rounds_rows:
            return Operand.BYTES
        return Operand.PAIRS if pairs and dtype == torch.bfloat16 else Operand.REAL


# --- A weight matrix in a format, row by row, as it is before it is packed.


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """The numbers that a product with a weight matrix reads. Weights of experts have [num_experts] before every shape.

    Attributes:
        format: What the numbers mean.
        dtype: The dtype that the weights stand for, which says how precisely rows enter a product with them.
        data: [out_features, in_features] numbers, or [out_features, in_features / 2] bytes of two numbers of 4 bits each,
            the first one in the lower half.
        scale: [out_features], or [out_features, groups] where groups of inputs share a scale. None where nothing is scaled.
        zero: uint8 [out_features, groups], the zero points, where the format has some.
        order: int32 [in_features], which input's weights lie at each place; None where they lie in order. All rows share
        it.
    """

    format: WeightFormat
    dtype: torch.dtype
    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    order: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> StoredWeight:
        """Returns the same change of every tensor, as that of the order of the rows."""
        return self.of([self], lambda tensors: change(tensors[0]))

    def rows(self, begin: int, end: int) -> StoredWeight:
        """Some of the rows."""
        return self.each(lambda tensor: tensor[begin:end])

    def expert(self, number: int) -> StoredWeight:
        """The weights of one expert."""
        return self.each(lambda tensor: tensor[number])

    @property
    def quantised(self) -> bool:
        """Tells whether the weights were rounded."""
        return self.format.quantised

    def stands_beside(self, other: StoredWeight) -> bool:
        """Tells whether the rows of both can be rows of one matrix."""
        if self.order is None or other.order is None:
            return self.format == other.format and self.order is other.order
        return self.format == other.format and torch.equal(self.order, other.order)

    @staticmethod
    def of(parts: Sequence[StoredWeight], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> StoredWeight:
        """Weights of one format joined, one tensor of theirs after another."""
        first = parts[0]
        assert all(first.stands_beside(part) for part in parts), "weights of one format are joined"
        scales = [part.scale for part in parts if part.scale is not None]
        zeros = [part.zero for part in parts if part.zero is not None]
        data = join([part.data for part in parts])
        return replace(first, data=data, scale=join(scales) if scales else None, zero=join(zeros) if zeros else None)


# --- Weights in float32 or float64, which products are computed in.


@dataclass(frozen=True)
class Real(WeightFormat):
    """Weights as they are, in the precision of products."""

    code: ClassVar[FormatCode] = FormatCode.REAL
    quantised: ClassVar[bool] = False
    name: str = "float32"
    real: torch.dtype = torch.float32

    @property
    def bits(self) -> int:  # type: ignore[override]
        """The bits of a weight."""
        return 8 * self.real.itemsize

    def store(self, weight: Tensor) -> StoredWeight:
        return StoredWeight(self, weight.dtype, weight)

    def dequantise(self, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
        return stored.data.to(dtype)


# --- Weights in bfloat16.


@dataclass(frozen=True)
class BFloat16(WeightFormat):
    """Weights as they are, in half the bytes of float32."""

    code: ClassVar[FormatCode] = FormatCode.BF16
    bits: ClassVar[int] = 16
    quantised: ClassVar[bool] = False
    name: str = "bfloat16"

    def store(self, weight: Tensor) -> StoredWeight:
        return StoredWeight(self, weight.dtype, weight)

    def dequantise(self, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
        return stored.data.to(dtype)


# --- Weights in whole numbers of 8 bits, symmetric around zero, with a scale for each output or for each group of inputs.


@dataclass(frozen=True)
class Int8(WeightFormat):
    """Whole numbers of -127 to 127 times a scale, float32 for an output and bf16 for a group."""

    code: ClassVar[FormatCode] = FormatCode.INT8
    bits: ClassVar[int] = 8
    quantised: ClassVar[bool] = True
    name: str = "int8"

    def store(self, weight: Tensor) -> StoredWeight:
        if self.group is None:
            return StoredWeight(self, weight.dtype, *rounding.rounded(weight))
        numbers, scale = rounding.rounded_in_groups(weight, self.group, 127)
        return StoredWeight(self, weight.dtype, numbers, scale)

    def dequantise(self, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
        assert stored.scale is not None, "whole numbers have scales"
        if self.group is None:
            return rounding.unrounded(stored.data, stored.scale, dtype)
        return rounding.unrounded_groups(stored.data, stored.scale, None, dtype)


# --- Weights in whole numbers of 4 bits with a scale, and perhaps a zero point, for each group of inputs.


#: What is subtracted from the numbers of 0 to 15 where groups have no zero points.
MIDDLE = 8


@dataclass(frozen=True)
class Int4(WeightFormat):
    """Whole numbers of 0 to 15, less 8 or the zero point of their group, times the group's scale in bf16."""

    code: ClassVar[FormatCode] = FormatCode.INT4
    bits: ClassVar[int] = 4
    quantised: ClassVar[bool] = True

    def store(self, weight: Tensor) -> StoredWeight:
        assert self.group is not None, "4 bits are kept in groups"
        if self.has_zeros:
            numbers, scale, zero = rounding.rounded_from_zero_points(weight, self.group)
            return StoredWeight(self, weight.dtype, folded(numbers), scale, zero)
        numbers, scale = rounding.rounded_in_groups(weight, self.group, 7, least=-MIDDLE)
        return StoredWeight(self, weight.dtype, folded((numbers + MIDDLE).to(torch.uint8)), scale)

    def inputs(self, data: Tensor) -> int:
        return 2 * data.shape[-1]

    def dequantise(self, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
        assert stored.scale is not None, "whole numbers have scales"
        numbers = unfolded(stored.data)
        if stored.zero is None:
            numbers = numbers.to(torch.int8) - MIDDLE
        return rounding.unrounded_groups(numbers, stored.scale, stored.zero, dtype)


def folded(numbers: Tensor) -> Tensor:
    """Numbers of 0 to 15 [..., n], two to a byte [..., n / 2]."""
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def unfolded(data: Tensor) -> Tensor:
    """Undo `folded`."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)


# --- The formats by their names, and the formats of weights that are not rounded by their dtypes.


#: The sizes of groups that the kernels know.
GROUPS = (32, 64, 128)
_FLOATS: dict[torch.dtype, WeightFormat] = {
    torch.float32: Real(),
    torch.float64: Real("float64", real=torch.float64),
    torch.bfloat16: BFloat16(),
}
_QUANTISED: tuple[WeightFormat, ...] = (
    Int8(),
    *(Int8(f"int8-g{size}", size) for size in GROUPS),
    *(Int4(f"int4-g{size}", size) for size in GROUPS),
    *(Int4(f"int4-g{size}-asym", size, has_zeros=True) for size in GROUPS),
)
#: Every format by its name. "int4" is what others mean by it: groups of 128, symmetric.
FORMATS: dict[str, WeightFormat] = {
    **{known.name: known for known in (*_FLOATS.values(), *_QUANTISED)},
    "int4": Int4("int4-g128", 128),
}
#: The formats of weights that files bring, as far as such weights have been packed.
_FROM_FILES: dict[str, WeightFormat] = {}


def remember(fmt: WeightFormat) -> str:
    """The name of a format, by which `by_name` finds it from now on."""
    if fmt.name not in FORMATS:
        _FROM_FILES[fmt.name] = fmt
    return fmt.name


def by_name(name: str) -> WeightFormat:
    """A format that users may ask for, or one that was remembered."""
    return FORMATS.get(name) or _FROM_FILES[name]


def plain(weight: Tensor) -> StoredWeight:
    """A matrix of floats as it is stored. Raises KeyError for a dtype that the kernels do not know."""
    return _FLOATS[weight.dtype].store(weight)


def is_plain(dtype: torch.dtype) -> bool:
    """Tells whether the kernels know weights of this dtype."""
    return dtype in _FLOATS

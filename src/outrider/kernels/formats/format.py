"""What the rest of the package must know of a format of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.layout import BlocksStruct, FormatCode, Operand


@dataclass(frozen=True)
class WeightFormat(ABC):
    """A way to keep a weight matrix.

    Attributes:
        code: The format's number in C, where an unfolding function belongs to it.
        bits: The bits of a weight, without scales.
        quantised: Whether weights are rounded to whole numbers.
        name: As users write it.
        group: How many inputs share a scale. None where all do, or where there are no scales.
        has_zeros: Whether each group has a zero point of its own.
        rounds_rows: Whether rows are rounded to 8 bits before they are multiplied with the weights (`activations.py`).
    """

    code: ClassVar[FormatCode]
    bits: ClassVar[int]
    quantised: ClassVar[bool]
    name: str
    group: int | None = None
    has_zeros: bool = False
    rounds_rows: bool = False

    @property
    def may_round_rows(self) -> bool:
        """Whether the kernels have products of rows that are rounded to 8 bits with such weights."""
        return self.quantised

    @abstractmethod
    def store(self, weight: Tensor) -> StoredWeight:
        """Keep a matrix [out_features, in_features] of finite numbers in this format."""

    @abstractmethod
    def dequantise(self, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
        """The weights [out_features, in_features] that the stored numbers stand for."""

    def takes(self, in_features: int) -> bool:
        """Whether a matrix of so many inputs can be kept."""
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
        """What the kernels must know of weights in blocks."""
        return BlocksStruct()

    def operand(self, dtype: torch.dtype, *, pairs: bool) -> Operand:
        """As what rows enter products with weights that stand for `dtype`. `pairs` says whether the kernels multiply pairs
        of bf16, which is precise enough for bf16 models."""
        if self.rounds_rows:
            return Operand.BYTES
        return Operand.PAIRS if pairs and dtype == torch.bfloat16 else Operand.REAL

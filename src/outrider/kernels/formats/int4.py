"""Weights in whole numbers of 4 bits with a scale, and perhaps a zero point, for each group of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.kernels import rounding
from outrider.kernels.formats.format import WeightFormat
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.layout import FormatCode

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

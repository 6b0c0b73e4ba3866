"""Weights in whole numbers of 8 bits, symmetric around zero, with a scale for each output or for each group of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.kernels import rounding
from outrider.kernels.formats.format import WeightFormat
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.layout import FormatCode


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

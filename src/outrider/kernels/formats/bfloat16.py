"""Weights in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.kernels.formats.format import WeightFormat
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.layout import FormatCode


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

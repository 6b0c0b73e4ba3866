"""Weights in float32 or float64, which products are computed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.kernels.formats.format import WeightFormat
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.layout import FormatCode


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

"""Linear layers for a few rows on CPUs, where stock products cost several decode steps.

A verify pass has one row a draft token and one more. MKL's float32 product with so few rows repacks the weights and takes
about three times as long as one row does; the same product with the operands exchanged, weights on the left, reads the
weights once and takes as long as one row (measured: docs/performance.md). Its kernels come in widths of four, so rows are
padded up to the next multiple. Nothing else changes: same weights, same precision, rounding in another order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Above this many rows the stock product is as good.
MAX_ROWS = 16
_WIDTH = 4


class SkinnyLinear(nn.Linear):
    """nn.Linear that reads its weights once for up to MAX_ROWS rows."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        num_rows = input.numel() // input.shape[-1]
        if not 1 < num_rows <= MAX_ROWS:
            return F.linear(input, self.weight, self.bias)
        rows = F.pad(input.reshape(num_rows, -1), (0, 0, 0, -num_rows % _WIDTH))
        out = torch.mm(self.weight, rows.t())[:, :num_rows].t().contiguous()
        if self.bias is not None:
            out += self.bias
        return out.view(*input.shape[:-1], -1)


def use_skinny_linear(model: nn.Module) -> None:
    """Let the stock linear layers of `model` take the fast way, where there is one: float32 on a CPU with MKL."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.__class__ = SkinnyLinear  # in place, so that tied weights, hooks and names stay as they are

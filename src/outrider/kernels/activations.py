"""Rounding of activations to whole numbers of 8 bits, as the kernels do it, bit for bit.

A row is rounded in groups of inputs: those of the weights, or the largest of 128, 64 and 32 that divides the row where all
weights of an output share a scale. For weights in the blocks of files these are the units of 32 inputs, at the places where
the weights lie. The largest number of a group is 127 times the group's scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.formats.format import WeightFormat
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.layout import FormatCode

#: Groups of rows where all weights of an output share a scale. The smallest must divide the inputs.
ROW_GROUPS = (128, 64, 32)
#: A group without any number of this size is zero.
_LEAST = 2.0**-100


def takes_rows(fmt: WeightFormat, in_features: int) -> bool:
    """Whether rows of so many inputs can be rounded for weights of this format."""
    return in_features % (_own_group(fmt) or ROW_GROUPS[-1]) == 0


def row_group(fmt: WeightFormat, in_features: int) -> int:
    """How many inputs of a row share a scale."""
    return _own_group(fmt) or next(group for group in ROW_GROUPS if in_features % group == 0)


def _own_group(fmt: WeightFormat) -> int | None:
    return ROW_GROUPS[-1] if fmt.code is FormatCode.BLOCKS else fmt.group


def rounded_rows(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round rows.

    Args:
        rows: [..., in_features], any floating dtype.
        group: The inputs that share a scale. It divides their number.

    Returns:
        Whole numbers in float32 [..., groups, group], and scales in float32 [..., groups, 1]. A scale is not a number where
        a number of the group is not finite.
    """
    wide = rows.to(torch.float32).reshape(*rows.shape[:-1], rows.shape[-1] // group, group)
    largest = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(largest < _LEAST, 0.0, largest / 127)
    # A number divided by a tensor would be rounded twice, since PyTorch multiplies it with the inverse of the tensor.
    inverse = torch.where(largest < _LEAST, 0.0, torch.full_like(largest, 127) / largest)
    finite = largest.isfinite()
    scale, inverse = torch.where(finite, scale, torch.nan), torch.where(finite, inverse, 0.0)
    return torch.where(finite, wide * inverse, 0.0).round_(), scale


def unrounded_rows(rows: Tensor, group: int) -> Tensor:
    """What rows [..., in_features] stand for once they are rounded, in float32."""
    numbers, scale = rounded_rows(rows, group)
    return (numbers * scale).flatten(-2)


def unrounded_rows_for(rows: Tensor, stored: StoredWeight) -> Tensor:
    """What rows [..., in_features] stand for in a product with these weights, in float32."""
    group = row_group(stored.format, rows.shape[-1])
    if stored.order is None:
        return unrounded_rows(rows, group)
    order = stored.order.long()
    return unrounded_rows(rows[..., order], group)[..., torch.argsort(order)]


class RowRounding(torch.autograd.Function):
    """`unrounded_rows_for`, where something learns to make the rows: gradients go through as if nothing were rounded, since
    those of the rounding are zero (the straight-through estimator, Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stored: StoredWeight) -> Tensor:
        """[..., in_features], any floating dtype, to the same in float32."""
        ctx.dtype = rows.dtype
        return unrounded_rows_for(rows, stored)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of the rows."""
        return gradients[0].to(ctx.dtype), None

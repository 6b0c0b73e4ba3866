"""A weight matrix in a format, row by row, as it is before it is packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outrider.kernels.formats.format import WeightFormat


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
        """The same change of every tensor, as that of the order of the rows."""
        return self.of([self], lambda tensors: change(tensors[0]))

    def rows(self, begin: int, end: int) -> StoredWeight:
        """Some of the rows."""
        return self.each(lambda tensor: tensor[begin:end])

    def expert(self, number: int) -> StoredWeight:
        """The weights of one expert."""
        return self.each(lambda tensor: tensor[number])

    @property
    def quantised(self) -> bool:
        """Whether the weights were rounded."""
        return self.format.quantised

    def stands_beside(self, other: StoredWeight) -> bool:
        """Whether the rows of both can be rows of one matrix."""
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

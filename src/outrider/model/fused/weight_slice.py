"""Slices of linear layers, which the kernels stack as they need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from outrider.kernels.formats.registry import plain
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import restore_weight, stored_weight
from outrider.model import hf


@dataclass(frozen=True)
class WeightSlice:
    """Output features `begin` to `end` of a linear layer."""

    module: Any
    begin: int
    end: int


class Packer(Protocol):
    """Takes weights out of their modules and packs them."""

    def take(self, *parts: WeightSlice) -> PackedWeights:
        """Pack parts of linear layers as one matrix, stacked."""

    def take_experts(self, module: Any) -> tuple[list[PackedWeights], list[PackedWeights]]:
        """Pack the experts of a layer: gates and values, and the projections back."""


def whole(module: Any) -> WeightSlice:
    return WeightSlice(module, 0, len(stored(module).data))


def halves(module: Any) -> tuple[WeightSlice, WeightSlice]:
    size = len(stored(module).data) // 2
    return WeightSlice(module, 0, size), WeightSlice(module, size, 2 * size)


def interleaved_qkv(module: Any, num_heads: int, head_dim: int) -> list[WeightSlice]:
    """All queries, all keys, and all values of a projection that holds query, key and value of one head after another."""
    begins = [(3 * head + which) * head_dim for which in range(3) for head in range(num_heads)]
    return [WeightSlice(module, begin, begin + head_dim) for begin in begins]


def queries_and_gates(module: Any, num_heads: int) -> tuple[list[WeightSlice], list[WeightSlice]]:
    """All queries, and all gates, of a projection that holds both of one head after another."""
    size = len(stored(module).data) // (2 * num_heads)
    begins = [2 * head * size for head in range(num_heads)]
    queries = [WeightSlice(module, begin, begin + size) for begin in begins]
    return queries, [WeightSlice(module, each.end, each.end + size) for each in queries]


def stored(module: Any) -> StoredWeight:
    """The weight [out_features, in_features] of a layer."""
    if isinstance(module, hf.TRANSPOSED_LINEARS):
        return plain(module.weight.data.t())
    return stored_weight(module)


def restore(module: Any, stored: StoredWeight) -> None:
    if isinstance(module, hf.TRANSPOSED_LINEARS):
        stored = stored.each(lambda weight: weight.t().contiguous())
    restore_weight(module, stored)

"""Parts of linear layers, which the kernels stack as they need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import StoredWeight, restore_weight, stored_weight
from outrider.model import hf


@dataclass(frozen=True)
class Part:
    """Output features `begin` to `end` of a linear layer."""

    module: Any
    begin: int
    end: int


class Packer(Protocol):
    """Takes weights out of their modules and packs them."""

    def take(self, *parts: Part) -> PackedWeights:
        """Pack parts of linear layers as one matrix, stacked."""

    def take_experts(self, module: Any) -> tuple[list[PackedWeights], list[PackedWeights]]:
        """Pack the experts of a layer: gates and values, and the projections back."""


def whole(module: Any) -> Part:
    return Part(module, 0, len(stored(module).data))


def halves(module: Any) -> tuple[Part, Part]:
    size = len(stored(module).data) // 2
    return Part(module, 0, size), Part(module, size, 2 * size)


def heads_in_turn(module: Any, num_heads: int, head_dim: int) -> list[Part]:
    """All queries, all keys, and all values of a projection that holds query, key and value of one head after another."""
    begins = [(3 * head + which) * head_dim for which in range(3) for head in range(num_heads)]
    return [Part(module, begin, begin + head_dim) for begin in begins]


def stored(module: Any) -> StoredWeight:
    """The weight [out_features, in_features] of a layer."""
    if isinstance(module, hf.TRANSPOSED_LINEARS):
        return StoredWeight(module.weight.data.t(), None)
    return stored_weight(module)


def restore(module: Any, stored: StoredWeight) -> None:
    if isinstance(module, hf.TRANSPOSED_LINEARS):
        stored = StoredWeight(stored.data.t().contiguous(), None)
    restore_weight(module, stored)

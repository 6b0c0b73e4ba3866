"""A feed-forward of experts over packed weights (native/experts.inc).

A router chooses a few experts for each row. The kernels read the weights of an expert once for all rows that have it, and
the bits of a row do not depend on the rows that share its experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.layout import ACTIVATIONS, ExpertsStruct, LinearStruct
from outrider.kernels.library import KernelLibrary
from outrider.kernels.packed import PackedWeights


@dataclass(frozen=True)
class ExpertsShape:
    """How experts are chosen, and what stands between their two products.

    Attributes:
        num_chosen: The experts of a row.
        normalised: Whether the weights of a row's experts add up to 1. If not, they are shares among all experts.
        activation: The activation of the gate, a key of ACTIVATIONS.
        slope: The factor inside the sigmoid of a gate that is bounded, which has this activation instead.
        limit: The bound of this gate, and of what it is multiplied with. 0 means that there is none.
    """

    num_chosen: int
    normalised: bool
    activation: str
    slope: float = 0.0
    limit: float = 0.0


class PackedExperts:
    """The weights of the experts of one layer.

    Args:
        shape: How they are chosen, and their gate.
        router: The projection to a logit for each expert.
        gate_up: Gate and values of every expert, as `pack_gated` packs them.
        down: The projection back, of every expert.
    """

    def __init__(
        self, shape: ExpertsShape, router: PackedWeights, gate_up: Sequence[PackedWeights], down: Sequence[PackedWeights]
    ) -> None:
        self._router, self._gate_up, self._down = router, list(gate_up), list(down)
        self._shape = shape
        self._arrays = [(LinearStruct * len(each))(*(w.struct for w in each)) for each in (gate_up, down)]
        self.struct = ExpertsStruct(
            len(gate_up),
            shape.num_chosen,
            shape.normalised,
            ACTIVATIONS[shape.activation],
            shape.slope,
            shape.limit,
            router.struct,
            *(ctypes.addressof(array) for array in self._arrays),
        )

    @property
    def nbytes(self) -> int:
        """The bytes that one row reads: those of the router and of the experts that it chooses."""
        each = self._gate_up[0].nbytes + self._down[0].nbytes
        return self._router.nbytes + self._shape.num_chosen * each


def pack_gated(
    library: KernelLibrary, gate: StoredWeight, up: StoredWeight, biases: tuple[Tensor, Tensor] | None
) -> PackedWeights:
    """Pack the gate of an expert and the values that it is multiplied with as one matrix.

    Panels of the two take turns, so that a thread reads both in one stream.

    Args:
        library: The kernels of this processor.
        gate, up: [size, in_features] each.
        biases: [size] each, or None.
    """
    panel = _panel(library, gate.dtype)
    both = StoredWeight.of([gate, up], lambda parts: _in_turn(parts[0], parts[1], panel))
    return PackedWeights(library, both, None if biases is None else _in_turn(*biases, panel))


def unpack_gated(library: KernelLibrary, packed: PackedWeights, size: int) -> tuple[StoredWeight, StoredWeight]:
    """Undo `pack_gated` for experts of this size."""
    both, panel = packed.unpacked(), _panel(library, packed.dtype)
    gate, up = (both.each(lambda tensor, i=i: _out_of_turn(tensor, size, panel)[i]) for i in range(2))  # type: ignore[misc]
    return gate, up


def _panel(library: KernelLibrary, dtype: torch.dtype) -> int:
    return library.panel(torch.float64 if dtype == torch.float64 else torch.float32)


def _in_turn(first: Tensor, second: Tensor, panel: int) -> Tensor:
    """A panel of rows of one, then a panel of rows of the other. What is missing from the last panels is zero."""
    missing = first.new_zeros(-len(first) % panel, *first.shape[1:])
    runs = (torch.cat([each, missing]).reshape(-1, panel, *first.shape[1:]) for each in (first, second))
    return torch.stack(list(runs), 1).flatten(0, 2)


def _out_of_turn(both: Tensor, size: int, panel: int) -> tuple[Tensor, Tensor]:
    runs = both.reshape(-1, 2, panel, *both.shape[1:])
    return runs[:, 0].flatten(0, 1)[:size], runs[:, 1].flatten(0, 1)[:size]

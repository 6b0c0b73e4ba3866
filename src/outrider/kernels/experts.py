"""Experts over packed weights: a whole feed-forward, or one projection at a time (native/experts.inc)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.kernels.formats import StoredWeight, is_plain
from outrider.kernels.layout import ACTIVATIONS, ExpertsStruct, LinearStruct
from outrider.kernels.library import KernelLibrary
from outrider.kernels.linear import packed_product
from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import ExpertStack, entering

# --- A feed-forward of experts over packed weights (native/experts.inc).
#
# A router chooses a few experts for each row. The kernels read the weights of an expert once for all rows that have it,
# and the bits of a row do not depend on the rows that share its experts.


@dataclass(frozen=True)
class ExpertsShape:
    """Says how experts are chosen, and what stands between their two products."""

    num_chosen: int  # the experts of a row
    normalised: bool  # whether the weights of a row's experts add up to 1. If not, they are shares among all experts.
    activation: str  # the activation of the gate, a key of ACTIVATIONS
    slope: float = 0.0  # the factor inside the sigmoid of a gate that is bounded, which has this activation instead
    limit: float = 0.0  # the bound of this gate, and of what it is multiplied with. 0 means that there is none.


class PackedExperts:
    """The weights of the experts of one layer."""

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


# --- The experts of a layer over packed weights, one projection at a time, for models whose other operators are PyTorch's.
#
# The weights of an expert are read once for all its rows, and the bits of a row do not depend on these.


class PackedStack:
    """One projection of all experts of a layer.

    The weights move out of the module that holds them.
    """

    def __init__(self, library: KernelLibrary, stack: ExpertStack) -> None:
        self._stack = stack
        stored = stack.stored()
        biases = getattr(stack.module, f"{stack.name}_bias", None)
        self._experts = [
            PackedWeights(library, stored.expert(expert), None if biases is None else biases[expert].detach())
            for expert in range(len(stored.data))
        ]
        stack.empty()

    def products(self, rows: Tensor, experts: Tensor) -> Tensor:
        """[num_rows, in_features] to [num_rows, out_features], with the biases; `experts` [num_rows] is sorted."""
        return _products(rows, experts, lambda part, expert: packed_product(part, self._experts[expert]))

    def give_back(self) -> None:
        """Every weight to its module."""
        self._stack.restore(StoredWeight.of([packed.unpacked() for packed in self._experts], torch.stack))


class StoredStack:
    """Holds weights that are computed as they are stored, where no kernels read these: every pass makes weights of those of
    the experts that it has chosen."""

    def __init__(self, stack: ExpertStack) -> None:
        self._stored = stack.stored()
        self._biases = getattr(stack.module, f"{stack.name}_bias", None)

    def products(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Computes products as a PackedStack does."""
        return _products(rows, experts, self._product)

    def _product(self, rows: Tensor, expert: int) -> Tensor:
        stored = self._stored.expert(expert)
        rounded, dtype = entering(rows, stored)
        bias = None if self._biases is None else self._biases[expert].to(dtype)
        return nn.functional.linear(rounded, stored.format.dequantise(stored, dtype), bias).to(rows.dtype)


def _products(rows: Tensor, experts: Tensor, product: Callable[[Tensor, int], Tensor]) -> Tensor:
    found, sizes = torch.unique_consecutive(experts, return_counts=True)
    parts = zip(torch.split(rows, sizes.tolist()), found.tolist(), strict=True)
    outputs = [product(part, expert) for part, expert in parts]
    return torch.cat(outputs) if outputs else product(rows, 0)


def pack_stacks(stacks: Iterable[ExpertStack], library: KernelLibrary) -> list[PackedStack]:
    """Pack those projections that the kernels can compute; modules find them by name in `packed_stacks`."""
    packed = []
    for stack in stacks:
        weight = getattr(stack.module, stack.name)
        if weight.device.type == "cpu" and is_plain(weight.dtype):
            packed.append(PackedStack(library, stack))
            stack.module.__dict__.setdefault("packed_stacks", {})[stack.name] = packed[-1]
    return packed


def unpack_stacks(stacks: Iterable[ExpertStack]) -> None:
    """Undo `pack_stacks`."""
    for stack in stacks:
        packed = stack.module.__dict__.get("packed_stacks", {}).pop(stack.name, None)
        if packed is not None:
            packed.give_back()

"""The experts of a layer over packed weights, one projection at a time, for models whose other operators are PyTorch's.

The weights of an expert are read once for all its rows, and the bits of a row do not depend on these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from outrider.kernels.formats.registry import is_plain
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.library import KernelLibrary
from outrider.kernels.linear import packed_product
from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import ExpertStack, entering


class PackedStack:
    """One projection of all experts of a layer.

    The weights move out of the module that holds them.

    Args:
        library: The kernels of this processor.
        stack: The projection, on a CPU, in a dtype that the kernels know.
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
    """The same for weights that are computed as they are stored, where no kernels read these: every pass makes weights of
    those of the experts that it has chosen.

    Args:
        stack: The projection, whose weights stay in the module that holds them.
    """

    def __init__(self, stack: ExpertStack) -> None:
        self._stored = stack.stored()
        self._biases = getattr(stack.module, f"{stack.name}_bias", None)

    def products(self, rows: Tensor, experts: Tensor) -> Tensor:
        """As those of a PackedStack."""
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

"""Takes the weights of experts out of their module, and gives them back on request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.experts import pack_gated, unpack_gated
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.library import KernelLibrary
from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import ExpertStack
from outrider.model import hf


class TakenExperts:
    """Packs the experts of a layer.

    Args:
        module: The module of transformers that holds the experts of a layer.
        library: The kernels.

    Attributes:
        gate_up: Gate and values of each expert in one matrix.
        down: The projection of each expert back to the hidden state.

    Raises:
        ValueError: The experts have other projections than these.
    """

    def __init__(self, module: Any, library: KernelLibrary) -> None:
        stacks = {stack.name: stack for stack in hf.expert_stacks(module)}
        if set(stacks) != {"gate_up_proj", "down_proj"}:
            raise ValueError(f"the kernels do not know experts of {sorted(stacks)}")
        self._library, self._concatenated = library, module.is_concatenated
        self._gate_up, self._down = stacks["gate_up_proj"], stacks["down_proj"]
        self.gate_up, self.down = self._packed_gates(), self._packed_down()

    def empty(self) -> None:
        """Free the weights in the module."""
        for stack in (self._gate_up, self._down):
            stack.empty()

    def give_back(self) -> None:
        """Every weight to its module."""
        size = self.down[0].in_features
        gates = [unpack_gated(self._library, packed, size) for packed in self.gate_up]
        self._gate_up.restore(StoredWeight.of([self._joined(gate, up) for gate, up in gates], torch.stack))
        self._down.restore(StoredWeight.of([packed.unpacked() for packed in self.down], torch.stack))

    def _packed_gates(self) -> list[PackedWeights]:
        stored, biases = self._gate_up.stored(), _biases(self._gate_up)
        packed = []
        for expert in range(len(stored.data)):
            both = stored.expert(expert)
            gate, up = both.each(lambda tensor: self._parted(tensor)[0]), both.each(lambda tensor: self._parted(tensor)[1])
            packed.append(pack_gated(self._library, gate, up, None if biases is None else self._parted(biases[expert])))
        return packed

    def _packed_down(self) -> list[PackedWeights]:
        stored, biases = self._down.stored(), _biases(self._down)
        return [
            PackedWeights(self._library, stored.expert(expert), None if biases is None else biases[expert])
            for expert in range(len(stored.data))
        ]

    def _parted(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """The gate's output features, and those that it is multiplied with. Some families keep them in turn."""
        if not self._concatenated:
            return both[0::2], both[1::2]
        gate, up = both.chunk(2)
        return gate, up

    def _joined(self, gate: StoredWeight, up: StoredWeight) -> StoredWeight:
        def join(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts) if self._concatenated else torch.stack(parts, 1).flatten(0, 1)

        return StoredWeight.of([gate, up], join)


def _biases(stack: ExpertStack) -> Tensor | None:
    """[num_experts, out_features] or None."""
    biases: Tensor | None = getattr(stack.module, f"{stack.name}_bias", None)
    return None if biases is None else biases.detach()

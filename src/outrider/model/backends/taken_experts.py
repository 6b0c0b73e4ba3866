"""The weights of the experts of a layer, taken out of their module and, if need be, given back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.experts import pack_gated, unpack_gated
from outrider.kernels.library import KernelLibrary
from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import ExpertStack, StoredWeight
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
        self._gate_up.restore(_stacked([self._joined(gate, up) for gate, up in gates]))
        self._down.restore(_stacked([packed.unpacked() for packed in self.down]))

    def _packed_gates(self) -> list[PackedWeights]:
        stored, biases = self._gate_up.stored(), _biases(self._gate_up)
        packed = []
        for expert, data in enumerate(stored.data):
            scales = (None, None) if stored.scale is None else self._parted(stored.scale[expert])
            gate, up = (StoredWeight(part, scale) for part, scale in zip(self._parted(data), scales, strict=True))
            packed.append(pack_gated(self._library, gate, up, None if biases is None else self._parted(biases[expert])))
        return packed

    def _packed_down(self) -> list[PackedWeights]:
        stored, biases = self._down.stored(), _biases(self._down)
        return [
            PackedWeights(
                self._library,
                StoredWeight(data, None if stored.scale is None else stored.scale[expert]),
                None if biases is None else biases[expert],
            )
            for expert, data in enumerate(stored.data)
        ]

    def _parted(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """The gate's output features, and those that it is multiplied with. Some families keep them in turn."""
        if not self._concatenated:
            return both[0::2], both[1::2]
        gate, up = both.chunk(2)
        return gate, up

    def _joined(self, gate: StoredWeight, up: StoredWeight) -> StoredWeight:
        def join(first: Tensor, second: Tensor) -> Tensor:
            return torch.cat([first, second]) if self._concatenated else torch.stack([first, second], 1).flatten(0, 1)

        scale = None if gate.scale is None or up.scale is None else join(gate.scale, up.scale)
        return StoredWeight(join(gate.data, up.data), scale)


def _biases(stack: ExpertStack) -> Tensor | None:
    """[num_experts, out_features] or None."""
    biases: Tensor | None = getattr(stack.module, f"{stack.name}_bias", None)
    return None if biases is None else biases.detach()


def _stacked(stored: list[StoredWeight]) -> StoredWeight:
    scales = [weight.scale for weight in stored if weight.scale is not None]
    return StoredWeight(torch.stack([weight.data for weight in stored]), torch.stack(scales) if scales else None)

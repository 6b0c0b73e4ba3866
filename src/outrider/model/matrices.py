"""The weight matrices of decoder layers and experts, packed for the fused decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.kernels.experts import pack_gated, unpack_gated
from outrider.kernels.formats import StoredWeight, plain
from outrider.kernels.library import KernelLibrary
from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import ExpertStack, QuantisedEmbedding, empty_weight, restore_weight, stored_weight
from outrider.loading import hf_modules

# --- Matrices: the weight matrices of decoder layers, packed for the fused decoder.


class Matrices:
    """The weight matrices of decoder layers, taken out of their modules and, if need be, given back."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._taken: list[tuple[list[WeightSlice], PackedWeights]] = []
        self._experts: list[TakenExperts] = []
        self._num_emptied = self._num_emptied_experts = 0
        self._tied: tuple[nn.Embedding, nn.Linear] | None = None

    def tie(self, embeddings: nn.Embedding, head: nn.Linear) -> None:
        """Embeddings share the head's weight, gone or given back."""
        embeddings.weight = head.weight
        if hasattr(embeddings, "quantised_weight"):
            del embeddings.quantised_weight
        if hasattr(head, "quantised_weight") and isinstance(embeddings, QuantisedEmbedding):
            embeddings.quantised_weight = stored(head)
        self._tied = embeddings, head

    def take(self, *parts: WeightSlice) -> PackedWeights:
        """Pack parts of linear layers as one matrix, stacked."""
        pieces = [stored(part.module).rows(part.begin, part.end) for part in parts]
        biases = [b.detach()[p.begin : p.end] for p in parts if (b := getattr(p.module, "bias", None)) is not None]
        own = all(piece.quantised for piece in pieces)  # then they lie in memory that is nobody else's
        packed = PackedWeights(self._library, pieces, torch.cat(biases) if biases else None, consume=own)
        self._taken.append((list(parts), packed))
        return packed

    def take_experts(self, module: Any) -> tuple[list[PackedWeights], list[PackedWeights]]:
        """Pack the experts of a layer: gates and values, and the projections back."""
        taken = TakenExperts(module, self._library)
        self._experts.append(taken)
        return taken.gate_up, taken.down

    def empty(self) -> None:
        """Free the weights taken since the last time, where they came from."""
        for module in {part.module for parts, _ in self._taken[self._num_emptied :] for part in parts}:
            empty_weight(module)
        for experts in self._experts[self._num_emptied_experts :]:
            experts.empty()
        self._num_emptied, self._num_emptied_experts = len(self._taken), len(self._experts)

    def give_back(self) -> None:
        """Every weight to its module."""
        found: dict[Any, dict[int, StoredWeight]] = {}
        for parts, packed in self._taken:
            rest = iter(parts)
            piece: PackedWeights | None = packed
            while piece is not None:
                both, end = piece.unpacked(), 0
                while end < piece.own_outputs:
                    part = next(rest)
                    start, end = end, end + part.end - part.begin
                    found.setdefault(part.module, {})[part.begin] = both.rows(start, end)
                piece = piece.tail
        for module, by_begin in found.items():
            restore(module, StoredWeight.of([by_begin[begin] for begin in sorted(by_begin)]))
        self._taken.clear()
        for experts in self._experts:
            experts.give_back()
        self._experts.clear()
        if self._tied:
            self.tie(*self._tied)


# --- Takes the weights of experts out of their module, and gives them back on request.


class TakenExperts:
    """Packs the experts of a layer.

    Attributes:
        gate_up: Gate and values of each expert in one matrix.
        down: The projection of each expert back to the hidden state.
    """

    def __init__(self, module: Any, library: KernelLibrary) -> None:
        stacks = {stack.name: stack for stack in hf_modules.expert_stacks(module)}
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


# --- Slices of linear layers, which the kernels stack as they need them.


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
    if isinstance(module, hf_modules.TRANSPOSED_LINEARS):
        return plain(module.weight.data.t())
    return stored_weight(module)


def restore(module: Any, stored: StoredWeight) -> None:
    if isinstance(module, hf_modules.TRANSPOSED_LINEARS):
        stored = stored.each(lambda weight: weight.t().contiguous())
    restore_weight(module, stored)

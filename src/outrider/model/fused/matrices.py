"""Matrices: the weight matrices of decoder layers, packed for the fused decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.library import KernelLibrary
from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import QuantisedEmbedding, empty_weight
from outrider.model.fused.taken_experts import TakenExperts
from outrider.model.fused.weight_slice import WeightSlice, restore, stored


class Matrices:
    """The weight matrices of decoder layers, taken out of their modules and, if need be, given back.

    Args:
        library: The kernels of this processor.
    """

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

"""Experts of quantised checkpoints, which keep each projection of each expert as a matrix of its own."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch import nn

from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.weights import ExpertStack
from outrider.model import hf
from outrider.model.loading.expert_parts import joined_parts, part_shape
from outrider.model.loading.quantised.layout import check

#: The names of matrices of an expert, gate, values and back, and what the module of experts is called, here and there.
_NAMES = (
    (("gate_proj", "up_proj", "down_proj"), ("", "")),
    (("w1", "w3", "w2"), (".mlp.", ".block_sparse_moe.")),
)


@dataclass(frozen=True)
class QuantisedExperts:
    """One projection of all experts of a layer.

    Attributes:
        name: transformers' name of the tensor.
        stack: The tensor.
        parts: For each part of the projection the paths of its matrices in the files, expert by expert.
    """

    name: str
    stack: ExpertStack
    parts: list[list[str]]

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features] of each matrix."""
        _, rows, cols = part_shape(self.stack)
        return rows, cols

    def fill(self, read: Callable[[str], StoredWeight]) -> None:
        """Give the tensor its matrices, which `read` reads by their paths.

        Raises:
            MisshapenError: The matrices cannot be kept together.
        """
        found = [[read(path) for path in paths] for paths in self.parts]
        every = [stored for part in found for stored in part]
        check(all(stored.format == every[0].format for stored in every), "its matrices have scales of different types")
        check(all(stored.order is None for stored in every), "experts with an order of inputs of their own are not known")
        parts = [StoredWeight.of(part, torch.stack) for part in found]
        whole = StoredWeight.of(parts, lambda tensors: joined_parts(self.stack, tensors))
        if whole.quantised:
            self.stack.keep(whole)
        else:
            self.stack.restore(whole)


def quantised_experts(model: nn.Module, matrices: Container[str]) -> list[QuantisedExperts]:
    """The projections of experts of a model that are among the quantised matrices of a checkpoint, given by their paths."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = []
    for stack in hf.expert_stacks(model):
        path = paths[id(stack.module)]
        for (*gates, down), renamed in _NAMES:
            names = gates if stack.name == "gate_up_proj" else [down]
            count = part_shape(stack)[0]
            parts = [[f"{path.replace(*renamed)}.{number}.{name}" for number in range(count)] for name in names]
            if parts[0][0] in matrices:
                found.append(QuantisedExperts(f"{path}.{stack.name}", stack, parts))
                break
    return found

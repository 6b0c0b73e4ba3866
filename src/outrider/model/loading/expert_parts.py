"""The parts that files keep of projections which transformers has as one: gates and values of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.weights import ExpertStack


def num_parts(stack: ExpertStack) -> int:
    """How many parts files keep of a projection: gates and values are two."""
    return 2 if stack.name == "gate_up_proj" else 1


def part_shape(stack: ExpertStack) -> tuple[int, int, int]:
    """[num_experts, out_features, in_features] of each part."""
    count, first, second = getattr(stack.module, stack.name).shape
    rows, cols = (second, first) if stack.transposed else (first, second)
    return count, rows // num_parts(stack), cols


def joined_parts(stack: ExpertStack, parts: list[Tensor]) -> Tensor:
    """Parts [num_experts, rows, ...] as the rows of one matrix for each expert. Some families keep them in turn."""
    if stack.module.is_concatenated:
        return torch.cat(parts, 1)
    return torch.stack(parts, 2).flatten(1, 2)

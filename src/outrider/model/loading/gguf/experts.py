"""The projections of experts, of which GGUF files keep gates and values apart, and transformers together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.errors import UnsupportedModelError
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.weights import ExpertStack
from outrider.model import hf
from outrider.model.loading.expert_parts import joined_parts, num_parts, part_shape
from outrider.model.loading.gguf.blocks import is_packed, stored_tensor
from outrider.model.loading.gguf.header import GgufTensor
from outrider.model.loading.gguf.values import ORIGINAL


@dataclass(frozen=True)
class Projection:
    """One projection of all experts of a layer, and its parts in a file, which are named by their numbers.

    Attributes:
        name: transformers' name of the tensor.
        stack: The tensor.
    """

    name: str
    stack: ExpertStack

    @property
    def parts(self) -> list[str]:
        """The names of its parts."""
        return [f"{self.name}[{part}]" for part in range(num_parts(self.stack))]

    @property
    def bias_parts(self) -> list[str]:
        """The names of the parts of its biases."""
        return [f"{self.name}_bias[{part}]" for part in range(num_parts(self.stack) if self._has_bias else 0)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a file has to hold: [num_experts, out_features, in_features] each, and [num_experts, out_features]."""
        count, rows, cols = part_shape(self.stack)
        found: dict[str, tuple[int, ...]] = dict.fromkeys(self.parts, (count, rows, cols))
        return found | dict.fromkeys(self.bias_parts, (count, rows))

    def state(self, path: str, tensors: Mapping[str, GgufTensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """What transformers loads: floats, and an empty tensor for blocks.

        Raises:
            UnsupportedModelError: Parts have different types.
        """
        parts = [tensors[name] for name in self.parts]
        if len({part.type for part in parts}) > 1:
            types = " and ".join(f"{part.name} as {part.type}" for part in parts)
            problem = f"it has {types}, and the kernels take gates and values of experts of one type"
            raise UnsupportedModelError(path, problem, ORIGINAL)
        weight = getattr(self.stack.module, self.stack.name)
        if is_packed(parts[0]):
            found = {self.name: torch.full((), float("nan"), dtype=dtype).expand(weight.shape)}
        else:
            floats = self._joined([part.floats() for part in parts])
            found = {self.name: floats.transpose(1, 2).contiguous() if self.stack.transposed else floats}
        if self._has_bias:
            found[f"{self.name}_bias"] = self._joined([tensors[name].floats() for name in self.bias_parts])
        return found

    def fill(self, path: str, tensors: Mapping[str, GgufTensor], dtype: torch.dtype) -> None:
        """Give the tensor its blocks, if it has some.

        Raises:
            ModelLoadError: Numbers are not finite.
        """
        parts = [tensors[name] for name in self.parts]
        if is_packed(parts[0]):
            stored = [stored_tensor(path, part, dtype) for part in parts]
            self.stack.keep(StoredWeight.of(stored, self._joined))

    @property
    def _has_bias(self) -> bool:
        return hasattr(self.stack.module, f"{self.stack.name}_bias")

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return joined_parts(self.stack, parts)


def projections(model: nn.Module) -> list[Projection]:
    """Those of all layers of a model."""
    paths = {id(module): path for path, module in model.named_modules()}
    return [Projection(f"{paths[id(stack.module)]}.{stack.name}", stack) for stack in hf.expert_stacks(model)]

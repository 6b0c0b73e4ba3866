"""The weights of linear layers as the kernels take them: as they were loaded, or quantised.

Only weights are int8. A row of weights is a row of whole numbers times one scale, symmetric around zero. The weight of a
quantised layer *is* that product, and the model that is decoded losslessly is the quantised one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.kernels.pages import release
from outrider.kernels.rounding import parts, rounded, unrounded


class StoredWeight(NamedTuple):
    """The numbers that a product with a layer's weight reads.

    Attributes:
        data: [out_features, in_features], int8 where there is a scale. Weights of experts have [num_experts] before that.
        scale: [out_features] or None. [num_experts, out_features] for experts.
    """

    data: Tensor
    scale: Tensor | None


def stored_weight(module: nn.Linear) -> StoredWeight:
    """The weight of a layer as it is stored."""
    return getattr(module, "quantised_weight", None) or StoredWeight(module.weight.data, None)


class ExpertStack(NamedTuple):
    """One projection of all experts of a layer.

    Attributes:
        module: The module that holds it.
        name: The name of the parameter, [num_experts, out_features, in_features].
        transposed: Whether the last two dimensions are the other way round.
    """

    module: Any
    name: str
    transposed: bool

    def stored(self) -> StoredWeight:
        """Its weights as they are stored."""
        kept = getattr(self.module, "quantised_stacks", {})
        return kept.get(self.name) or StoredWeight(self._turned(getattr(self.module, self.name).data), None)

    def quantise(self) -> None:
        """Round its weights to int8, with a scale for each output feature of each expert."""
        weight = self._turned(getattr(self.module, self.name).data)
        rounded = [_rounded(expert) for expert in weight]  # one after another, since float32 copies of all might not fit
        for expert, stored in zip(weight, rounded, strict=True):
            expert.copy_(_product(stored, weight.dtype))
        if weight.dtype in (torch.float32, torch.bfloat16):
            self._keep(StoredWeight(*(torch.stack(list(parts)) for parts in zip(*rounded, strict=True))))

    def empty(self) -> None:
        """Free its weights, and keep the shape and the dtype."""
        weight = getattr(self.module, self.name)
        nothing = torch.full((), float("nan"), dtype=weight.dtype).expand(weight.shape)
        release(weight.data)
        setattr(self.module, self.name, nn.Parameter(nothing, requires_grad=False))
        getattr(self.module, "quantised_stacks", {}).pop(self.name, None)

    def restore(self, stored: StoredWeight) -> None:
        """Give it its weights back."""
        dtype = getattr(self.module, self.name).dtype
        data = stored.data if stored.scale is None else _product(stored, dtype)
        setattr(self.module, self.name, nn.Parameter(self._turned(data).contiguous(), requires_grad=False))
        if stored.scale is not None:
            self._keep(stored)

    def _turned(self, weight: Tensor) -> Tensor:
        return weight.transpose(1, 2) if self.transposed else weight

    def _keep(self, stored: StoredWeight) -> None:
        self.module.__dict__.setdefault("quantised_stacks", {})[self.name] = stored


class QuantisedLinear(nn.Linear):
    """nn.Linear with rounded weights, for where no kernels read these: every pass computes the product anew, some rows of
    the weights at a time.

    So a model is never in memory both as it was and rounded. `weight` keeps its shape and dtype, but holds no numbers.
    """

    quantised_weight: StoredWeight

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        data, scale = self.quantised_weight
        assert scale is not None, "quantised weights have scales"
        outputs = [
            nn.functional.linear(
                input,
                unrounded(data[rows], scale[rows], self.weight.dtype),
                None if self.bias is None else self.bias[rows],
            )
            for rows in parts(data)
        ]
        return torch.cat(outputs, -1)


def quantise_linears(model: nn.Module, stacks: Iterable[ExpertStack] = ()) -> None:
    """Round the weights of every linear layer to int8, those of the head too. Embeddings stay as they are.

    Args:
        model: The model, which is changed in place.
        stacks: The projections of its experts, which are no layers of their own. They are rounded, too.
    """
    for stack in stacks:
        stack.quantise()
    for module in model.modules():
        if type(module) is nn.Linear:
            dtype = module.weight.dtype
            stored = _rounded(module.weight.data)
            # The layer gets a parameter of its own, so that a head is quantised without the embeddings that are tied to it.
            if dtype not in (torch.float32, torch.bfloat16) or module.weight.device.type != "cpu":
                # These are computed in their own precision, or without our kernels.
                module.weight = nn.Parameter(_product(stored, dtype), requires_grad=False)
            else:
                empty_weight(module)
                module.__class__ = QuantisedLinear
                module.quantised_weight = stored  # type: ignore[assignment]


def empty_weight(module: nn.Linear) -> None:
    """Free the weight of a layer, but not a weight that is tied to it.

    The shape and the dtype stay. There are no numbers left, so that a use of them is noticed.
    """
    nothing = torch.full((), float("nan"), dtype=module.weight.dtype).expand(module.weight.shape)
    release(module.weight.data)
    module.weight = nn.Parameter(nothing, requires_grad=False)
    if hasattr(module, "quantised_weight"):
        del module.quantised_weight


def restore_weight(module: nn.Linear, stored: StoredWeight) -> None:
    """Give a layer its weight back."""
    if stored.scale is None:
        module.weight = nn.Parameter(stored.data, requires_grad=False)
    else:
        module.quantised_weight = stored  # type: ignore[assignment]


def _rounded(weight: Tensor) -> StoredWeight:
    return StoredWeight(*rounded(weight))


def _product(stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    assert stored.scale is not None, "quantised weights have scales"
    return unrounded(stored.data.flatten(0, -2), stored.scale.flatten(), dtype).view(stored.data.shape)

"""Weights of linear layers on their way to the kernels: as loaded, or quantised, and back.

Int8 is weight-only: a row of weights is whole numbers times one scale, symmetric around zero. A quantised layer's weight
*is* that product; the model that is then decoded losslessly is the quantised one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class StoredWeight(NamedTuple):
    """What a product with a layer's weight reads.

    Attributes:
        data: [out_features, in_features], int8 where there is a scale.
        scale: [out_features] or None.
    """

    data: Tensor
    scale: Tensor | None


def stored_weight(module: nn.Linear) -> StoredWeight:
    """The weight of a layer as it is stored."""
    return getattr(module, "quantised_weight", None) or StoredWeight(module.weight.data, None)


def quantise_linears(model: nn.Module) -> None:
    """Replace the weights of every linear layer by their int8 neighbours, the head's too; embeddings stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            dtype = module.weight.dtype
            stored = _rounded(module.weight.data)
            # A parameter of its own: a head tied to the embeddings is quantised alone.
            module.weight = nn.Parameter(_product(stored, dtype), requires_grad=False)
            if dtype in (torch.float32, torch.bfloat16):  # others are computed in their own precision
                module.quantised_weight = stored  # type: ignore[assignment]


def empty_weight(module: nn.Linear) -> None:
    """Free a layer's weight, but for others it is tied to. Shape and dtype stay; the numbers are none, so that a use
    shows."""
    nothing = torch.full((), float("nan"), dtype=module.weight.dtype).expand(module.weight.shape)
    module.weight = nn.Parameter(nothing, requires_grad=False)
    if hasattr(module, "quantised_weight"):
        del module.quantised_weight


def restore_weight(module: nn.Linear, stored: StoredWeight) -> None:
    """Give a layer its weight back."""
    if stored.scale is None:
        module.weight = nn.Parameter(stored.data, requires_grad=False)
    else:
        module.weight = nn.Parameter(_product(stored, module.weight.dtype), requires_grad=False)
        module.quantised_weight = stored  # type: ignore[assignment]


def _rounded(weight: Tensor) -> StoredWeight:
    wide = weight.to(torch.float32)
    scale = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return StoredWeight((wide / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale)


def _product(stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    assert stored.scale is not None, "quantised weights have scales"
    return (stored.data.to(torch.float32) * stored.scale[:, None]).to(dtype)

"""Finds the weights on account of which a model's logits are no numbers, or all the same.

All weights are read only where the logits of the probe's own pass are already known to be wrong, so loading a sound
checkpoint takes no longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelLoadError

#: Dtypes in which a number overflows that float32 would hold.
_NARROW = (torch.float16,)


def check_numbers(name: str, model: Any, logits: Tensor) -> None:
    """Refuse a model whose logits cannot be told apart from anything.

    Args:
        name: Path or hub id.
        model: The stock model.
        logits: [..., vocab_size] of some texts.

    Raises:
        ModelLoadError: They are NaN or infinite, or all zero. The error names the weight that makes them so.
    """
    if not bool(logits.isfinite().all()):
        raise ModelLoadError(name, *_not_finite(model))
    if not bool(logits.any()):
        raise ModelLoadError(name, *_all_zero(model))


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The names of floating weights with their numbers, or those that rounded ones stand for."""
    quantised = {}
    for name, module in model.named_modules():
        if hasattr(module, "quantised_weight"):
            stored = module.quantised_weight
            quantised[f"{name}.weight"] = partial(stored.format.dequantise, stored, module.weight.dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        numbers = quantised[name]() if name in quantised else tensor
        if numbers.is_floating_point() and numbers.numel():
            yield name, numbers


def _not_finite(model: Any) -> tuple[str, str]:
    """What makes logits that are no numbers, and what would help."""
    again = "Download or save the checkpoint again."
    dtype = str(model.dtype).removeprefix("torch.")
    wider = f"Use dtype='float32', which holds larger numbers than {dtype}, or download or save the checkpoint again."
    overflow = wider if model.dtype in _NARROW else again
    for name, numbers in _weights(model):
        if bool(numbers.isnan().any()):
            return f"its weight {name} holds NaN, so its logits are no numbers", again
        if bool(numbers.isinf().any()):
            return f"its weight {name} is infinite in {dtype}, so its logits are no numbers", overflow
    name, size = _largest(model)
    return f"its logits overflow in {dtype}; the largest of its weights is {size:.1e}, in {name}", overflow


def _all_zero(model: Any) -> tuple[str, str]:
    """What makes all logits zero, and what would help."""
    weights = [found for found in _weights(model) if not found[0].endswith("bias")]
    zero = [(name, numbers) for name, numbers in weights if not bool(numbers.any())]
    remedy = "Download or save the checkpoint again."
    if zero:
        name, _ = max(zero, key=lambda found: found[1].numel())  # a matrix sooner than the factors of a norm
        return f"its weight {name} is all zero, so its logits are all zero", remedy
    name, size = _largest(model)
    return f"its logits are all zero; the largest of its weights is {size:.1e}, in {name}", remedy


def _largest(model: Any) -> tuple[str, float]:
    sizes = ((name, float(numbers.abs().max())) for name, numbers in _weights(model))
    return max(sizes, key=lambda found: found[1])

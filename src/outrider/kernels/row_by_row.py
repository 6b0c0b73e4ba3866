"""Matrix products whose bits do not depend on the number of rows that are computed together.

Libraries sum in another order for another number of rows. So the last bits of a token's logits depend on the batch, the
chunk and the draft that the token is computed in. Under `RowByRow`, every product of rows with a weight is computed one
row at a time. The call and the shapes are always the same, and so are the bits. It reads the weights once for every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class RowByRow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this mode is entered, products of rows with weights are computed one row at a time.

    It works under inference mode only, where the composite operators that models call are not split before they arrive
    here.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _each(rows: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `product` to every row [1, in] of [n, in], one after another."""
    if not len(rows):  # a pass that holds only prefill chunks asks for no logits
        return product(rows)
    # Each row is copied, since its address in memory must not matter either.
    return torch.cat([product(row[None].clone()) for row in rows])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = _each(x.reshape(x.shape[:-1].numel(), x.shape[-1]), lambda row: _aten.linear(row, weight, bias))
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _mm(x: Tensor, weight: Tensor) -> Tensor:
    return _each(x, lambda row: _aten.mm(row, weight))


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, **scales: Any) -> Tensor:
    return _each(x, lambda row: _aten.addmm(bias, row, weight, **scales))


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() != 2 or x.dim() < 2:  # a product of two activations, as rotary embeddings have it
        result: Tensor = _aten.matmul(x, weight)
        return result
    return _mm(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[-1])


def _grouped_mm(
    x: Tensor,  # [num_rows, in], sorted by expert
    weight: Tensor,  # [num_experts, in, out]
    offs: Tensor | None = None,  # [num_experts] end of each expert's rows
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    assert offs is not None, "the form that mixtures of experts use"
    assert bias is None, "the form that mixtures of experts use"
    experts = torch.searchsorted(offs, torch.arange(len(x), device=x.device, dtype=offs.dtype), right=True)
    if not len(x):
        return x.new_empty(0, weight.shape[-1])
    out = torch.cat([_aten.mm(row[None].clone(), weight[e]) for row, e in zip(x, experts.tolist(), strict=True)])
    return out if out_dtype is None else out.to(out_dtype)


_HANDLERS: dict[Any, Callable[..., Tensor]] = {
    _aten.linear.default: _linear,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.matmul.default: _matmul,
}
if hasattr(_aten, "_grouped_mm"):
    _HANDLERS[_aten._grouped_mm.default] = _grouped_mm

"""Matrix products whose bits do not depend on how many rows they are computed with.

Libraries choose another order of summation for another number of rows, so a token's logits differ in their last bits with
the batch, the chunk and the draft it is computed in. Under `RowByRow` every product that mixes a row with a weight is
computed one row at a time: the same call, the same shapes, hence the same bits. It costs a pass over the weights a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class RowByRow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, products of rows with weights are computed a row at a time, under inference mode only: there the
    composite operators that models call arrive here whole."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _each(rows: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """`product` of every row [1, in] of [n, in], one after another."""
    if not len(rows):  # a pass of prefill chunks alone asks for no logits
        return product(rows)
    # A fresh copy of each row: where a row lies in memory may not matter either.
    return torch.cat([product(row[None].clone()) for row in rows])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = _each(x.reshape(x.shape[:-1].numel(), x.shape[-1]), lambda row: _aten.linear(row, weight, bias))
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _mm(x: Tensor, weight: Tensor) -> Tensor:
    return _each(x, lambda row: _aten.mm(row, weight))


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, **scales: Any) -> Tensor:
    return _each(x, lambda row: _aten.addmm(bias, row, weight, **scales))


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() != 2 or x.dim() < 2:  # a product of activations among themselves, as rotary embeddings make
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

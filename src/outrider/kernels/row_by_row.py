"""Operators whose bits do not depend on the number of rows that are computed together.

Libraries sum products in another order for another number of rows. Functions of single numbers, such as SiLU, are computed
by one formula in whole vectors and by another one in what is left over at the end, and where the end is depends on the
number of rows. So the last bits of a token's logits depend on the batch, the chunk and the draft that the token is computed
in. Under `RowByRow` both have one way:

- Every product of rows with a weight is computed one row at a time. The call and the shapes are always the same, and so are
  the bits. It reads the weights once for every row.
- Functions of single numbers are computed in whole vectors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
#: Numbers that the widest loops of PyTorch take at once.
_VECTORS = 64
#: Numbers that PyTorch computes in one thread, whatever number of threads it has.
_PIECE = 32_704
_NARROW = (torch.bfloat16, torch.float16)


class RowByRow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this mode is entered, what depends on the number of rows is computed in a way that does not.

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


class NotedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `note` for every operator that `RowByRow` computes in another way, with its first operand and the bytes of the
    weight that it reads.

    For products of which it knows no other way, the number is infinite. While this mode is entered, nothing is computed in
    another way.
    """

    def __init__(self, note: Callable[[Tensor, float], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS:
            operands = [arg for arg in args if isinstance(arg, Tensor)]
            if _has_sums(operands):
                self._note(operands[0], max(operand.nbytes for operand in operands))
        elif func in _OTHER_PRODUCTS:
            self._note(torch.empty(0), float("inf"))
        elif func in _HANDLERS and not _is_exact(func, args):
            self._note(args[0], 0)
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
    if x.dim() < 2 or weight.dim() < 2:
        result: Tensor = _aten.matmul(x, weight)
        return result
    if weight.dim() > 2:
        return _each_of_many(x, weight, _aten.matmul)
    return _mm(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[-1])


def _bmm(x: Tensor, weight: Tensor) -> Tensor:
    return _each_of_many(x, weight, _aten.bmm)


def _each_of_many(x: Tensor, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Products of x [..., n, in] and a weight [..., in, out], one row of each x at a time."""
    if x.shape[-1] == 1 or not x.shape[-2]:  # no sums, as in rotary embeddings
        return product(x, weight)
    return torch.cat([product(row.clone(), weight) for row in torch.split(x, 1, -2)], -2)


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


def _has_sums(operands: list[Tensor]) -> bool:
    """Tells whether a product of matrices adds up more than one term."""
    matrices = [operand for operand in operands if operand.dim() > 1]
    return len(matrices) > 1 and matrices[0].shape[-1] > 1


def _is_exact(func: Any, args: tuple[Any, ...]) -> bool:
    """Tells whether a function of single numbers has the same bits anyway: small powers are products, and roots are rounded
    correctly where they are not rounded twice."""
    if func in (_aten.pow.Tensor_Scalar, _aten.pow_.Scalar):
        return args[1] in (1, 2, 3)
    return func in (_aten.rsqrt.default, _aten.rsqrt_.default) and args[0].dtype not in _NARROW


def fills_vectors(x: Tensor) -> bool:
    """Tells whether a function of single numbers computes all of `x` in whole vectors and in one thread anyway."""
    return x.numel() <= _PIECE and not x.numel() % _VECTORS and x.is_contiguous() and not x.data_ptr() % _VECTORS


def _in_vectors(func: Any) -> Callable[..., Tensor]:
    """A function of single numbers over whole vectors, which one thread computes."""

    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not x.is_floating_point() or _is_exact(func, (x, *args)):
            return cast(Tensor, func(x, *args, **kwargs))
        if fills_vectors(x):
            return cast(Tensor, func(x, *args, **kwargs))
        flat = x.reshape(-1)  # in the order of its indices, whatever its strides are
        missing = -len(flat) % _VECTORS
        if missing or flat.data_ptr() % _VECTORS:
            flat = torch.cat([flat, flat.new_ones(missing)])
        if len(flat) <= _PIECE:
            out: Tensor = func(flat, *args, **kwargs)
        else:
            out = torch.cat([func(piece, *args, **kwargs) for piece in torch.split(flat, _PIECE)])
        return out[: x.numel()].view(x.shape)

    return compute


def _in_place(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def change(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(compute(x, *args, **kwargs))

    return change


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _aten.linear.default: _linear,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.matmul.default: _matmul,
    _aten.bmm.default: _bmm,
}
if hasattr(_aten, "_grouped_mm"):
    _PRODUCTS[_aten._grouped_mm.default] = _grouped_mm

#: Products whose rows may be anywhere in their operands.
_OTHER_PRODUCTS = {
    _aten.einsum.default, _aten.baddbmm.default, _aten.addbmm.default, _aten.tensordot.default, _aten.mv.default,
    _aten.convolution.default, _aten.conv1d.default, _aten.scaled_dot_product_attention.default,
}  # fmt: skip

#: Functions of single numbers which are not rounded correctly, so that two formulas give two results.
_FUNCTIONS = (
    "silu", "gelu", "tanh", "sigmoid", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "mish", "cos", "sin",
    "elu", "rsqrt", "softplus",
)  # fmt: skip
_HANDLERS: dict[Any, Callable[..., Tensor]] = dict(_PRODUCTS)
for _name in _FUNCTIONS:
    _function = getattr(_aten, _name).default
    _HANDLERS[_function] = _in_vectors(_function)
    if hasattr(_aten, f"{_name}_"):
        _HANDLERS[getattr(_aten, f"{_name}_").default] = _in_place(_HANDLERS[_function])
_HANDLERS[_aten.pow.Tensor_Scalar] = _in_vectors(_aten.pow.Tensor_Scalar)
_HANDLERS[_aten.pow_.Scalar] = _in_place(_HANDLERS[_aten.pow.Tensor_Scalar])

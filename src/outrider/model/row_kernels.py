"""Lets the norms and rotary embeddings of a transformers model run in one kernel each on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from outrider.kernels.triton.devices import KNOWN_DTYPES, runs_on
from outrider.model.context import ongoing_context

# Families write their norms and embeddings down each for itself. So a module or function is not known by its name alone:
# it is tried on random rows, and replaced where a kernel leaves the same numbers.

#: Heads, key-value heads, rows and numbers of a head of the rows that an embedding is tried on.
_TRIED_HEADS = (4, 2, 3, 16)
#: The share of numbers of two bytes that may be rounded to a neighbour, since sums are taken in another order.
_ROUNDED_OTHERWISE = 0.01


class RowKernels:
    """Replaces what a kernel computes in a model, until it is removed."""

    def __init__(self, model: nn.Module) -> None:
        self._replaced: list[nn.Module] = []
        forms: dict[tuple[Any, ...], Any] = {}
        for module in filter(_may_be_norm, model.modules()):
            kind = type(module), module.weight.dtype
            if kind not in forms:
                forms[kind] = _norm_form(module)
            if forms[kind] is not None:
                module.forward = _Norm(module, forms[kind])
                self._replaced.append(module)
        for name in {type(module).__module__ for module in model.modules()}:
            _answer_rotations(sys.modules[name], next(model.parameters()))

    def remove(self) -> None:
        """Let the modules compute as before."""
        for module in self._replaced:
            del module.forward


class _Norm:
    """A norm's forward by the kernel."""

    def __init__(self, module: Any, form: Any) -> None:
        from outrider.kernels.triton.rows import rms_norm  # which imports Triton

        self._module, self._form, self._eps, self._norm = module, form, _eps(module), rms_norm

    def __call__(self, rows: Tensor) -> Tensor:
        weight = self._module.weight
        if rows.dtype != weight.dtype:
            return type(self._module).forward(self._module, rows)  # type: ignore[no-any-return]
        return self._norm(rows, weight, self._eps, self._form)


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _may_be_norm(module: nn.Module) -> bool:
    weights = dict(module.named_parameters(recurse=False))
    return (
        type(module).__name__.endswith("RMSNorm")
        and weights.keys() == {"weight"}
        and weights["weight"].dim() == 1
        and weights["weight"].dtype in KNOWN_DTYPES
        and isinstance(_eps(module), float)
    )


@torch.inference_mode()
def _norm_form(module: Any) -> Any:
    """The form in which a norm multiplies with its weight; None where it computes something else."""
    from outrider.kernels.triton.rows import NormForm, rms_norm

    weight = module.weight
    rows, other = _random((3, len(weight)), weight), _random((len(weight),), weight)
    try:
        want = functional_call(module, {"weight": other}, (rows,))
    except Exception:  # it is called in another way
        return None
    return next((form for form in NormForm if _alike(rms_norm(rows, other, _eps(module), form), want)), None)


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return numbers.to(like.device, like.dtype)


def _alike(got: Any, want: Any) -> bool:
    if not isinstance(want, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    rounding = 4 * torch.finfo(want.dtype).eps
    close = torch.allclose(got.float(), want.float(), rtol=rounding, atol=rounding / 100)
    return close and (want.dtype == torch.float32 or float((got != want).float().mean()) <= _ROUNDED_OTHERWISE)


def _answer_rotations(namespace: Any, like: Tensor) -> None:
    """Let the function of a module of transformers that turns queries and keys use the kernel within our passes, once."""
    stock = getattr(namespace, "apply_rotary_pos_emb", None)
    if stock is None or hasattr(stock, "has_kernel") or like.dtype not in KNOWN_DTYPES:
        return
    namespace.apply_rotary_pos_emb = _rotation(stock, is_known=_is_known_rotation(stock, like))


@torch.inference_mode()
def _is_known_rotation(stock: Callable[..., Any], like: Tensor) -> bool:
    from outrider.kernels.triton.rows import rotate

    heads, kv_heads, num_rows, dim = _TRIED_HEADS
    query, key = _random((1, heads, num_rows, dim), like), _random((1, kv_heads, num_rows, dim), like)
    cos, sin = _random((2, 1, num_rows, dim), like)
    try:
        want = stock(query, key, cos, sin)
        return all(map(_alike, rotate(query, key, cos, sin), want))
    except Exception:  # it is called in another way
        return False


def _rotation(stock: Callable[..., Any], *, is_known: bool) -> Callable[..., Any]:
    @wraps(stock)
    def rotation(*args: Any, **kwargs: Any) -> Any:
        if is_known and len(args) == 4 and not kwargs and ongoing_context() is not None and runs_on(args[0].device):
            from outrider.kernels.triton.rows import rotate, rotates

            if rotates(*args):
                return rotate(*args)
        return stock(*args, **kwargs)

    rotation.has_kernel = is_known  # type: ignore[attr-defined]
    return rotation

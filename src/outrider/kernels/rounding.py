"""Rounds weights to whole numbers with a scale for each row or group, and makes weights of what was rounded.

Kernels round rows in one sweep with all threads. Where there are none, and for other dtypes and layouts, PyTorch's
operators give the same bits. The scale of a group is found by a small search: it is the one of a few candidates that leaves
the least squared error.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from outrider.kernels.library import KernelLibrary, kernel_library

#: The numbers of a matrix that are converted at a time, so that their copies stay in the caches.
_AT_ONCE = 2**20
#: The numbers of a matrix whose scales are searched for at a time.
_SEARCHED_AT_ONCE = 2**18
#: The least scale. Products with less would be below the normal numbers.
_LEAST_SCALE = float(torch.finfo(torch.bfloat16).tiny)
#: What the scale that cuts nothing off is divided by. Above 1 the largest weights are cut off, and the others gain.
_STRETCHES = (1.0, 0.9, 0.95, 1.03, 1.07, 1.14, 1.21, 1.32)
_I64 = ctypes.c_int64


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix.

    Args:
        weight: [out_features, in_features] of any floating dtype.

    Returns:
        int8 [out_features, in_features] and float32 [out_features]. Their product is the nearest to the weights that
        whole numbers of -127 to 127 and this scale can give, and the scale is the least without overflow.
    """
    data = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    library = _library_for(weight)
    if library is not None:
        _run("round_weights", library, weight, data, scale)
        return data, scale
    for rows in parts(weight):  # float32 copies of all rows might not fit
        wide = weight[rows].to(torch.float32)
        scale[rows] = wide.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / 127
        data[rows] = (wide / scale[rows, None]).round_().clamp_(-127, 127)
    return data, scale


def unrounded(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights that were rounded: whole numbers times scales, rounded to `dtype`.

    Args:
        data: int8 [out_features, in_features]
        scale: float32 [out_features]
    """
    weight = torch.empty(data.shape, dtype=dtype, device=data.device)
    library = _library_for(weight) if data.is_contiguous() and scale.is_contiguous() else None
    if library is not None:
        _run("unround_weights", library, weight, data, scale)
        return weight
    for rows in parts(data):
        weight[rows] = data[rows].to(torch.float32).mul_(scale[rows, None])
    return weight


def rounded_in_groups(weight: Tensor, group: int, most: int, *, least: int | None = None) -> tuple[Tensor, Tensor]:
    """Round a matrix with a scale for each group of inputs.

    Args:
        weight: [out_features, in_features] of any floating dtype.
        group: The inputs that share a scale. It divides their number.
        most, least: The largest and the smallest whole number; None for -most.

    Returns:
        int8 [out_features, in_features] and bfloat16 [out_features, groups].
    """
    shape = (len(weight), weight.shape[1] // group)
    data = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
    for rows in parts(weight, _SEARCHED_AT_ONCE):
        wide = weight[rows].to(torch.float32).view(-1, shape[1], group)
        best = _Best(wide, wide.abs().amax(-1, keepdim=True) / most, None, -most if least is None else least, most)
        for stretch in _STRETCHES[1:]:
            best.try_scale(best.first_scale / stretch)
        best.try_scale(best.fitted_scale())
        data[rows], scale[rows] = best.numbers.flatten(1).to(torch.int8), best.scale[..., 0].to(torch.bfloat16)
    return data, scale


def rounded_from_zero_points(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix to numbers of 0 to 15 with a scale and a zero point for each group of inputs.

    Args:
        weight: [out_features, in_features] of any floating dtype.
        group: The inputs that share both. It divides their number.

    Returns:
        uint8 [out_features, in_features], bfloat16 [out_features, groups] and uint8 [out_features, groups].
    """
    shape = (len(weight), weight.shape[1] // group)
    data = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
    zero = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    for rows in parts(weight, _SEARCHED_AT_ONCE):
        wide = weight[rows].to(torch.float32).view(-1, shape[1], group)
        low, high = wide.amin(-1, keepdim=True).clamp_max_(0) / 15, wide.amax(-1, keepdim=True).clamp_min_(0) / 15
        best = _Best(wide, high - low, low, 0, 15)
        for stretch in _STRETCHES[1:]:
            best.try_scale(best.first_scale / stretch)
        data[rows], scale[rows] = best.numbers.flatten(1).to(torch.uint8), best.scale[..., 0].to(torch.bfloat16)
        zero[rows] = best.zero[..., 0].to(torch.uint8)
    return data, scale, zero


def unrounded_groups(data: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weights that were rounded in groups: whole numbers less zero points, times scales, rounded to `dtype`.

    Args:
        data: Whole numbers [out_features, in_features].
        scale: [out_features, groups]
        zero: [out_features, groups], or None where nothing is subtracted.
    """
    weight = torch.empty(data.shape, dtype=dtype, device=data.device)
    for rows in parts(data):
        wide = data[rows].to(torch.float32).view(-1, scale.shape[1], data.shape[1] // scale.shape[1])
        if zero is not None:
            wide -= zero[rows, :, None]
        weight[rows] = wide.mul_(scale[rows, :, None]).flatten(1)
    return weight


class _Best:
    """The best rounding so far of groups of weights [rows, groups, group], in float32."""

    def __init__(self, wide: Tensor, scale: Tensor, low: Tensor | None, least: int, most: int) -> None:
        """The rounding with the first scale, which cuts nothing off. `low` is the smallest weight / 15 of each group that
        has a zero point."""
        self._wide, self._low, self._least, self._most = wide, low, least, most
        self.first_scale = scale
        self.scale, self.numbers, self.zero, self._error = self._rounded(scale)

    def try_scale(self, scale: Tensor) -> None:
        """Take this scale where it leaves a smaller error."""
        found, numbers, zero, error = self._rounded(scale)
        better = error < self._error
        self.scale = torch.where(better, found, self.scale)
        self.numbers = torch.where(better, numbers, self.numbers)
        self.zero = torch.where(better, zero, self.zero)
        self._error = torch.where(better, error, self._error)

    def fitted_scale(self) -> Tensor:
        """The scale that fits the numbers best."""
        return (self._wide * self.numbers).sum(-1, keepdim=True) / self.numbers.square().sum(-1, keepdim=True).clamp_min_(1)

    def _rounded(self, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scale = scale.clamp_min(_LEAST_SCALE).to(torch.bfloat16).to(torch.float32)
        zero = torch.zeros_like(scale) if self._low is None else (self._low * -15 / scale).round_().clamp_(0, 15)
        numbers = (self._wide / scale).round_().add_(zero).clamp_(self._least, self._most)
        error = (numbers - zero).mul_(scale).sub_(self._wide).square_().sum(-1, keepdim=True)
        return scale, numbers, zero, error


def parts(matrix: Tensor, at_once: int | None = None) -> list[slice]:
    """Rows of a matrix that are converted together."""
    count = max(1, (at_once or _AT_ONCE) // max(1, matrix.shape[1]))
    return [slice(begin, begin + count) for begin in range(0, len(matrix), count)]


def _library_for(weight: Tensor) -> KernelLibrary | None:
    fits = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and weight.is_contiguous()
    return kernel_library() if fits else None


def _run(name: str, library: KernelLibrary, weight: Tensor, data: Tensor, scale: Tensor) -> None:
    library.function(name, torch.float32)(
        _I64(weight.dtype == torch.bfloat16),
        ctypes.c_void_p(weight.data_ptr()),
        _I64(weight.shape[0]),
        _I64(weight.shape[1]),
        ctypes.c_void_p(data.data_ptr()),
        ctypes.c_void_p(scale.data_ptr()),
        _I64(library.num_threads),
    )

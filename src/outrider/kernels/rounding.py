"""Rounds weights to int8 with a scale for each row, and makes weights of what was rounded.

Kernels do it in one sweep with all threads. Where there are none, and for other dtypes and layouts, PyTorch's operators
give the same bits.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from outrider.kernels.library import KernelLibrary, kernel_library

#: The numbers of a matrix that are converted at a time, so that their copies stay in the caches.
_AT_ONCE = 2**20
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
    scale = torch.empty(len(weight), device=weight.device)
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
        dtype: Of the result.
    """
    weight = torch.empty(data.shape, dtype=dtype, device=data.device)
    library = _library_for(weight) if data.is_contiguous() and scale.is_contiguous() else None
    if library is not None:
        _run("unround_weights", library, weight, data, scale)
        return weight
    for rows in parts(data):
        weight[rows] = data[rows].to(torch.float32).mul_(scale[rows, None])
    return weight


def parts(matrix: Tensor) -> list[slice]:
    """Rows of a matrix that are converted together."""
    count = max(1, _AT_ONCE // max(1, matrix.shape[1]))
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

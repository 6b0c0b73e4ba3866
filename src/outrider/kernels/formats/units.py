"""The kernels that bring the blocks of GGUF files into units, and that make weights of units, with all threads.

PyTorch's operators give the same bits where there are no kernels (`gguf.py`, `blocks.py`).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.layout import LinearStruct, Operand
from outrider.kernels.library import KernelLibrary

if TYPE_CHECKING:
    from outrider.kernels.formats.blocks import Blocks

_I64 = ctypes.c_int64


def bring_into_units(library: KernelLibrary, number: int, blocks: Tensor, fmt: Blocks, found: StoredWeight) -> None:
    """Fill an empty weight from blocks of a file.

    Args:
        library: The kernels.
        number: That of the type of the blocks in files.
        blocks: uint8 [count, bytes of a block], contiguous: those of all rows.
        fmt: The format of the weight.
        found: The weight.
    """
    inputs = fmt.inputs(found.data) * len(found.data) // len(blocks)
    lows = fmt.extra_bytes - fmt.num_parts
    sizes = (number, *blocks.shape[:1], inputs, *blocks.shape[1:], fmt.code_bits, fmt.num_parts, lows, fmt.per_head)
    tensors = (blocks, found.data, found.scale)
    threads = _I64(library.num_threads)
    library.function("bring_into_units", torch.float32)(*map(_I64, sizes), *map(_address, tensors), threads)


def weights_of_units(library: KernelLibrary, fmt: Blocks, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """The weights [out_features, in_features] that rows of units stand for, in the order in which their inputs lie.

    Args:
        library: The kernels.
        fmt: The format, whose codes have 8 bits at most.
        stored: The rows, contiguous.
        dtype: float32 or bfloat16.
    """
    found = torch.empty(len(stored.data), fmt.inputs(stored.data), dtype=dtype)
    struct = LinearStruct(fmt.code, Operand.REAL, *found.shape, fmt.group or 0, fmt.has_zeros, blocks=fmt.struct())
    tensors = map(_address, (stored.data, stored.scale, stored.zero, found))
    narrow, threads = _I64(dtype == torch.bfloat16), _I64(library.num_threads)
    library.function("unpack_units", torch.float32)(ctypes.byref(struct), narrow, *tensors, threads)
    return found


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

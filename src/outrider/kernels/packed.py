"""Weights that are packed for the kernels for few rows."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.layout import LinearStruct, WeightKind
from outrider.kernels.library import KernelLibrary
from outrider.kernels.weights import StoredWeight

_I64 = ctypes.c_int64


class PackedWeights:
    """A weight matrix [out_features, in_features] in the order of the kernels.

    Args:
        library: The kernels of this processor.
        stored: [out_features, in_features] in float32, float64 or bfloat16, or in int8 with a scale for each row. Several
            are stacked, without a copy of them.
        bias: [out_features] or None.

    Attributes:
        real: The dtype of the products: float64 for float64 weights, float32 for all others.
        width: out_features rounded up to whole panels, which is the width of what the kernels write.
        data: The panels in the dtype of the weights.
        scale, bias: [width] of dtype `real`, or None.
    """

    def __init__(
        self, library: KernelLibrary, stored: StoredWeight | list[StoredWeight], bias: Tensor | None = None
    ) -> None:
        parts = [stored] if isinstance(stored, StoredWeight) else stored
        first = parts[0].data
        self.out_features, self.in_features = sum(len(part.data) for part in parts), first.shape[1]
        self.real = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.kind = kind_of(first.dtype)
        panel = library.panel(self.real)
        self.width = -(-self.out_features // panel) * panel
        self.data = _packed(library, [part.data for part in parts], self.real, self.kind)
        scales = [part.scale for part in parts if part.scale is not None]
        self.scale, self.bias = self._column(torch.cat(scales) if scales else None), self._column(bias)
        self.struct = LinearStruct(
            self.kind,
            self.out_features,
            self.in_features,
            self.data.data_ptr(),
            _address(self.scale),
            _address(self.bias),
        )
        self._library = library

    @property
    def kernels(self) -> str:
        """The instruction set for which they are packed."""
        return self._library.instruction_set

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads."""
        return self.data.nbytes

    def unpacked(self) -> StoredWeight:
        """The weights in their original order."""
        data = self.data.new_empty(self.out_features, self.in_features)
        _move("unpack", self._library, self.real, self.kind, [data], self.data)
        return StoredWeight(data, None if self.scale is None else self.scale[: self.out_features].clone())

    def _column(self, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return torch.nn.functional.pad(values.to(self.real), (0, self.width - self.out_features)).contiguous()


def kind_of(dtype: torch.dtype) -> WeightKind:
    """How the kernels store weights of this dtype. Raises KeyError for a dtype that they do not support."""
    kinds = {
        torch.float32: WeightKind.REAL,
        torch.float64: WeightKind.REAL,
        torch.bfloat16: WeightKind.BF16,
        torch.int8: WeightKind.INT8,
    }
    return kinds[dtype]


def packed_bytes(library: KernelLibrary, kind: int, rows: int, cols: int, real: torch.dtype) -> int:
    """The bytes of weights [rows, cols] that are packed for products in `real`."""
    found: int = library.function("packed_bytes", real, _I64)(_I64(kind), _I64(rows), _I64(cols))
    return found


def product(library: KernelLibrary, weights: LinearStruct, rows: Tensor) -> Tensor:
    """The product [n, width] of contiguous rows [n, in_features] with packed weights, in the dtype of the rows."""
    count, threads = _I64(len(rows)), _I64(library.num_threads)
    panel = library.panel(rows.dtype)
    out = rows.new_empty(len(rows), -(-weights.rows // panel) * panel)
    size: int = library.function("linear_scratch_size", rows.dtype, _I64)(ctypes.byref(weights), count, threads)
    scratch = rows.new_empty(size)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, out, scratch)]
    library.function("linear_forward", rows.dtype)(ctypes.byref(weights), *pointers[:2], count, pointers[2], threads)
    return out


def _packed(library: KernelLibrary, weights: list[Tensor], real: torch.dtype, kind: WeightKind) -> Tensor:
    rows, cols = sum(map(len, weights)), weights[0].shape[1]
    num_bytes = packed_bytes(library, kind, rows, cols, real)
    data = torch.empty(num_bytes + 64, dtype=torch.uint8)  # kernels read a little ahead, but never past this
    data = data[-data.data_ptr() % 64 :][:num_bytes].view(weights[0].dtype)
    _move("pack", library, real, kind, [w if w.stride(1) == 1 else w.contiguous() for w in weights], data)
    return data


def _move(
    way: str, library: KernelLibrary, real: torch.dtype, kind: WeightKind, weights: list[Tensor], data: Tensor
) -> None:
    """Pack stacked weights, whose rows are contiguous, into `data`, or unpack them from there."""
    addresses = np.concatenate([w.data_ptr() + np.arange(len(w)) * (w.stride(0) * w.itemsize) for w in weights])
    library.function(way, real)(
        _I64(kind),
        ctypes.c_void_p(addresses.ctypes.data),
        _I64(len(addresses)),
        _I64(weights[0].shape[1]),
        ctypes.c_void_p(data.data_ptr()),
        _I64(library.num_threads),
    )


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()

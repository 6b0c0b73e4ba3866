"""Weights that are packed for the kernels for few rows."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.formats.format import WeightFormat
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.layout import LinearStruct, Operand
from outrider.kernels.library import KernelLibrary

_I64 = ctypes.c_int64


class PackedWeights:
    """A weight matrix [out_features, in_features] in the order of the kernels.

    Args:
        library: The kernels of this processor.
        stored: The matrix. Several of one format are stacked, without a copy of them.
        bias: [out_features] or None.

    Attributes:
        real: The dtype of the products: float64 for float64 weights, float32 for all others.
        width: out_features rounded up to whole panels, which is the width of what the kernels write.
        format: That of the weights.
        operand: As what rows enter the products.
        dtype: That the weights stand for.
        data: The panels, with what belongs to groups of inputs.
        scale, bias: [width] of dtype `real`, or None. Scales of groups lie in the panels.
    """

    def __init__(
        self, library: KernelLibrary, stored: StoredWeight | list[StoredWeight], bias: Tensor | None = None
    ) -> None:
        parts = [stored] if isinstance(stored, StoredWeight) else stored
        self.format, self.dtype = parts[0].format, parts[0].dtype
        self.out_features = sum(len(part.data) for part in parts)
        self.in_features = _inputs(parts[0])
        self.real = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.operand = self.format.operand(self.dtype, pairs=library.multiplies_pairs(self.real))
        panel = library.panel(self.real)
        self.width = -(-self.out_features // panel) * panel
        self._library = library
        whole_rows = self.format.quantised and self.format.group is None
        scales = [part.scale for part in parts if whole_rows and part.scale is not None]
        self.scale, self.bias = self._column(torch.cat(scales) if scales else None), self._column(bias)
        self.struct = linear_struct(self.format, self.operand, self.out_features, self.in_features)
        self.struct.scale, self.struct.bias = _address(self.scale), _address(self.bias)
        self.data = self._packed(parts)

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
        found = self._empty()
        self._move("unpack", [found])
        if self.scale is not None:
            found = replace(found, scale=self.scale[: self.out_features].clone())
        return found

    def _packed(self, parts: list[StoredWeight]) -> Tensor:
        num_bytes = packed_bytes(self._library, self.struct, self.real)
        data = torch.empty(num_bytes + 64, dtype=torch.uint8)  # kernels read a little ahead, but never past this
        data = data[-data.data_ptr() % 64 :][:num_bytes]
        self.struct.data = data.data_ptr()
        self._move("pack", [part.each(_with_contiguous_rows) for part in parts])
        return data

    def _empty(self) -> StoredWeight:
        """Room for the weights as they were before packing."""
        fmt, rows, cols = self.format, self.out_features, self.in_features
        if not fmt.quantised:
            return StoredWeight(fmt, self.dtype, torch.empty(rows, cols, dtype=self.dtype))
        data = torch.empty(rows, cols, dtype=torch.int8)
        if fmt.bits == 4:
            data = torch.empty(rows, cols // 2, dtype=torch.uint8)
        if fmt.group is None:
            return StoredWeight(fmt, self.dtype, data)
        scale = torch.empty(rows, cols // fmt.group, dtype=torch.bfloat16)
        zero = torch.empty(scale.shape, dtype=torch.uint8) if fmt.has_zeros else None
        return StoredWeight(fmt, self.dtype, data, scale, zero)

    def _move(self, way: str, parts: list[StoredWeight]) -> None:
        """Pack stacked weights, whose rows are contiguous, into `data`, or unpack them from there."""
        columns: list[list[Tensor]] = [[part.data for part in parts]]
        columns.append([part.scale for part in parts if self.format.group is not None and part.scale is not None])
        columns.append([part.zero for part in parts if part.zero is not None])
        addresses = [_row_addresses(tensors) for tensors in columns]
        self._library.function(way, self.real)(
            ctypes.byref(self.struct),
            *(ctypes.c_void_p(each.ctypes.data if len(each) else None) for each in addresses),
            _I64(self._library.num_threads),
        )

    def _column(self, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return torch.nn.functional.pad(values.to(self.real), (0, self.width - self.out_features)).contiguous()


def linear_struct(fmt: WeightFormat, operand: Operand, rows: int, cols: int) -> LinearStruct:
    """A matrix for the kernels, which lies nowhere yet."""
    return LinearStruct(fmt.code, operand, rows, cols, fmt.group or 0, fmt.has_zeros)


def packed_bytes(library: KernelLibrary, weights: LinearStruct, real: torch.dtype) -> int:
    """The bytes of weights that are packed for products in `real`."""
    found: int = library.function("packed_bytes", real, _I64)(ctypes.byref(weights))
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


def _inputs(stored: StoredWeight) -> int:
    return stored.data.shape[-1] * (2 if stored.format.bits == 4 else 1)


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _row_addresses(matrices: list[Tensor]) -> np.ndarray:
    if not matrices:
        return np.empty(0, np.int64)
    return np.concatenate([m.data_ptr() + np.arange(len(m)) * (m.stride(0) * m.itemsize) for m in matrices])


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()

"""Weights that are packed for the kernels for few rows, and the memory pages of both forms."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.formats import StoredWeight, WeightFormat
from outrider.kernels.layout import FormatCode, LinearStruct, Operand
from outrider.kernels.library import KernelLibrary

# --- Weights that are packed for the kernels for few rows.


_I64 = ctypes.c_int64
#: The bytes of a matrix that are packed before they are freed.
_FREED_AT_ONCE = 2**23


class PackedWeights:
    """A weight matrix [out_features, in_features] in the order of the kernels.

    Args:
        bias: [out_features] or None.

    Attributes:
        real: The dtype of the products: float64 for float64 weights, float32 for all others.
        width: out_features rounded up to whole panels, which is the width of what the kernels write.
        format: That of the weights.
        operand: As what rows enter the products.
        dtype: That the weights stand for.
        data: The panels, with what belongs to groups of inputs.
        scale, bias: [width] of dtype `real`, or None. Scales of groups lie in the panels.
        places: int32 [in_features] where the weights of each input lie, or None where they lie in order.
        tail: The weights whose outputs come behind these, in another format. Or None.
    """

    def __init__(
        self,
        library: KernelLibrary,
        stored: StoredWeight | list[StoredWeight],
        bias: Tensor | None = None,
        *,
        consume: bool = False,
    ) -> None:
        all_parts = [stored] if isinstance(stored, StoredWeight) else stored
        parts = list(takewhile(all_parts[0].stands_beside, all_parts))
        self.format, self.dtype = parts[0].format, parts[0].dtype
        self.own_outputs = sum(len(part.data) for part in parts)
        self.out_features = sum(len(part.data) for part in all_parts)
        self.in_features = self.format.inputs(parts[0].data)
        self.real = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.operand = self.format.operand(self.dtype, pairs=library.multiplies_pairs(self.real))
        panel = library.panel(self.real)
        self.width = -(-self.own_outputs // panel) * panel
        self._library = library
        self.places = None if parts[0].order is None else torch.argsort(parts[0].order).to(torch.int32)
        self.tail = self._packed_tail(all_parts[len(parts) :], bias, panel)
        bias = None if bias is None else bias[: self.own_outputs]
        whole_rows = self.format.quantised and self.format.group is None
        scales = [part.scale for part in parts if whole_rows and part.scale is not None]
        self.scale, self.bias = self._column(torch.cat(scales) if scales else None), self._column(bias)
        self.struct = linear_struct(self.format, self.operand, self.own_outputs, self.in_features)
        self.struct.scale, self.struct.bias, self.struct.places = map(_address, (self.scale, self.bias, self.places))
        self.struct.next = None if self.tail is None else ctypes.addressof(self.tail.struct)
        self.data = self._room()
        if consume and len(all_parts) == 1:
            self._pack_and_free(parts[0], panel)
        else:
            self._move("pack", self.struct, [part.each(_with_contiguous_rows) for part in parts])

    @property
    def kernels(self) -> str:
        """The instruction set for which they are packed."""
        return self._library.instruction_set

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads."""
        return self.data.nbytes + (0 if self.tail is None else self.tail.nbytes)

    def unpacked(self) -> StoredWeight:
        """The weights in their original order, those of `tail` not among them."""
        found = self.format.empty(self.dtype, self.own_outputs, self.in_features)
        self._move("unpack", self.struct, [found])
        if self.places is not None:
            found = replace(found, order=torch.argsort(self.places).to(torch.int32))
        if self.scale is not None:
            found = replace(found, scale=self.scale[: self.own_outputs].clone())
        return found

    def shares_rows_with(self, other: PackedWeights) -> bool:
        """Tells whether rows enter products with both in the same form."""
        if self.places is None or other.places is None:
            same_places = self.places is other.places
        else:
            same_places = torch.equal(self.places, other.places)
        if self.operand is Operand.BYTES:  # groups of rows and their order are those of the weights, and of all blocks
            alike = self.format == other.format or self.format.code is other.format.code is FormatCode.BLOCKS
            return other.operand is Operand.BYTES and alike and same_places
        return same_places and self.operand == other.operand and _lowers(self.format) == _lowers(other.format)

    def _packed_tail(self, parts: list[StoredWeight], bias: Tensor | None, panel: int) -> PackedWeights | None:
        if not parts:
            return None
        if self.own_outputs % panel:
            raise ValueError(f"the kernels cannot stack {self.own_outputs} outputs and others of another format")
        tail = PackedWeights(self._library, parts, None if bias is None else bias[self.own_outputs :])
        if not self.shares_rows_with(tail):
            raise ValueError(f"the kernels cannot stack {self.format.name} and {tail.format.name}, whose rows differ")
        return tail

    def _room(self) -> Tensor:
        data = room(packed_bytes(self._library, self.struct, self.real))
        self.struct.data = data.data_ptr()
        return data

    def _pack_and_free(self, stored: StoredWeight, panel: int) -> None:
        """Pack a matrix a few panels at a time, and free what has been packed."""
        panel_bytes = self.data.nbytes // (self.width // panel)
        step = max(1, _FREED_AT_ONCE // max(1, panel_bytes)) * panel
        for begin in range(0, self.own_outputs, step):
            some = stored.rows(begin, begin + step)
            struct = LinearStruct.from_buffer_copy(self.struct)
            struct.rows, struct.data = len(some.data), self.data.data_ptr() + begin // panel * panel_bytes
            self._move("pack", struct, [some.each(_with_contiguous_rows)])
            for tensor in (some.data, some.scale, some.zero):
                if tensor is not None:
                    discard(tensor)

    def _move(self, way: str, struct: LinearStruct, parts: list[StoredWeight]) -> None:
        """Pack stacked weights, whose rows are contiguous, to where `struct` says, or unpack them from there."""
        columns: list[list[Tensor]] = [[part.data for part in parts]]
        columns.append([part.scale for part in parts if self.format.group is not None and part.scale is not None])
        columns.append([part.zero for part in parts if part.zero is not None])
        addresses = [_row_addresses(tensors) for tensors in columns]
        self._library.function(way, self.real)(
            ctypes.byref(struct),
            *(ctypes.c_void_p(each.ctypes.data if len(each) else None) for each in addresses),
            _I64(self._library.num_threads),
        )

    def _column(self, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return torch.nn.functional.pad(values.to(self.real), (0, self.width - self.own_outputs)).contiguous()


def linear_struct(fmt: WeightFormat, operand: Operand, rows: int, cols: int) -> LinearStruct:
    """A matrix for the kernels, which lies nowhere yet."""
    return LinearStruct(fmt.code, operand, rows, cols, fmt.group or 0, fmt.has_zeros, blocks=fmt.struct())


def packed_bytes(library: KernelLibrary, weights: LinearStruct, real: torch.dtype) -> int:
    """The bytes of weights that are packed for products in `real`."""
    found: int = library.function("packed_bytes", real, _I64)(ctypes.byref(weights))
    return found


def product(library: KernelLibrary, weights: LinearStruct, rows: Tensor) -> Tensor:
    """The product [n, width] of contiguous rows [n, in_features] with packed weights, in the dtype of the rows."""
    count, threads = _I64(len(rows)), _I64(library.num_threads)
    panel, outputs, part = library.panel(rows.dtype), weights.rows, weights
    while part.next:
        part = LinearStruct.from_address(part.next)
        outputs += part.rows
    out = rows.new_empty(len(rows), -(-outputs // panel) * panel)
    size: int = library.function("linear_scratch_size", rows.dtype, _I64)(ctypes.byref(weights), count, threads)
    scratch = rows.new_empty(size)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, out, scratch)]
    library.function("linear_forward", rows.dtype)(ctypes.byref(weights), *pointers[:2], count, pointers[2], threads)
    return out


def _lowers(fmt: WeightFormat) -> bool:
    """Tells whether rows are made smaller before they are multiplied with whole numbers, whose scales come at the end."""
    return fmt.code not in (FormatCode.REAL, FormatCode.BF16)


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _row_addresses(matrices: list[Tensor]) -> np.ndarray:
    if not matrices:
        return np.empty(0, np.int64)
    return np.concatenate([m.data_ptr() + np.arange(len(m)) * (m.stride(0) * m.itemsize) for m in matrices])


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


# --- Gives back the memory pages of weights that have been packed, and makes room for these on large pages.
#
# transformers maps the files of a checkpoint. A tensor that is let go frees nothing as long as another one of the same
# file is in use, so that a model would lie in memory twice: as it was read, and packed. A head may be a fourth of a
# small model, so pages of large matrices are given back while these are packed.
#
# A pass reads all weights once. On pages of the usual size a processor spends part of that time on finding pages.


_HELD, _FROM_FILE = (
    np.uint64(3 << 62),
    np.uint64(1 << 61),
)  # bits of /proc/self/pagemap: in memory or swapped out; of a file
#: The bytes of a large page, and what the address of one is a multiple of.
_LARGE = 2**21
_LINE = 64


def room(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] for weights, at an address that 64 divides. Where the system has large pages, it lies on as many of
    them as it fills, and so takes no memory beyond its own."""
    whole = num_bytes // _LARGE * _LARGE
    if not whole or not hasattr(mmap, "MADV_HUGEPAGE"):
        found = torch.empty(num_bytes + _LINE, dtype=torch.uint8)
        return found[-found.data_ptr() % _LINE :][:num_bytes]
    memory = mmap.mmap(-1, num_bytes + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -found.data_ptr() % _LARGE
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return found[begin:][:num_bytes]


def release(tensor: Tensor) -> None:
    """Give the pages of a tensor back where they are unchanged pages of a file.

    The tensor keeps its numbers: who still reads them reads the file again. Where a page was written to, or is no page of
    a file, all pages of the tensor stay.
    """
    begin, end = _pages_within(tensor)
    if begin < end and _is_of_file(begin, end):
        _give_back(begin, end)


def discard(tensor: Tensor) -> None:
    """Give the pages back that lie within a tensor, whatever they are. Its numbers are lost: nobody may read it again."""
    begin, end = _pages_within(tensor)
    if begin < end and hasattr(mmap, "MADV_DONTNEED"):
        _give_back(begin, end)


def _pages_within(tensor: Tensor) -> tuple[int, int]:
    """The numbers of the first whole page of a tensor and of that behind its last one. Equal where there are none."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        return 0, 0
    return -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE


def _give_back(begin: int, end: int) -> None:
    size = (end - begin) * mmap.PAGESIZE
    _c_library().madvise(ctypes.c_void_p(begin * mmap.PAGESIZE), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _is_of_file(begin: int, end: int) -> bool:
    """Tells whether all pages that lie in memory are unchanged pages of a file. False where the system does not say it."""
    try:
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(8 * begin)
            pages = np.frombuffer(file.read(8 * (end - begin)), np.uint64)
    except OSError:
        return False
    return len(pages) == end - begin and not ((pages & _HELD != 0) & (pages & _FROM_FILE == 0)).any()

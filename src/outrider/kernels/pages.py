"""Gives back the memory pages of weights that have been packed, and makes room for these on large pages.

transformers maps the files of a checkpoint. A tensor that is let go frees nothing as long as another one of the same file
is in use, so that a model would lie in memory twice: as it was read, and packed. A head may be a fourth of a small model,
so pages of large matrices are given back while these are packed.

A pass reads all weights once. On pages of the usual size a processor spends part of that time on finding pages.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

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
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin * mmap.PAGESIZE), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _is_of_file(begin: int, end: int) -> bool:
    """Whether all pages that lie in memory are unchanged pages of a file. False where the system does not say it."""
    try:
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(8 * begin)
            pages = np.frombuffer(file.read(8 * (end - begin)), np.uint64)
    except OSError:
        return False
    return len(pages) == end - begin and not ((pages & _HELD != 0) & (pages & _FROM_FILE == 0)).any()

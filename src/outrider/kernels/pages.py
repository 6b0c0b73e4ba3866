"""Gives back the memory pages of a mapped file whose weights have been packed.

transformers maps the files of a checkpoint. A tensor that is let go frees nothing as long as another one of the same file
is in use, so that a model would lie in memory twice: as it was read, and packed.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from torch import Tensor

_HELD, _FROM_FILE = (
    np.uint64(3 << 62),
    np.uint64(1 << 61),
)  # bits of /proc/self/pagemap: in memory or swapped out; of a file


def release(tensor: Tensor) -> None:
    """Give the pages of a tensor back where they are unchanged pages of a file.

    The tensor keeps its numbers: who still reads them reads the file again. Where a page was written to, or is no page of
    a file, all pages of the tensor stay.
    """
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE)
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    if begin < end and tensor.is_contiguous() and tensor.device.type == "cpu" and _is_of_file(begin, end):
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

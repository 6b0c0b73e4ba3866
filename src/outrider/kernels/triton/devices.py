"""Devices on which the Triton kernels run, and small lists of numbers on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

#: What takes the place of an instruction set where these kernels compute.
TRITON = "triton"
#: The dtypes of rows that they take.
KNOWN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: The oldest compute capability that they are compiled for in tests.
_OLDEST = (8, 0)


def runs_on(device: torch.device) -> bool:
    """Tells whether the kernels compute on tensors of this device: a GPU of NVIDIA of compute capability 8.0 or newer.

    With OUTRIDER_KERNELS=triton they do so on a CPU, too, where TRITON_INTERPRET=1 lets Triton interpret them.
    """
    wish = os.environ.get("OUTRIDER_KERNELS")
    if wish == "off" or not _has_triton():
        return False
    return wish == TRITON if device.type == "cpu" else device.type == "cuda" and _is_new(device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _is_new(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _OLDEST


class Numbers:
    """Lists of numbers on a device, which lie in one tensor, so that one copy writes them all. They may be written anew.

    Attributes:
        parts: The lists, on the device.
    """

    def __init__(self, sizes: Sequence[int], dtype: np.dtype, device: torch.device, aligned: int = 1) -> None:
        *begins, end = accumulate((-(-size // aligned) * aligned for size in sizes), initial=0)
        self._places = list(zip(begins, sizes, strict=True))
        # From pinned memory the host does not wait for a copy. It waits for the one before, whose numbers it writes over.
        self._here = torch.from_numpy(np.zeros(end, dtype))
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._here = self._here if self._sent is None else self._here.pin_memory()
        self._there = torch.zeros_like(self._here, device=device)
        self.parts: list[Tensor] = [self._there[begin : begin + size] for begin, size in self._places]

    def write(self, parts: Sequence[np.ndarray]) -> None:
        """Write the lists, each of which may be shorter than its room, with zeros behind it."""
        if self._sent is not None:
            self._sent.synchronize()
        here = self._here.numpy()
        here.fill(0)
        for (begin, size), part in zip(self._places, parts, strict=True):
            assert len(part) <= size, "a list fits into its room"
            here[begin : begin + len(part)] = part
        self._there.copy_(self._here, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

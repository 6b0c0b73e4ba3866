"""Devices on which the Triton kernels run."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

#: What takes the place of an instruction set where these kernels compute.
TRITON = "triton"
#: The dtypes of rows that they take.
KNOWN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: The oldest compute capability that they are compiled for in tests.
_OLDEST = (8, 0)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels compute on tensors of this device: a GPU of NVIDIA of compute capability 8.0 or newer.

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

"""The machine: its hardware, how fast it reads memory, and how much memory is in use."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from outrider import __version__
from outrider.kernels.library import kernel_library
from outrider.model.pass_timer import synchronise
from outrider.model.processor import processor_name

_MIB = 2**20
#: The rows and columns of the matrices whose product shows the peak of the arithmetic.
PRODUCT_SIZE = 2048


def describe(device: torch.device) -> dict[str, Any]:
    """Hardware and versions. Figures can be compared only where these are equal."""
    return {
        "cpu": processor_name(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "kernels": library.instruction_set if (library := kernel_library()) else "stock operators",
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "outrider": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def read_bandwidth(device: torch.device, num_bytes: int | None = None, repeats: int = 5) -> float:
    """The most bytes per second that torch's threads read from memory.

    The buffer is too large for any cache. The reductions are those that come closest to the limit of the machine; a product
    with a vector reads a third less.

    Args:
        device: The device whose memory is read.
        num_bytes: The size of the buffer. None takes several times the size of the largest cache.
        repeats: How many times the buffer is read.
    """
    num_bytes = num_bytes or (1024 * _MIB if device.type == "cuda" else max(256 * _MIB, 6 * _largest_cache()))
    buffer = torch.ones(max(1, num_bytes // 8), dtype=torch.int64, device=device)
    best = float("inf")
    for _ in range(repeats):
        for read in (buffer.sum, buffer.view(torch.int32).amax):
            synchronise(device)
            start = perf_counter()
            read()
            synchronise(device)
            best = min(best, perf_counter() - start)
    return buffer.numel() * 8 / best


def product_peak(device: torch.device, dtype: torch.dtype, size: int = PRODUCT_SIZE, repeats: int = 10) -> float:
    """The most operations per second of torch's product of two square matrices.

    A multiplication with its addition counts as two operations.

    Args:
        device: Where the product is computed.
        dtype: The type of the matrices.
        size: Their rows and columns.
        repeats: How many times the product is computed, after one that does not count.
    """
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for turn in range(repeats + 1):
        synchronise(device)
        start = perf_counter()
        left @ right
        synchronise(device)
        if turn:
            best = min(best, perf_counter() - start)
    return 2 * size**3 / best


def _largest_cache() -> int:
    """The bytes of the largest cache that Linux lists. 0 where it lists none."""
    sizes = [file.read_text("ascii").strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def fits_a_cache(num_bytes: int) -> bool:
    """Whether weights of this size stay in a cache, so that they are read faster than memory is."""
    return num_bytes <= _largest_cache()


def is_mixture(model: Any) -> bool:
    """Whether a model is a mixture of experts, so that what a token reads and computes depends on the token."""
    config = model.config.get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def weight_bytes(model: Any) -> int | None:
    """The bytes of weights that decoding one token reads.

    These are all weights once; the table of input embeddings counts only where it is the output head too. The answer is
    None for a mixture of experts, where it depends on the token.
    """
    if is_mixture(model):
        return None
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    weights = {id(w): w for w in model.parameters() if tied or w is not table}
    return sum(int(w.numel() * w.element_size()) for w in weights.values())


@dataclass(frozen=True)
class PeakMemory:
    """The most memory that was in use at a time, in bytes.

    Attributes:
        resident: Main memory of the process. None where the system does not tell it.
        cuda: Memory of tensors on the GPU. None without a GPU.
    """

    resident: int | None
    cuda: int | None


class MemoryWatch:
    """Measures the peak of memory since it was made.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with suppress(OSError):  # on other systems than Linux the peak counts from the start of the process
            Path("/proc/self/clear_refs").write_text("5", "ascii")

    def peak(self) -> PeakMemory:
        """The peaks until now."""
        cuda = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        return PeakMemory(_peak_resident(), cuda)


def _peak_resident() -> int | None:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text("ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""The machine: its hardware, its memory, and how busy other work kept it while something was measured."""

from __future__ import annotations

import os
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
from outrider.model.memory import processor_name, synchronise

_MIB = 2**20
#: The rows and columns of the matrices whose product shows the peak of the arithmetic.
PRODUCT_SIZE = 2048
#: Seconds after which no further product is timed.
_PATIENCE = 2.0


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
    """The most bytes per second that torch's threads read from memory. The buffer is too large for any cache. The
    reductions are those that come closest to the limit of the machine; a product with a vector reads a third less. Without
    a size the buffer is several times as large as the largest cache."""
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
    """The most operations per second of torch's product of two square matrices. A multiplication with its addition counts
    as two operations. Matrices are smaller where a processor has no such products, as of bf16, and would take long."""
    for side in (size // 8, size):
        left, right = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
        best, begun = float("inf"), perf_counter()
        for turn in range(repeats + 1):
            synchronise(device)
            start = perf_counter()
            left @ right
            synchronise(device)
            if turn:  # the first one also makes what later ones find made
                best = min(best, perf_counter() - start)
            if best < float("inf") and perf_counter() - begun > _PATIENCE:
                break
        if best * (size / side) ** 3 > _PATIENCE:
            break
    return 2 * side**3 / best


def _largest_cache() -> int:
    """The bytes of the largest cache that Linux lists. 0 where it lists none."""
    sizes = [file.read_text("ascii").strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def fits_a_cache(num_bytes: int) -> bool:
    """Tells whether weights of this size stay in a cache, so that they are read faster than memory is."""
    return num_bytes <= _largest_cache()


@dataclass(frozen=True)
class PeakMemory:
    """The most memory that was in use at a time, in bytes."""

    resident: int | None  # main memory of the process. None where the system does not tell it.
    cuda: int | None  # memory of tensors on the GPU. None without a GPU.


class MemoryWatch:
    """Measures the peak of memory since it was made."""

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


# --- Measures how much of the processor other work kept busy while something was measured.


#: The share of our threads' time that others may take before our times are doubtful.
_LITTLE = 0.1
_STAT = Path("/proc/stat")
#: Where the columns of that file are that count idle time.
_IDLE = (3, 4)


@dataclass(frozen=True)
class Load:
    """The load of a machine during a measurement."""

    others: float | None  # the cores that other work kept busy, on average. None where the system does not tell.
    cores: int  # the cores of the machine
    threads: int  # the threads that compute for us

    @property
    def disturbs(self) -> bool:
        """Tells whether our threads had to wait for other work."""
        return self.others is not None and self.others > self.cores - self.threads + _LITTLE * self.threads

    def __str__(self) -> str:
        if self.others is None:
            return "the load of the machine is not known"
        return f"other work kept {self.others:.1f} of {self.cores} cores busy"


class LoadWatch:
    """Watches the load of the machine from the moment it is made."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = perf_counter(), _busy_seconds(), _own_seconds()

    def load(self) -> Load:
        """The load since then."""
        cores, threads = os.cpu_count() or 1, torch.get_num_threads()
        busy, seconds = _busy_seconds(), perf_counter() - self._began
        if busy is None or self._busy is None or seconds <= 0.0:
            return Load(None, cores, threads)
        others = (busy - self._busy - (_own_seconds() - self._own)) / seconds
        return Load(min(max(others, 0.0), float(cores)), cores, threads)


def _busy_seconds() -> float | None:
    """The seconds that all cores together have been busy, or were taken by another machine. Linux alone tells."""
    try:
        counts = [int(count) for count in _STAT.read_text("ascii").splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    idle = sum(counts[place] for place in _IDLE)
    return float(sum(counts) - idle) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """The seconds that this process and those it has started computed. Other engines that are measured run in these."""
    times = os.times()
    ended = times.user + times.system + times.children_user + times.children_system
    return ended + sum(_seconds_of(child) for child in _children("self"))


def _seconds_of(process: str) -> float:
    """The seconds that another process computed, with those that it has started. Zero where it has ended by now."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(_seconds_of(child) for child in _children(process))


def _children(process: str) -> list[str]:
    found: list[str] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            found += file.read_text("ascii").split()
    return found

"""Finds the compiled kernels, chooses those for this processor, and lets them use PyTorch's own threads.

The library is plain C, compiled when the package is built (hatch_build.py). Where there was no compiler it is missing, and
stock operators do all the work. The environment variable OUTRIDER_KERNELS chooses by hand, for tests and to find out
whether the kernels cause a fault. It is "off", the name of an instruction set, or "triton" for kernels that are not these
(triton/devices.py).
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ForkedProcessError
from outrider.kernels.layout import INSTRUCTION_SETS, REALS, check_layout, multiplies_pairs, panel_width

logger = logging.getLogger(__name__)

FILE = Path(__file__).parent / "native" / "kernels.so"
#: Where Linux lists the libraries that a process has loaded.
_MAPS = Path("/proc/self/maps")
_REMEDY = "Install the package again, or in its source tree run: python hatch_build.py"
_MISSING = (
    "it is not there, since no C compiler was found at the installation. Install one, and then the package again; or "
    "install a wheel, which brings it"
)


#: The processes in which a model was loaded: this one, or those from which it was forked.
_processes: set[int] = set()


def check_process() -> None:
    """Remember that this process runs the threads of a model."""
    _processes.add(os.getpid())
    if len(_processes) > 1:
        raise ForkedProcessError


class KernelLibrary:
    """The kernels for one instruction set."""

    def __init__(self, library: ctypes.CDLL, instruction_set: str) -> None:
        self._library = library
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        self.instruction_set = instruction_set

    def function(self, name: str, real: torch.dtype, restype: Any = None) -> Any:
        """The kernel of a name for activations of dtype `real`."""
        found = self._functions.get((name, real))
        if found is None:
            found = self._functions[name, real] = self._library[f"{name}_{REALS[real]}_{self.instruction_set}"]
            found.restype = restype
        return found

    def panel(self, real: torch.dtype) -> int:
        """The number of output columns that packed weights keep together."""
        return panel_width(self.instruction_set, real)

    def multiplies_pairs(self, real: torch.dtype) -> bool:
        """Tells whether products can take rows in pairs of bf16."""
        return multiplies_pairs(self.instruction_set, real)

    @property
    def num_threads(self) -> int:
        """The number of threads for a kernel. It is PyTorch's number in this thread, and the threads are PyTorch's own."""
        return torch.get_num_threads() if _openmp_entries()[0] else 1


@cache
def available_sets() -> tuple[str, ...]:
    """The instruction sets that this processor has and for which kernels are compiled, the best one last.

    It is empty where there are no kernels.
    """
    library = _open()
    if library is None:
        return ()
    library.outrider_instruction_sets.restype = ctypes.c_int64
    mask = library.outrider_instruction_sets()
    runs = (name for bit, name in enumerate(INSTRUCTION_SETS) if mask >> bit & 1)
    return tuple(name for name in runs if hasattr(library, f"decode_f32_{name}"))  # an old compiler lacks the newest


def kernel_library() -> KernelLibrary | None:
    """The kernels to use here. None where there are none."""
    wish = os.environ.get("OUTRIDER_KERNELS", "")
    if wish in ("off", "triton"):
        return None
    sets = available_sets()
    if wish and wish not in sets:
        _warn_of(wish)
        wish = ""
    return kernels_for(wish or sets[-1]) if sets else None


@cache  # so that it runs once, and not in every pass
def _warn_of(wish: str) -> None:
    sets = available_sets()
    known = ", ".join(("off", *sets))
    logger.warning(
        "OUTRIDER_KERNELS=%s is none of %s; %s will be used", wish, known, sets[-1] if sets else "stock operators"
    )


@cache
def kernels_for(instruction_set: str) -> KernelLibrary:
    """The kernels of one of the available sets."""
    library = _open()
    assert library is not None, "its instruction sets were listed"
    return KernelLibrary(library, instruction_set)


def kernels_problem() -> str | None:
    """Returns what is wrong with the compiled kernels, so that they are not used; None where nothing is, or where they
    are switched off."""
    return None if os.environ.get("OUTRIDER_KERNELS") == "off" else _examined()[1]


@cache
def _open() -> ctypes.CDLL | None:
    library, _ = _examined()
    if library is None:
        return None
    check_layout(library)
    library.outrider_use_runtime(*_openmp_entries())
    return library


@cache
def _examined() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, and what is wrong with it. A damaged one is not opened: a shorter file ends the process by a signal."""
    problem = damage(FILE)
    if problem is None:
        try:
            return ctypes.CDLL(str(FILE)), None
        except OSError as error:
            problem = f"it cannot be loaded ({error})"
    problem = f"{FILE}: {problem}" if problem == _MISSING else f"{FILE}: {problem}. {_REMEDY}"
    logger.warning("the compiled kernels are not used, and PyTorch's slower operators are: %s", problem)
    return None, problem


def damage(file: Path) -> str | None:
    """Returns how a library differs from what was compiled, by the size and the digest that were written down then.

    Without these it is taken as it is: whoever compiles it in another way writes none.
    """
    if not os.path.lexists(file):
        return _MISSING
    if not file.is_file():
        return "it is no file"
    try:
        size, digest = file.with_name(f"{file.name}.sha256").read_text("ascii").split()
        if file.stat().st_size != int(size):
            return f"it has {file.stat().st_size:,} bytes, and {int(size):,} were compiled"
        if sha256(file.read_bytes()).hexdigest() != digest:
            return "its content is not what was compiled"
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        return f"it cannot be checked ({error})"
    return None


@cache
def _openmp_entries() -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
    """The entry points of the OpenMP runtime that PyTorch uses. They are null where that cannot be found out."""
    for path in _loaded_runtimes():
        try:
            runtime = ctypes.CDLL(path)
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            first, second, third = (ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in names)
        except (OSError, AttributeError):
            continue
        return first, second, third
    logger.warning("PyTorch's threads were not found: kernels run on one thread")
    return ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()


def _loaded_runtimes() -> list[str]:
    """The OpenMP runtimes in this process, PyTorch's own first. A Mac does not list them, and PyTorch brings one there."""
    home = Path(torch.__file__).parent
    try:
        lines = _MAPS.read_text("utf-8").splitlines()
    except OSError:
        return sorted(map(str, home.glob("lib/lib*omp*.dylib")))
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line or "libiomp" in line or "libomp" in line}
    return sorted(paths, key=lambda path: (not path.startswith(str(home)), path))

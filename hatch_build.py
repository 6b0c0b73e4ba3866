"""Compiles the kernels when the package is built; without a C compiler the package works with PyTorch's own operators.

python hatch_build.py     compiles them into the source tree
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object  # type: ignore[assignment,misc]

SOURCES = Path(__file__).parent / "src" / "outrider" / "kernels" / "native"
LIBRARY = "kernels.so"
#: The ending of the file that keeps its size and digest, by which a library that was damaged later is noticed.
DIGEST = ".sha256"
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
#: The kernels are compiled once for each instruction set, and the best one is chosen at run time.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mprefer-vector-width=512"]
X86_SETS = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx2vnni": ["-mavx2", "-mfma", "-mavxvnni"],
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
}
#: Every ARM of 64 bits has NEON, so kernels without it would serve none. Without a flag, compilers for Macs add to it.
ARM_SETS = {
    "neon": ["-mcpu=generic"],
    "neondot": ["-mcpu=generic+dotprod"],
    "neonbf16": ["-mcpu=generic+dotprod+bf16+i8mm"],
}


#: The flags of Linux by which a machine runs a set.
_SHOWN_AS = {
    "avx2": {"avx2", "fma"},
    "avx2vnni": {"avx2", "fma", "avx_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
}
#: Where this variable is `here`, sets are left out that this machine does not run: nobody can test them on it, and they
#: take most of the time. `make` sets it; wheels and other installations have all sets, since they may move elsewhere.
WANTED = "OUTRIDER_COMPILE_FOR"
#: The platform that a wheel is built for, like manylinux_2_28_aarch64, where CC compiles for another one than this machine.
PLATFORM = "OUTRIDER_WHEEL_PLATFORM"


def compile_kernels(sources: Path = SOURCES, only: Sequence[str] | None = None) -> None:
    """Build the shared library beside its sources. Raises OSError or CalledProcessError where there is no compiler.

    Args:
        sources: Folder of the sources.
        only: Instruction sets to compile for; None for all of `wanted_sets`.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    wanted = {name: flags for name, flags in wanted_sets().items() if only is None or name in only}
    with tempfile.TemporaryDirectory() as folder:
        sets = {name: flags for name, flags in wanted.items() if _knows(compiler, flags, folder)}
        # The sets that come last take longest, and begin first: so no core is left with one of them alone at the end.
        jobs = [(name, "kernels.c", flags) for name, flags in reversed(sets.items())]
        jobs += [("team", "team.c", []), ("dispatch", "dispatch.c", [])]
        objects = [os.path.join(folder, f"{name}.o") for name, _, _ in jobs]
        commands = [
            [*compiler, *FLAGS, *flags, "-c", str(sources / source), "-o", target]
            for (_, source, flags), target in zip(jobs, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        built = os.path.join(folder, LIBRARY)
        # Within the folder: a library for Macs keeps the name that the linker is told, and two builds must be equal.
        _run([*compiler, "-shared", *map(os.path.basename, objects), "-lm", "-o", LIBRARY], folder)
        # Over to its name in one step: a running process keeps the old file.
        staged, digest = sources / f"{LIBRARY}.new", sources / f"{LIBRARY}{DIGEST}"
        content = Path(built).read_bytes()
        staged.write_bytes(content)
        digest.unlink(missing_ok=True)  # a library without a digest is taken as it is, and one with another's is not
        staged.replace(sources / LIBRARY)
        staged.write_text(f"{len(content)} {hashlib.sha256(content).hexdigest()}\n", "ascii")
        staged.replace(digest)


def wanted_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, list[str]]:
    """The instruction sets to compile for, with the flags that they need: those that this kind of processor may have, or of
    them those that this machine runs, where the environment asks for these."""
    machine = os.environ.get(PLATFORM, platform.machine()).lower()
    x86 = machine.endswith(("x86_64", "amd64"))
    sets = X86_SETS if x86 else ARM_SETS if machine.endswith(("aarch64", "arm64")) else {"generic": []}
    if os.environ.get(WANTED) != "here" or PLATFORM in os.environ or not cpuinfo.exists():
        return sets
    has = next((set(line.split()) for line in cpuinfo.read_text("utf-8").splitlines() if line.startswith("flags")), None)
    return {name: flags for name, flags in sets.items() if has is None or _SHOWN_AS.get(name, set()) <= has}


def _knows(compiler: list[str], flags: list[str], folder: str) -> bool:
    """Whether the compiler is young enough for an instruction set; what it leaves out is not offered at run time."""
    source = Path(folder) / "empty.c"  # zig's compiler cannot read the null device
    source.touch()
    command = [*compiler, *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _run(command: list[str], folder: str | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)


class KernelsBuildHook(BuildHookInterface):
    """Adds the compiled library to wheels and editable installs; a source distribution carries the sources alone."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        try:
            compile_kernels()
        except (OSError, subprocess.CalledProcessError) as error:
            if PLATFORM in os.environ:
                raise  # a release must not lack what it promises
            reason = getattr(error, "stderr", None) or error
            self.app.display_warning(f"The kernels were not compiled ({reason}); PyTorch's own operators will be used.")
            return
        build_data["pure_python"] = False
        name = os.environ.get(PLATFORM) or sysconfig.get_platform()
        build_data["tag"] = f"py3-none-{name.replace('-', '_').replace('.', '_')}"
        build_data["artifacts"] += [f"src/outrider/kernels/native/{LIBRARY}{ending}" for ending in ("", DIGEST)]


if __name__ == "__main__":
    try:
        compile_kernels()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"not compiled, stock operators will be used: {getattr(error, 'stderr', None) or error}")
    sys.stdout.write(f"compiled {SOURCES / LIBRARY}\n")

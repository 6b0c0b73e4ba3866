"""Reads the kernels' sources for another kind of processor, as the compiler of a release does; no code is made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "src" / "outrider" / "kernels" / "native"


def problems(target: str, flags: Sequence[str], out: Path, native: Path = NATIVE) -> str:
    """What Zig's compiler says of `kernels.c` for a target, as Zig names it: nothing where all is well."""
    # As a header: Zig 0.17 fails at -fsyntax-only, because it looks for what that would have written.
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-std=gnu11", "-Wall", "-Werror", *flags]
    command += ["-x", "c-header", str(native / "kernels.c"), "-o", str(out / "kernels.pch")]
    return subprocess.run(command, capture_output=True, text=True).stderr

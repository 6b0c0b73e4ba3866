"""The kernels are right C for other machines, as Zig's compiler reads it. `make arm` and a release make code of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.release.sources import NATIVE, problems

pytest.importorskip("ziglang", reason="the extra `release` is not installed")

LINUX, MAC, X86 = "aarch64-linux-gnu.2.28", "aarch64-macos.11.0", "x86_64-linux-gnu.2.28"
#: The flags of the instruction sets with every instruction that the kernels use; see hatch_build.py.
ALL = ["-mcpu=generic+dotprod+bf16+i8mm"]
VNNI = ["-mavx2", "-mfma", "-mavxvnni"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma"]


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        (LINUX, ["-mcpu=generic"]),
        (LINUX, ALL),
        (MAC, ALL),
        *((X86, flags) for flags in (VNNI, AVX512, [*AVX512, "-mavx512bf16", "-mavx512vnni"])),
    ],
)
def test_the_compiler_has_nothing_to_say(target: str, flags: list[str], tmp_path: Path) -> None:
    assert problems(target, flags, tmp_path) == ""


def test_a_word_that_arm_does_not_know_is_found(tmp_path: Path) -> None:
    native = tmp_path / "native"
    shutil.copytree(NATIVE, native, ignore=shutil.ignore_patterns("*.so*"))
    header = native / "simd.h"
    header.write_text(header.read_text("utf-8").replace("vdotq_s32", "vdotq_s23"), "utf-8")
    assert "vdotq_s23" in problems(LINUX, ALL, tmp_path, native)

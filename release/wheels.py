"""Builds a release into dist/: the source distribution, and a wheel with compiled kernels for each platform.

    pip install -e '.[release]'
    python release/wheels.py                             everything
    python release/wheels.py manylinux_2_28_x86_64       one platform

Zig's compiler builds for an old glibc on any machine, and for Macs, so that the wheels install where their tag says.
`auditwheel` checks that the tag is true; for Macs, the library says itself what it needs. Two builds of one commit are
equal to the byte, because all files have the time of the commit.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The platforms by their tags, and what Zig calls them.
TARGETS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
}


def build_wheel(platform: str, folder: Path) -> Path:
    """Build the wheel of one platform, and check that its tag is true."""
    environment = _environment() | {"CC": compiler(platform), "OUTRIDER_WHEEL_PLATFORM": platform}
    # From an unpacked source distribution, so that the kernels of another platform do not take the place of this machine's.
    with tempfile.TemporaryDirectory() as unpacked:
        build_sdist(Path(unpacked))
        (sdist,) = Path(unpacked).glob("*.tar.gz")
        shutil.unpack_archive(sdist, unpacked, filter="data")
        _build("--wheel", folder, environment, sdist.with_name(sdist.name.removesuffix(".tar.gz")))
    (wheel,) = folder.glob(f"*{platform}.whl")
    check_tag(wheel, platform)
    return wheel


def compiler(platform: str) -> str:
    """The command that compiles for a platform. It leaves out symbols: those for debuggers hold paths and times."""
    return f"{sys.executable} -m ziglang cc -target {TARGETS[platform]} -s"


def check_tag(wheel: Path, platform: str) -> None:
    """See that the wheel runs wherever its tag says; SystemExit tells what else it needs."""
    if platform.startswith("macosx"):
        with zipfile.ZipFile(wheel) as archive:
            needs = needs_of_mac(archive.read("outrider/kernels/native/kernels.so"))
        if needs != (platform, ["/usr/lib/libSystem.B.dylib"]):
            sys.exit(f"{wheel.name} needs more than its tag says: {needs}")
        return
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    *_, machine = platform.partition("manylinux_2_28_")
    found = re.search(rf"manylinux_2_(\d+)_{machine}", shown)
    if found is None or int(found[1]) > 28:
        sys.exit(f"{wheel.name} needs more than its tag says:\n{shown}")


def needs_of_mac(library: bytes) -> tuple[str, list[str]]:
    """The tag of a library for Macs with ARM, read from its header, and the libraries that it loads."""
    magic, processor, _, _, commands = struct.unpack_from("<5I", library)
    if (magic, processor) != (0xFEEDFACF, 0x0100000C):  # of 64 bits, and for ARM
        return f"magic {magic:#x}, processor {processor:#x}", []
    system, loaded, at = "unknown", [], 32
    for _ in range(commands):
        command, size, first, second = struct.unpack_from("<4I", library, at)
        if command == 0x32 and first == 1:  # which macOS it was built for, at least
            system = f"macosx_{second >> 16}_{second >> 8 & 255}_arm64"
        if command == 0xC:  # a library that is loaded, by the place of its name
            loaded.append(library[at + first : at + size].rstrip(b"\0").decode())
        at += size
    return system, loaded


def build_sdist(folder: Path) -> None:
    """Build the source distribution. It compiles the kernels where it is installed, or falls back to stock operators."""
    _build("--sdist", folder, _environment())


def _build(what: str, folder: Path, environment: dict[str, str], source: Path = ROOT) -> None:
    command = [sys.executable, "-m", "build", what, "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, env=environment)


def _environment() -> dict[str, str]:
    time = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {**os.environ, "SOURCE_DATE_EPOCH": time.stdout.strip()}


def main() -> None:
    unknown = [name for name in sys.argv[1:] if name not in TARGETS]
    if unknown:
        sys.exit(f"There is no platform {unknown[0]!r}. Use {', '.join(TARGETS)}.")
    folder = ROOT / "dist"
    if not sys.argv[1:]:
        build_sdist(folder)
    for platform in sys.argv[1:] or TARGETS:
        build_wheel(platform, folder)


if __name__ == "__main__":
    main()

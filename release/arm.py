"""Runs a Python for 64-bit ARM, which QEMU interprets, so that the kernels are tested on another kind of processor.

    make arm                                                          the tests of the kernels
    python release/arm.py -m pytest tests/unit/test_packed_linear.py  some of them; what follows goes to that Python

The first run makes the folder .arm: Debian's Python and its libraries, which are unpacked there and not installed, and
wheels of the package index. It needs Debian on x86-64 with the package qemu-user, and the version of Python that this
Debian has. The kernels are compiled anew when their sources have changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from wheels import ROOT, TARGETS

HOME = ROOT / ".arm"
SYSTEM, PACKAGES, PACKAGE = HOME / "system", HOME / "packages", HOME / "package"
PLATFORM = "manylinux_2_28_aarch64"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
#: The programs that this one runs, with Debian's packages that have them.
PROGRAMS = {"qemu-aarch64": "qemu-user", "apt-get": "apt", "dpkg": "dpkg"}
#: What Python and the wheels need of the system.
DEBIAN = (
    f"python{VERSION}-minimal", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib", "libc6", "libgcc-s1",
    "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1",
    "libcrypt1",
)  # fmt: skip
#: Later wheels of PyTorch for ARM need libraries of NVIDIA, which QEMU cannot run.
TORCH = "torch==2.10.0"
WHEELS = (
    "numpy", "pytest", "hypothesis", "gguf", "transformers", "safetensors", "tokenizers", "huggingface-hub", "pydantic",
    "typer", "rich", "jinja2", "sympy", "networkx", "fsspec", "filelock", "setuptools",
)  # fmt: skip


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a folder where it is missing. A run that is cut off leaves another name, and the next one begins anew."""
    if folder.exists():
        return
    begun = folder.with_name(f"{folder.name}.begun")
    if begun.exists():
        shutil.rmtree(begun)
    begun.mkdir(parents=True)
    make(begun)
    begun.rename(folder)


def unpack_system(system: Path) -> None:
    """Unpack Debian's Python for ARM, with lists of packages of its own: those of this machine stay as they are."""
    apt, debs = system / "apt", system / "debs"
    for folder in (apt / "lists" / "partial", apt / "cache" / "archives" / "partial", debs):
        folder.mkdir(parents=True)
    (apt / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
    }
    command = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*command, "update"], check=True)
    if subprocess.run([*command, "download", *DEBIAN], cwd=debs).returncode != 0:
        sys.exit(
            "apt-get, whose messages are above, did not find a Python for arm64 and its libraries. The sources of packages "
            f"must be those of a Debian that has Python {VERSION}: Debian 12 has 3.11."
        )
    for deb in sorted(debs.iterdir()):
        subprocess.run(["dpkg", "-x", deb, system], check=True)


def install_packages(folder: Path) -> None:
    """Install wheels for ARM. PyTorch's comes without what it asks for, since pip would ask as if for this machine."""
    tags = [PLATFORM, "manylinux2014_aarch64", "manylinux_2_17_aarch64"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "--only-binary=:all:"]
    command += [f"--python-version={VERSION}", *(f"--platform={tag}" for tag in tags)]
    subprocess.run([*command, "--no-deps", TORCH], check=True)
    subprocess.run([*command, *WHEELS], check=True)


def build_package() -> None:
    """Copy the package, and compile its kernels for ARM where their sources have changed."""
    native = Path("outrider") / "kernels" / "native"
    sources = sorted(path for path in (ROOT / "src" / native).rglob("*") if path.suffix in (".c", ".h", ".inc"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, ROOT / "hatch_build.py"])).hexdigest()
    built, kept = PACKAGE / native, HOME / f"kernels-{digest}"
    if PACKAGE.exists():
        shutil.rmtree(PACKAGE)
    shutil.copytree(ROOT / "src", PACKAGE, ignore=shutil.ignore_patterns("kernels.so*", "__pycache__"))
    if not kept.exists():
        environment = os.environ | {
            "CC": f"{sys.executable} -m ziglang cc -target {TARGETS[PLATFORM]} -s",
            "OUTRIDER_WHEEL_PLATFORM": PLATFORM,
        }
        call = f"import pathlib, hatch_build; hatch_build.compile_kernels(pathlib.Path({str(built)!r}))"
        subprocess.run([sys.executable, "-c", call], check=True, cwd=ROOT, env=environment)
        shutil.copy(built / "kernels.so", kept)
    shutil.copy(kept, built / "kernels.so")


def python(*arguments: str) -> int:
    """Run Python for ARM in the source tree, with the package that was built for it. Returns its exit status."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (PACKAGE, PACKAGES, ROOT)))}
    binary = SYSTEM / "usr" / "bin" / f"python{VERSION}"
    return subprocess.run(["qemu-aarch64", "-L", SYSTEM, binary, *arguments], cwd=ROOT, env=environment).returncode


def main() -> None:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        packages = " ".join(PROGRAMS[program] for program in missing)
        sys.exit(f"There is no {' and no '.join(missing)}. It needs Debian on x86-64. As root: apt-get install {packages}")
    make_once(SYSTEM, unpack_system)
    make_once(PACKAGES, install_packages)
    build_package()
    sys.exit(python(*sys.argv[1:]))


if __name__ == "__main__":
    main()

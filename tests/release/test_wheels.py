"""A wheel of a release runs where there is no compiler, with its kernels, and its tag is true."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from outrider.kernels.library import FILE, available_sets

for needed in ("ziglang", "auditwheel", "build"):
    pytest.importorskip(needed, reason="the extra `release` is not installed")

ROOT = Path(__file__).parents[2]
PLATFORM = "manylinux_2_28_x86_64"
#: Writes a text with the kernels, and says which instruction sets they have.
WRITE = """
import outrider
from outrider import LLM, SamplingParams
from outrider.kernels.library import FILE, available_sets
(output,) = LLM(speculation="suffix").generate("def add(a, b):", SamplingParams(max_tokens=8, temperature=0))
print(outrider.__file__, len(output.outputs[0].token_ids), *available_sets())
"""


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return module_at(ROOT / "release" / "wheels.py")


@pytest.fixture(scope="module")
def wheel(release: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = FILE.stat().st_mtime_ns
    found: Path = release.build_wheel(PLATFORM, tmp_path_factory.mktemp("dist"))
    assert FILE.stat().st_mtime_ns == built, "the kernels of this checkout were replaced by those of the wheel"
    return found


def test_a_wheel_writes_with_its_kernels_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    # Its own package comes from the wheel; what that needs is here already.
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    bare = {"PATH": str(venv / "bin"), "HOME": str(tmp_path), "OUTRIDER_COSTS": "off"}
    done = subprocess.run([python, "-c", WRITE], env=bare, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / "outrider" / "__init__.py"), "8", *available_sets()]


def test_two_builds_of_one_commit_are_equal(release: ModuleType, wheel: Path, tmp_path: Path) -> None:
    again = release.build_wheel(PLATFORM, tmp_path)
    assert again.read_bytes() == wheel.read_bytes()


def test_a_wheel_that_needs_a_newer_system_is_refused(release: ModuleType, wheel: Path) -> None:
    with pytest.raises(SystemExit, match="needs more than its tag says"):
        release.check_tag(wheel, "manylinux_2_28_aarch64")


def test_two_libraries_for_macs_are_equal_and_say_what_they_need(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the kernels ask macOS for is in the two files without an instruction set. `test_sources.py` reads the others."""
    platform = "macosx_11_0_arm64"
    monkeypatch.setenv("OUTRIDER_WHEEL_PLATFORM", platform)
    monkeypatch.setenv("CC", release.compiler(platform))
    hook = module_at(ROOT / "hatch_build.py")
    first, second = (tmp_path / name / "native" for name in ("first", "second"))
    for copy in (first, second):
        shutil.copytree(hook.SOURCES, copy)
        hook.compile_kernels(copy, only=())
    built = (first / hook.LIBRARY).read_bytes()
    assert built == (second / hook.LIBRARY).read_bytes()
    assert release.needs_of_mac(built) == (platform, ["/usr/lib/libSystem.B.dylib"])


def test_an_installation_for_this_machine_leaves_out_what_it_does_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hook, cpuinfo = module_at(ROOT / "hatch_build.py"), tmp_path / "cpuinfo"
    monkeypatch.delenv("OUTRIDER_WHEEL_PLATFORM", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")

    def wanted(flags: str) -> list[str]:
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse2\nbugs\t\t: fma\n", "utf-8")
        return list(hook.wanted_sets(cpuinfo))

    assert wanted("avx2 fma") == list(hook.X86_SETS), "all of them, since nobody asked for less"
    monkeypatch.setenv("OUTRIDER_COMPILE_FOR", "here")
    assert wanted("") == ["generic"]
    assert wanted("avx2") == ["generic"]
    assert wanted("avx2 fma") == ["generic", "avx2"]
    wide = "avx2 fma avx512f avx512bw avx512vl avx512dq"
    assert wanted(wide) == ["generic", "avx2", "avx512"]
    assert wanted(f"{wide} avx_vnni avx512_bf16 avx512_vnni") == list(hook.X86_SETS)
    assert list(hook.wanted_sets(tmp_path / "nothing")) == list(hook.X86_SETS), "a machine that does not say what it runs"
    cpuinfo.write_text("Features\t: fp asimd\n", "utf-8")
    assert list(hook.wanted_sets(cpuinfo)) == list(hook.X86_SETS)
    monkeypatch.setenv("OUTRIDER_WHEEL_PLATFORM", "manylinux_2_28_x86_64")
    assert wanted("") == list(hook.X86_SETS), "a wheel goes to other machines"


def test_a_wheel_for_macs_that_needs_more_is_refused(release: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "outrider.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(FILE, "outrider/kernels/native/kernels.so")
    with pytest.raises(SystemExit, match="needs more than its tag says"):
        release.check_tag(wheel, "macosx_11_0_arm64")

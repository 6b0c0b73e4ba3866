"""A library of kernels that is damaged is not opened: a warning says so, stock operators compute, and `doctor` tells."""

from __future__ import annotations

import io
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.kernels import library
from outrider.lab.cli.doctor import _facts
from outrider.lab.doctor.examination import ModelFacts

BUILT = library.FILE
KEPT = BUILT.with_name(f"{BUILT.name}.sha256")
pytestmark = pytest.mark.skipif(not KEPT.exists(), reason="the kernels are not compiled here: no C compiler at build")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the library, as if it were the package's."""
    for path in (BUILT, KEPT):
        shutil.copy(path, tmp_path)
    cached = (library._examined, library._open, library.available_sets, library.kernels_for)
    monkeypatch.setattr(library, "FILE", tmp_path / BUILT.name)
    monkeypatch.delenv("OUTRIDER_KERNELS", raising=False)
    for function in cached:
        function.cache_clear()
    yield tmp_path / BUILT.name
    for function in cached:
        function.cache_clear()


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: BUILT.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def text(file: Path) -> None:
    file.write_bytes(b"x" * BUILT.stat().st_size)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def text_without_digest(file: Path) -> None:
    text(file)
    file.with_name(KEPT.name).unlink()


def nonsense_as_digest(file: Path) -> None:
    file.with_name(KEPT.name).write_text("x")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (half, f"and {BUILT.stat().st_size if BUILT.exists() else 0:,} were compiled"),
        (empty, "it has 0 bytes"),
        (text, "its content is not what was compiled"),
        (one_bit, "its content is not what was compiled"),
        (folder, "it is no file"),
        (text_without_digest, "it cannot be loaded"),
        (nonsense_as_digest, "it cannot be checked"),
    ],
)
def test_damage_is_told_and_stock_operators_compute(
    file: Path, spoil: object, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(spoil)
    spoil(file)
    with caplog.at_level(logging.WARNING):
        assert library.kernel_library() is None
        assert library.kernel_library() is None
    (record,) = caplog.records
    assert problem in record.getMessage()
    assert "python hatch_build.py" in record.getMessage()
    assert problem in (library.kernels_problem() or "")


def test_a_sound_library_is_no_problem(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library.kernels_problem() is None
    assert library.kernel_library() is not None
    assert not caplog.records


def test_an_installation_without_a_compiler_is_told_what_is_missing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.unlink()
    assert library.kernel_library() is None
    (record,) = caplog.records
    assert "no C compiler was found at the installation" in record.getMessage()
    assert "Install one" in (library.kernels_problem() or "")


def test_a_library_of_another_build_needs_no_digest(file: Path) -> None:
    file.with_name(KEPT.name).unlink()
    assert library.kernel_library() is not None


def test_whoever_switched_them_off_is_not_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half(file)
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    assert library.kernels_problem() is None


def test_doctor_tells() -> None:
    from rich.console import Console

    facts = ModelFacts(
        "m",
        "float32",
        "float32",
        "cpu",
        "paged",
        None,
        False,
        1_000,
        512,
        4096,
        None,
        {512: 8},
        kernels_problem="it has 0 bytes. Do so.",
    )
    paper = Console(width=200, record=True, file=io.StringIO())
    paper.print(_facts("target", facts))
    assert "not used. it has 0 bytes. Do so." in paper.export_text()


@pytest.mark.slow
def test_a_truncated_library_does_not_end_the_process(file: Path) -> None:
    """It did so by SIGBUS: the pages behind the end of the file are mapped and not there."""
    half(file)
    code = f"""
from pathlib import Path
from outrider.kernels import library
library.FILE = Path({str(file)!r})
assert library.kernel_library() is None
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0

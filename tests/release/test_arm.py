"""The kernels for 64-bit ARM, which QEMU runs: their tests pass, and rows of 8 bits have the bits of this processor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.kernels.library import available_sets

ROOT = Path(__file__).parents[2]
TESTS = (
    *("packed_linear", "formats", "rounded_rows", "blocks_of_files", "attention_kernel", "experts", "sampling_kernels"),
    "recurrence_kernel",
)
#: The tests take some minutes where QEMU interprets them.
pytestmark = pytest.mark.slow

if not (ROOT / ".arm" / "packages").exists():
    pytest.skip("there is no Python for ARM here: `make arm` builds one", allow_module_level=True)


def on_arm(*arguments: str) -> str:
    """What Python for ARM prints; the test fails where it does."""
    command = [sys.executable, str(ROOT / "release" / "arm.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_processor_that_qemu_is_has_every_instruction_set() -> None:
    sets = on_arm("-c", "from outrider.kernels.library import available_sets; print(*available_sets())")
    assert sets.split() == ["neon", "neondot", "neonbf16"]


@pytest.mark.parametrize("name", TESTS)
def test_the_tests_of_the_kernels_pass(name: str) -> None:
    assert " passed" in on_arm("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/unit/test_{name}.py")


@pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
def test_products_of_rows_in_8_bits_have_the_bits_of_this_processor() -> None:
    here = subprocess.run([sys.executable, "-m", "tests.release.byte_products"], capture_output=True, text=True, cwd=ROOT)
    assert here.returncode == 0, here.stderr
    assert on_arm("-m", "tests.release.byte_products") == here.stdout

"""Plant bugs in the kernels' sources, compile them, and see a check turn red."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from outrider.kernels.library import available_sets
from tests.mutation.judge import CHECKS, judge, judge_planted
from tests.mutation.mutants import Mutant
from tests.mutation.native_mutants import NATIVE_MUTANTS
from tests.mutation.test_mutants import PACKAGE, assert_caught, checks, kills, plant

NATIVE = "kernels/native/"
pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")


def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", PACKAGE.parents[1] / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Compiled in a second: functions that the compiler has to inline take four times as long as all the rest.
    module.FLAGS = ["-O0", "-std=gnu11", "-fPIC", "-Dalways_inline=unused"]
    return module


@pytest.mark.parametrize("check", checks(NATIVE_MUTANTS))
def test_the_real_kernels_pass(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "generic")
    assert judge(CHECKS[check]) is None


@pytest.mark.parametrize("mutant", kills(NATIVE_MUTANTS))
def test_the_bug_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    source = plant(mutant, tmp_path)
    if mutant.path.startswith(NATIVE):  # the others have the library as it was built
        build_script().compile_kernels(source / "outrider" / NATIVE, ("generic",))
    assert_caught(mutant, judge_planted(mutant.killer, source, "generic"))


@pytest.mark.by_change(f"src/outrider/{NATIVE}", "hatch_build.py")
def test_a_source_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    mutant = Mutant("nonsense", 0, "kernels/native/team.c", "static parallel_function parallel;", "static nonsense;")
    source = plant(mutant, tmp_path) / "outrider" / NATIVE
    (source / "kernels.c").write_text("", "ascii")  # the file beside it takes seconds, and is not asked about
    with pytest.raises(subprocess.CalledProcessError):
        build_script().compile_kernels(source, ("generic",))


@pytest.mark.by_change(f"src/outrider/{NATIVE}", "hatch_build.py")
def test_a_set_that_the_compiler_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = plant(NATIVE_MUTANTS[0], tmp_path) / "outrider" / NATIVE
    kernels = source / "kernels.c"
    kernels.write_text(kernels.read_text("utf-8").partition("#define REAL double")[0], "utf-8")  # half the work
    script = build_script()
    monkeypatch.setattr(script, "X86_SETS", {"generic": [], "avx2": ["-mavx2", "-mfma", "-mnothing-of-the-kind"]})
    script.compile_kernels(source)
    symbols = (source / "kernels.so").read_bytes()
    assert b"decode_f32_generic" in symbols
    assert b"decode_f32_avx2" not in symbols

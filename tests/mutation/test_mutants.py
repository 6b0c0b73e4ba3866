"""Plant every pitfall in a copy of the package and see a check turn red; whatever survives is listed with its reason."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.mutation.block_mutants import BLOCK_MUTANTS
from tests.mutation.boundary_mutants import BOUNDARY_MUTANTS
from tests.mutation.deep_mutants import DEEP_MUTANTS
from tests.mutation.encoder_mutants import ENCODER_MUTANTS
from tests.mutation.feature_mutants import FEATURE_MUTANTS
from tests.mutation.judge import CHECKS, CLAIM, judge, judge_planted
from tests.mutation.mutants import MUTANTS, PROBE_DIFFERS, Mutant
from tests.mutation.native_mutants import NATIVE_MUTANTS
from tests.mutation.room_mutants import ROOM_MUTANTS
from tests.mutation.running_mutants import RUNNING_MUTANTS
from tests.mutation.triton_mutants import TRITON_MUTANTS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "outrider"
PLANTED = (
    *MUTANTS,
    *BOUNDARY_MUTANTS,
    *FEATURE_MUTANTS,
    *BLOCK_MUTANTS,
    *RUNNING_MUTANTS,
    *ENCODER_MUTANTS,
    *DEEP_MUTANTS,
)
KILLED = [m for m in PLANTED if m.killer]
#: A line to break.
_FALLBACK = next(m.old for m in MUTANTS if m.killer == "empty_residual")


def by_change(mutants: Sequence[Mutant]) -> pytest.MarkDecorator:
    """`make test` runs what stands for these mutants where a file in which one is planted changed, or their check did."""
    checks = {CHECKS[m.killer].__module__.replace(".", "/") for m in mutants}
    return pytest.mark.by_change(*{f"src/outrider/{m.path}" for m in mutants}, *(f"{check}.py" for check in checks))


def kills(mutants: Sequence[Mutant]) -> list[ParameterSet]:
    """Mutants as parameters."""
    return [pytest.param(mutant, id=mutant.name, marks=by_change([mutant])) for mutant in mutants]


def checks(mutants: Sequence[Mutant]) -> list[ParameterSet]:
    """Every check of these mutants, as a parameter."""
    mine = {name: [m for m in mutants if m.killer == name] for name in sorted({m.killer for m in mutants})}
    return [pytest.param(name, marks=by_change(found)) for name, found in mine.items()]


def plant(mutant: Mutant, folder: Path) -> Path:
    """The package with the bug in it; returns what goes on PYTHONPATH.

    The folders above the file are copies, without what Python has compiled of it, and all others are links.
    """
    here, source = folder / "outrider", PACKAGE
    for name in Path(mutant.path).parts:
        _copy_files(source, here, beside=name)
        here, source = here / name, source / name
    text = here.read_text("utf-8")
    here.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    return folder


def _copy_files(source: Path, copy: Path, *, beside: str) -> None:
    """Copy the files of a folder, and link the folders in it but for one."""
    copy.mkdir()
    for entry in source.iterdir():
        if entry.is_file():
            shutil.copy2(entry, copy)
        elif entry.name == "__pycache__":
            shutil.copytree(entry, copy / entry.name, ignore=shutil.ignore_patterns(f"{Path(beside).stem}.*.pyc"))
        elif entry.name != beside:
            (copy / entry.name).symlink_to(entry)


def assert_caught(mutant: Mutant, result: subprocess.CompletedProcess[str]) -> None:
    """The killer's own claim failed, or the one error that is expected was raised; any other crash is no catch."""
    assert result.returncode != 0, f"{mutant.name} survives {mutant.killer}"
    stopped = result.stderr.strip().splitlines()[-1]
    if mutant.refused is None:
        assert stopped == CLAIM, f"{mutant.killer} crashed on {mutant.name}: {result.stderr}"
    else:
        assert stopped.partition(": ")[0].rpartition(".")[2] == mutant.refused.error, result.stderr
        assert mutant.refused.says in stopped


@pytest.mark.parametrize("check", checks(KILLED))
def test_the_real_engine_passes(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    assert judge(CHECKS[check]) is None


@pytest.mark.parametrize("mutant", kills(KILLED))
def test_the_bug_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    assert_caught(mutant, judge_planted(mutant.killer, plant(mutant, tmp_path), "off"))


def test_every_bug_still_has_its_place() -> None:
    for mutant in (*PLANTED, *NATIVE_MUTANTS, *TRITON_MUTANTS, *ROOM_MUTANTS):
        found = (PACKAGE / mutant.path).read_text("utf-8").count(mutant.old)
        assert found == 1, f"{mutant.name}: its place in {mutant.path} is gone or doubled"
    for mutant in PLANTED:
        assert mutant.killer or len(mutant.survives) > 20, f"{mutant.name} has no check, and no reason why none can tell"


@pytest.mark.by_change("tests/mutation/", "tests/warm.py")
@pytest.mark.parametrize("crash", ["raise TypeError('x')", "assert False", "import nothing_of_the_kind", "return owed /"])
def test_a_crash_is_no_catch(crash: str, tmp_path: Path) -> None:
    broken = Mutant("a patch that does not fit", 8, "verify/rules.py", _FALLBACK, crash, "empty_residual")
    result = judge_planted(broken.killer, plant(broken, tmp_path), "off")
    with pytest.raises(AssertionError, match="crashed on a patch that does not fit"):
        assert_caught(broken, result)
    with pytest.raises(AssertionError):
        assert_caught(replace(broken, refused=PROBE_DIFFERS), result)


@pytest.mark.by_change("tests/mutation/", "tests/warm.py")
def test_a_bug_that_makes_no_difference_is_no_catch(tmp_path: Path) -> None:
    harmless = Mutant("nothing", 8, "verify/rules.py", _FALLBACK, f"{_FALLBACK}  # harmless", "empty_residual")
    with pytest.raises(AssertionError, match="nothing survives empty_residual"):
        assert_caught(harmless, judge_planted(harmless.killer, plant(harmless, tmp_path), "off"))


def test_the_page_lists_every_pitfall_and_says_why_some_are_not_planted() -> None:
    page = (ROOT / "docs" / "explanation" / "losslessness.md").read_text("utf-8")
    planted, others = (
        {int(number) for number in re.findall(r"^\| (\d+) \| .+ \| .+ \|$", part, re.MULTILINE)}
        for part in page.split("## Planted bugs")[1].split("## Parameters")[0].split("why there is nothing to plant")
    )
    assert planted == {mutant.pitfall for mutant in (*MUTANTS, *RUNNING_MUTANTS)}
    assert planted | others == set(range(1, 27))
    assert planted & others == {17}  # windows are planted, and the rest changes drafts alone

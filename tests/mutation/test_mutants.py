"""Plant every pitfall in a copy of the package and see a check turn red; whatever survives is listed with its reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.mutants import MUTANTS, Mutant

PACKAGE = Path(__file__).parents[2] / "src" / "outrider"
KILLERS = Path(__file__).parent / "killers.py"
KILLED = [m for m in MUTANTS if m.killer]
SURVIVORS = [m for m in MUTANTS if not m.killer]


def run_check(name: str, source: Path, kernels: str = "off") -> subprocess.CompletedProcess[str]:
    """Run one check in a process of its own on the package below `source`, with stock operators or given kernels."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OUTRIDER_KERNELS": kernels}
    return subprocess.run(
        [sys.executable, str(KILLERS), name], env=environment, capture_output=True, text=True, timeout=300
    )


def plant(mutant: Mutant, folder: Path) -> Path:
    """A copy of the package, weights linked, with the bug in it; returns what goes on PYTHONPATH."""
    copy = folder / "outrider"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    (copy / "assets").symlink_to(PACKAGE / "assets")
    file = copy / mutant.path
    text = file.read_text("utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.name}: its place in {mutant.path} is gone or doubled"
    file.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    return folder


@pytest.mark.parametrize("check", sorted({m.killer for m in KILLED}))
def test_the_real_engine_passes(check: str) -> None:
    result = run_check(check, PACKAGE.parent)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("mutant", KILLED, ids=lambda m: m.name)
def test_the_bug_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    result = run_check(mutant.killer, plant(mutant, tmp_path))
    assert result.returncode != 0, f"pitfall {mutant.pitfall} survives {mutant.killer}"
    assert "SyntaxError" not in result.stderr
    assert "ImportError" not in result.stderr


def test_the_page_lists_every_pitfall_and_says_why_some_are_not_planted() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losslessness.md").read_text("utf-8")
    planted, others = (
        {int(number) for number in re.findall(r"^\| (\d+) \| .+ \| .+ \|$", part, re.MULTILINE)}
        for part in page.split("## Planted bugs")[1].split("## Parameters")[0].split("why there is nothing to plant")
    )
    assert planted == {mutant.pitfall for mutant in MUTANTS}
    assert planted | others == set(range(1, 26))
    assert planted & others == {17}  # windows are planted; there is no proposer to plant the rest in


@pytest.mark.parametrize("mutant", SURVIVORS, ids=lambda m: m.name)
def test_a_survivor_says_why(mutant: Mutant, tmp_path: Path) -> None:
    plant(mutant, tmp_path)
    assert len(mutant.survives) > 20

"""Plant bugs in the kernels for GPUs and see a check turn red."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.judge import CHECKS, judge, judge_planted
from tests.mutation.mutants import Mutant
from tests.mutation.test_mutants import assert_caught, checks, kills, plant
from tests.mutation.triton_mutants import TRITON_MUTANTS

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("check", checks(TRITON_MUTANTS))
def test_the_real_kernels_pass(check: str) -> None:
    assert judge(CHECKS[check]) is None


@pytest.mark.parametrize("mutant", kills(TRITON_MUTANTS))
def test_the_bug_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    assert_caught(mutant, judge_planted(mutant.killer, plant(mutant, tmp_path), "off"))

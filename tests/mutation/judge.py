"""Runs one check and says what stopped it: of this package, or of a copy with a bug in it.

`python -m tests.mutation.judge CHECK` runs a check, and writes what stopped it as the last line of its errors.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import Phase, settings

from tests.chance import begin_chance
from tests.mutation import (
    block_killers,
    boundary_killers,
    encoder_killers,
    feature_killers,
    killers,
    running_killers,
    triton_killers,
)
from tests.warm import warm_python

CLAIM = "the claim does not hold"
TESTS = Path(__file__).resolve().parents[1]
#: Seconds that a check may take.
_LIMIT = 300

#: By name.
CHECKS: dict[str, Callable[[], None]] = {
    name: check
    for module in (
        killers,
        block_killers,
        boundary_killers,
        encoder_killers,
        feature_killers,
        running_killers,
        triton_killers,
    )
    for name, check in vars(module).items()
    if callable(check) and getattr(check, "__module__", None) == module.__name__ and not name.startswith("_")
}


def judge(check: Callable[[], None]) -> str | None:
    """What stopped it, in one line: CLAIM where an assertion of the tests failed, else the error, which may be a crash.

    None where it came through.
    """
    begin_chance(check.__name__)
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if isinstance(error, AssertionError) and place.is_relative_to(TESTS):  # one of the package is a crash like others
            return CLAIM
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def judge_planted(check: str, source: Path, kernels: str) -> subprocess.CompletedProcess[str]:
    """Run a check on the package below `source`, with stock operators or given kernels, in a process of its own."""
    where = {"PYTHONPATH": str(source), "OUTRIDER_KERNELS": kernels}
    return warm_python().run("tests.mutation.judge", check, timeout=_LIMIT, **where)


def main(name: str) -> int:
    """The exit status: 1 where something stopped the check."""
    torch.set_num_threads(1)
    settings.register_profile("found", phases=(Phase.explicit, Phase.generate))  # what shows a bug need not be small
    settings.load_profile("found")
    stopped = judge(CHECKS[name])
    if stopped is not None:
        sys.stderr.write(f"\n{stopped}\n")
    return int(stopped is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

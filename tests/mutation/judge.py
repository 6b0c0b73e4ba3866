"""Runs one check and says what stopped it; `python judge.py NAME`, with the package to judge and the repository's root on
PYTHONPATH.

The last line on standard error is CLAIM where an assertion of the tests failed, else the error, which may be a crash.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from tests.chance import begin_chance
from tests.mutation import boundary_killers, killers

CLAIM = "the claim does not hold"
TESTS = Path(__file__).resolve().parents[1]

#: By name.
CHECKS: dict[str, Callable[[], None]] = {
    name: check
    for module in (killers, boundary_killers)
    for name, check in vars(module).items()
    if callable(check) and getattr(check, "__module__", None) == module.__name__ and not name.startswith("_")
}


def judge(check: Callable[[], None]) -> str | None:
    """What stopped it, in one line; None where it came through."""
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    stopped = judge(CHECKS[sys.argv[1]])
    if stopped is not None:
        sys.exit(f"\n{stopped}")

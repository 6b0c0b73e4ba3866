"""Runs one check and says what stopped it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

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

CLAIM = "the claim does not hold"
TESTS = Path(__file__).resolve().parents[1]

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

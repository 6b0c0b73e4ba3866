"""The instruction sets that tests run the kernels with: the best one of this machine always, the others by change."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from outrider.kernels.library import available_sets

_BY_CHANGE = pytest.mark.by_change("src/outrider/kernels/", "src/outrider/model/", "hatch_build.py")


def instruction_sets() -> list[ParameterSet]:
    """The names as parameters; none where the kernels are not compiled."""
    names = available_sets()
    return [pytest.param(name, marks=[] if name == names[-1] else [_BY_CHANGE]) for name in names]

"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from tests.kernel_sets import instruction_sets


@pytest.fixture(params=["off", *instruction_sets()])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with stock operators and with the kernels of every instruction set that this machine has."""
    monkeypatch.setenv("OUTRIDER_KERNELS", request.param)
    return str(request.param)

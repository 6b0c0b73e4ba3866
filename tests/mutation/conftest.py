"""Fixtures of the tests that plant bugs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mutation.warm import WarmProcess


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmProcess]:
    """Runs checks; one a worker."""
    process = WarmProcess()
    yield process
    process.close()

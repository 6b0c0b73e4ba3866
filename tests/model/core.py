"""Parameters of a test, of which a few always run, standing for all; the others belong to another tier (tests/tiers.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

#: Where drafts are made, chosen and verified, and what proves it.
DRAFTING = (
    *(f"src/outrider/{part}/" for part in ("propose", "heads", "verify", "engine/drafting", "lab/prove")),
    *("tests/mutation/", "tests/statistical/"),
)
#: Of what reads and writes checkpoints in other formats than those of transformers.
of_formats = pytest.mark.by_change(
    *(f"src/outrider/{part}/" for part in ("loading", "lab/convert", "heads/formats", "kernels")), "tests/model/"
)


def core(values: Iterable[Any], chosen: Collection[Any], *paths: str, slow: Collection[Any] = ()) -> list[ParameterSet]:
    """All values as parameters, a tuple as several of one test.

    Args:
        values: What the test is asked for.
        chosen: Those that always run.
        paths: The others run where one of these changed; without any they are slow.
        slow: Those that are slow all the same.
    """
    values = list(values)
    unknown = [value for value in (*chosen, *slow) if value not in values]
    assert not unknown, f"there are no such parameters: {unknown}"
    others = pytest.mark.by_change(*paths) if paths else pytest.mark.slow

    def marks(value: Any) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] if value in slow else [] if value in chosen else [others]

    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks(value)) for value in values]


def in_turn(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As many combinations as the longest axis has values, with those of the other axes in turn: each value occurs.

    None where an axis is empty.
    """
    columns = [list(axis) for axis in axes]
    if not all(columns):
        return []
    return [tuple(column[place % len(column)] for column in columns) for place in range(max(map(len, columns)))]

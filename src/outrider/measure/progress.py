"""Callbacks that show how far a long measurement is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The callbacks that show how far a run is.

    Attributes:
        expect: Called with the name of what comes next and its number of turns.
        advance: Called after each turn.
    """

    expect: Callable[[str, int], None] = lambda what, turns: None
    advance: Callable[[], None] = lambda: None

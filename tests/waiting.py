"""Waiting for what another process or thread does: until it has happened, and for no fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
#: Long enough for a machine that has much else to do. Whoever waits for so long waits in vain.
LIMIT = 120.0


def wait_until(condition: Callable[[], T], what: str, limit: float = LIMIT) -> T:
    """Ask again and again until a condition holds; coroutines call it by `asyncio.to_thread`.

    Args:
        condition: What is asked. Whatever is true ends the waiting.
        what: Says in the failure what was waited for.
        limit: The most seconds.

    Returns:
        What the condition has said at last.
    """
    end = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < end, f"after {limit:g} seconds there is still no {what}"
        time.sleep(0.02)
    return found

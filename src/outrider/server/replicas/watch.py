"""Logs how many replicas run, while they start and when one is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from outrider.server.logs import log

#: How often they are counted. A replica that was lost takes longer than that to be replaced.
_SECONDS = 0.5


@contextmanager
def watched(count: int, num_running: Callable[[], int]) -> Iterator[Callable[[], None]]:
    """Within the block, log how many replicas run whenever that changes.

    Args:
        count: How many there should be.
        num_running: How many there are. Errors that it raises are taken for no answer.

    Yields:
        What looks at once, and not only at the next turn.
    """
    over, lock = threading.Event(), threading.Lock()
    known: int | None = None

    def look() -> None:
        nonlocal known
        with lock, suppress(Exception):  # who serves tells of an error; here it means only that nothing is known
            found = num_running()
            if found != known:
                _tell(known, found, count)
                known = found

    def watch() -> None:
        look()
        while not over.wait(_SECONDS):
            look()

    thread = threading.Thread(target=watch, name="outrider-watch", daemon=True)
    thread.start()
    try:
        yield look
    finally:
        over.set()
        thread.join()


def _tell(before: int | None, running: int, count: int) -> None:
    facts = {"running": running, "replicas": count}
    if before is not None and running < before:
        log("a replica was lost", facts, logging.ERROR)
    else:
        log("replicas run" if running else "replicas start", facts)

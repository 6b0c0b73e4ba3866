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
def watched(count: int, num_running: Callable[[], int]) -> Iterator[None]:
    """Within the block, log how many replicas run whenever that changes.

    Args:
        count: How many there should be.
        num_running: How many there are. Errors that it raises are taken for no answer.
    """
    over = threading.Event()

    def watch() -> None:
        known: int | None = None
        while True:
            with suppress(Exception):  # who serves tells of it; here it means only that nothing is known
                found = num_running()
                if found != known:
                    _tell(known, found, count)
                known = found
            if over.wait(_SECONDS):
                return

    thread = threading.Thread(target=watch, name="outrider-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(before: int | None, running: int, count: int) -> None:
    facts = {"running": running, "replicas": count}
    if before is not None and running < before:
        log("a replica was lost", facts, logging.ERROR)
    else:
        log("replicas run" if running else "replicas start", facts)

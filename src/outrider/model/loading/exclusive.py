"""The lock under which models are loaded, one at a time in a process; a load that nobody waits for any more ends.

transformers replaces parts of PyTorch and of itself while it builds a model: the default dtype, the functions that
initialise weights, the one that ties them. Where two threads do so at once, the second takes the first one's replacements
for the originals, and puts these back in the end. So all loads of this process take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.model import hf

#: How often, in seconds, a load that waits for its turn looks whether it is still wanted.
_POLL = 0.1

_turn = threading.RLock()  # a load may load more, as a target its draft model
_thread = threading.local()


class AbandonedLoad(BaseException):
    """Nobody waits for this load any more. It passes whatever catches errors, and only the thread that loads sees it."""


@contextmanager
def exclusive_transformers() -> Iterator[None]:
    """Within the block, no other thread has transformers load or save a model. What transformers swapped is put back,
    however the block ends, and it shows no bars."""
    while not _turn.acquire(timeout=_POLL):
        check_wanted()
    try:
        with hf.swaps_undone(), hf.loading_bars(check_wanted):
            yield
    finally:
        _turn.release()


@contextmanager
def abandonable(unwanted: threading.Event) -> Iterator[None]:
    """Within the block, loads in this thread end at their next stage once `unwanted` is set."""
    _thread.unwanted = unwanted
    try:
        yield
    finally:
        _thread.unwanted = None


def check_wanted() -> None:
    """Raise AbandonedLoad where nobody waits for what this thread loads; called between the stages of a load."""
    unwanted = getattr(_thread, "unwanted", None)
    if unwanted is not None and unwanted.is_set():
        raise AbandonedLoad

"""Loads one at a time, with errors of ours: the lock, and calls of transformers."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.errors import ModelLoadError
from outrider.loading import hf_modules

# --- The lock under which models are loaded, one at a time in a process; a load that nobody waits for any more ends.
#
# transformers replaces parts of PyTorch and of itself while it builds a model: the default dtype, the functions that
# initialise weights, the one that ties them. Where two threads do so at once, the second takes the first one's
# replacements for the originals, and puts these back in the end. So all loads of this process take turns.


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
        with hf_modules.swaps_undone(), hf_modules.loading_bars(check_wanted):
            yield
    finally:
        _turn.release()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Within the block, Python does not search for unused objects. The objects of a load all stay, but for the merges of a
    tokenizer: a hundred thousand that live for a moment, for which all objects of the process would be searched."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


# --- Calls of transformers that read files, whose errors become ours.


def attempt(model: str, problem: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call into transformers; whatever it raises becomes a ModelLoadError that keeps the first line of the reason."""
    check_wanted()
    try:
        with exclusive_transformers():
            return function(*args, **kwargs)
    except Exception as error:
        raise ModelLoadError(model, f"{problem} ({_reason(error)})", _load_remedy(model, error)) from error


def _reason(error: Exception) -> str:
    """The first line of what an error says, and the second where the first announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def _load_remedy(model: str, error: Exception) -> str:
    from huggingface_hub.errors import LocalEntryNotFoundError

    if "trust_remote_code" in str(error):
        return "It brings code of its own. If you trust that code, pass trust_remote_code=True."
    if os.path.isdir(model):
        return "Check the files in this folder."
    if isinstance(error.__cause__, LocalEntryNotFoundError):  # the hub does not answer
        return (
            "There is no folder of that name here. Give one, or connect to the network; where there is none, "
            "HF_HUB_OFFLINE=1 in the environment spares the retries."
        )
    return "There is no folder of that name here. Give one, or check the hub id."

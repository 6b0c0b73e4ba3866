"""The process in which untrusted structures are compiled on trial.

It reads a line of JSON for each structure, and answers with a line. It ends with whoever started it, since its input ends
then, at the latest when the trial under way is over.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from outrider.structured.structures import StructureError, Vocabulary, Written, compiled


def main() -> None:
    """Try structures until nobody asks any more. The first line is the vocabulary."""
    for name in ("SIGINT", "SIGTERM"):  # what is sent to the whole group concerns whoever asks
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _leave_no_core()
    lines = sys.stdin.buffer
    import llguidance

    vocabulary = Vocabulary(**json.loads(lines.readline())).wrapped(llguidance)
    _answer("ready")
    for line in lines:
        asked = json.loads(line)
        _limit(asked["seconds"], asked["num_bytes"])
        _answer(_reason(Written(asked["language"], asked["text"]), vocabulary, llguidance))


def _reason(written: Written, vocabulary: Any, library: Any) -> str | None:
    """Why a structure cannot be followed; None where it can."""
    try:
        compiled(written, vocabulary, library)
    except StructureError as error:
        return str(error)
    finally:
        _limit(0.0, None)
    return None


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _leave_no_core() -> None:
    try:
        import resource
    except ImportError:  # Windows writes none
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _limit(seconds: float, num_bytes: int | None) -> None:
    """Let the system end this process when it has taken so much more; no code in it is asked. Whoever waits has a clock of
    his own for systems that cannot do this.

    Args:
        seconds: Of the processor's time; 0 for no limit.
        num_bytes: Of memory; None for no limit.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    taken = Path("/proc/self/statm")
    if not taken.exists():
        return
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = most if num_bytes is None else int(taken.read_text().split()[0]) * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))

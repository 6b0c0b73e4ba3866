"""Tries untrusted structures in a limited process, and refuses those that take too much work."""

from __future__ import annotations

import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock, Timer
from typing import Any
from weakref import finalize

from outrider.errors import ClosedError, TrialError
from outrider.structured.structures import StructureError, StructureVocabulary, Written, compiled

#: What a trial may take of a processor. Schemas of 64 KB, 10,000 choices and literals of 64,000 characters take 0.2 s.
SECONDS = 1.0
#: And of memory, beside what the process has when it has read the vocabulary.
NUM_BYTES = 512 * 2**20
#: How long a trial may last where the processors are taken, or the system cannot limit what a process takes.
_PATIENCE = 20.0
#: How the system says that a process was ended from outside.
_KILLED = -9
#: Verdicts that are kept, so that one structure in many requests is tried once.
_NUM_VERDICTS = 1_000
#: What the process runs. It finds this package where its parent does.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from outrider.structured.trials import main; main()"
#: Why a structure was refused whose trial did not come to its end.
TOO_MUCH_WORK = f"too much work: more than {SECONDS:g} s of a processor's time or {NUM_BYTES >> 20} MiB of memory"


class Trials:
    """Tries structures in other processes. They are started when they are first needed, as many as threads ask at a time;
    one that has ended is replaced when the next is needed.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._idle: list[_Trier] = []
        self._all: set[_Trier] = set()
        self._closed = False
        finalize(self, _end_all, self._all)

    def verdict(self, written: Written, vocabulary: Callable[[], StructureVocabulary]) -> str | None:
        """Why a structure cannot be followed; None where it can, in little time and memory."""
        key = sha256(f"{written.language}\0{written.text}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        trier = self._take(vocabulary)
        try:
            found = trier.reason(written)
        except EOFError:
            self._forget(trier)
            if trier.was_killed:  # which may say more of this machine than of the structure
                return TOO_MUCH_WORK
            found = TOO_MUCH_WORK
        except BaseException:
            self._forget(trier)
            raise
        else:
            with self._lock:
                self._idle.append(trier)
        self._keep(key, found)
        return found

    def prepare(self, vocabulary: StructureVocabulary) -> None:
        """Start a process, which reads the vocabulary while the caller does other work."""
        trier = self._take(lambda: vocabulary)
        with self._lock:
            self._idle.append(trier)

    def close(self) -> None:
        """End all processes, and the trials under way with them."""
        with self._lock:
            self._closed = True
            _end_all(self._all)

    def _take(self, vocabulary: Callable[[], StructureVocabulary]) -> _Trier:
        with self._lock:
            if self._closed:
                raise ClosedError
            while self._idle:
                trier = self._idle.pop()
                if trier.is_alive:
                    return trier
                trier.end()
                self._all.discard(trier)
            trier = _Trier()
            self._all.add(trier)
        try:
            trier.begin(vocabulary())
        except BaseException:
            self._forget(trier)
            raise
        return trier

    def _forget(self, trier: _Trier) -> None:
        trier.end()
        with self._lock:
            self._all.discard(trier)
            if self._closed:
                raise ClosedError

    def _keep(self, key: bytes, found: str | None) -> None:
        with self._lock:
            self._verdicts[key] = found
            if len(self._verdicts) > _NUM_VERDICTS:
                self._verdicts.popitem(last=False)


class _Trier:
    """One such process."""

    def __init__(self) -> None:
        self._was_slow = self._is_ready = False
        try:
            # In a session of its own, Ctrl-C in a terminal does not reach it.
            self._process = Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise TrialError(f"a process that tries structures cannot be started ({error})") from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Tells whether it was ended from outside: by the clock, by whoever needed its memory, or by hand."""
        return self._was_slow or self._process.returncode == _KILLED

    def begin(self, vocabulary: StructureVocabulary) -> None:
        """Have it read the vocabulary. It takes a second or two where that is large, and nobody waits for it here."""
        with self._ready_or_ended():
            self._tell(asdict(vocabulary))

    def reason(self, written: Written) -> str | None:
        """Why a structure cannot be followed."""
        if not self._is_ready:
            with self._ready_or_ended():
                self._answer()
            self._is_ready = True
        self._tell({**asdict(written), "seconds": SECONDS, "num_bytes": NUM_BYTES})
        found: str | None = self._answer()
        return found

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what it was not told any more
                pipe.close()
        self._process.wait()

    @contextmanager
    def _ready_or_ended(self) -> Iterator[None]:
        try:
            yield
        except EOFError:
            code = self._process.wait()
            raise TrialError(f"a process that tries structures ended before it was ready, with {code}") from None

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        told = json.dumps(message).encode() + b"\n"
        with self._patience():
            self._process.stdin.write(told)
            self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        with self._patience():
            line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    @contextmanager
    def _patience(self) -> Iterator[None]:
        clock = Timer(_PATIENCE, self._give_up)
        clock.daemon = True
        clock.start()
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError where it was ended meanwhile
            raise EOFError from error
        finally:
            clock.cancel()

    def _give_up(self) -> None:
        self._was_slow = True
        self._process.kill()


def _end_all(triers: set[_Trier]) -> None:
    """End processes; a thread that waits for one finds that it has ended."""
    for trier in list(triers):
        trier.end()


# --- The process in which untrusted structures are compiled on trial.
#
# It reads a line of JSON for each structure, and answers with a line. It ends with whoever started it, since its input
# ends then, at the latest when the trial under way is over.


def main() -> None:
    """Try structures until nobody asks any more. The first line is the vocabulary."""
    for name in ("SIGINT", "SIGTERM"):  # what is sent to the whole group concerns whoever asks
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _leave_no_core()
    lines = sys.stdin.buffer
    import llguidance

    vocabulary = StructureVocabulary(**json.loads(lines.readline())).wrapped(llguidance)
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

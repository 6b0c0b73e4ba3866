"""A process that holds one engine and answers one request at a time. If it dies, another one replaces it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from outrider.errors import EngineAnswerError

if TYPE_CHECKING:
    from outrider.bench.peers.base import PeerEngine, PeerRequest, PeerRun

#: The seconds that a process may take to end by itself.
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Failure:
    """The error of an engine in words, since its exceptions may not be sendable between processes."""

    problem: str


class Worker:
    """Starts the process when it is needed, and ends it when it does not answer.

    Args:
        name: The name of the engine, for errors.
        build: The function that builds the engine. The process must be able to import it.
    """

    def __init__(self, name: str, build: Callable[[], PeerEngine]) -> None:
        self._name, self._build = name, build
        self._process: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether there is a process, which still holds what was loaded."""
        return self._process is not None and self._process.is_alive()

    def ask(self, request: PeerRequest, deadline: float) -> PeerRun:
        """The answer to a request.

        Args:
            request: One text to write.
            deadline: The seconds after which the process is ended.

        Raises:
            EngineAnswerError: The engine raised, its process died, or the deadline passed.
        """
        if not self.is_alive:
            self.close()
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(request)
            if not self._connection.poll(deadline):
                raise self._error(f"no answer to {request.mode.name} within {deadline:g} s", "Its process was ended.")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(request) from error
        if isinstance(answer, Failure):
            raise EngineAnswerError(self._name, f"{request.mode.name} raises {answer.problem}", "Leave out this mode.")
        run: PeerRun = answer
        return run

    def close(self) -> None:
        """End the process, if there is one. A later `ask` starts another."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()  # a living process ends when its connection is closed
        if process is not None:
            process.join(_LEAVE_SECONDS)
            process.kill()
            process.join()
            process.close()

    def _start(self) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(self._build, theirs), name=self._name, daemon=True)
        with _interrupts_wait():
            self._process.start()
        theirs.close()  # so that the pipe ends when the process ends

    def _death(self, request: PeerRequest) -> EngineAnswerError:
        assert self._process is not None
        self._process.join(_LEAVE_SECONDS)
        code = self._process.exitcode
        return self._error(f"its process died in {request.mode.name} (exit code {code})", "See what it wrote to stderr.")

    def _error(self, problem: str, remedy: str) -> EngineAnswerError:
        if self._process is not None:
            self._process.kill()
        self.close()
        return EngineAnswerError(self._name, problem, remedy)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C back from this process within the block, and from a process that is started there until it handles it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows: a started process inherits no mask
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, and it would remove the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(build: Callable[[], PeerEngine], connection: Connection[Any, Any]) -> None:
    """The main function of the process: build the engine at the first request, and answer until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process handles interrupts, since it can tell the user
    engine: PeerEngine | None = None
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            engine = engine or build()
            answer: PeerRun | Failure = engine.generate(request)
        except Exception as error:  # every error goes into the report and must not end this process
            answer = Failure(f"{type(error).__name__}: {error}")
        connection.send(answer)

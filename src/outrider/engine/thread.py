"""The thread that owns an engine: it loads, takes commands, steps, and hands updates to callers who wait for them."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch

from outrider.config import RequestOptions
from outrider.engine.engine import Engine
from outrider.engine.sequence import Request, request_output
from outrider.errors import ClosedError, EngineBusyError, EngineDiedError, EngineStalledError, OutriderError
from outrider.kernels.library import check_process
from outrider.loading.exclusive import abandonable
from outrider.params import RequestOutput, SamplingParams, StreamPiece
from outrider.propose.settings import SpeculationConfig

# --- The updates that the engine's thread hands over after a step, and the mailboxes that receive them.


@dataclass(frozen=True)
class RequestUpdate:
    """News of a request from a step."""

    request_id: int
    pieces: tuple[StreamPiece, ...]  # what was added to its texts, where it is streamed
    output: RequestOutput | None  # what it came to, or its error; None while it goes on


class Dispatcher(Protocol):
    """Carries the updates of a step to the mailboxes that it serves, all at once."""

    def deliver(self, updates: Sequence[tuple[Mailbox, RequestUpdate]]) -> None:
        """Called in the engine's thread. It must not wait for anybody. Where it raises, nobody reads these updates any
        more, and the requests are cancelled."""
        ...


class Mailbox(Protocol):
    """Says where the updates of some requests go. Requests whose mailbox nobody holds any more are cancelled."""

    @property
    def dispatcher(self) -> Dispatcher:
        """The carrier of updates to this place."""
        ...


class Inbox:
    """A mailbox that a thread waits at."""

    def __init__(self) -> None:
        self._updates: SimpleQueue[RequestUpdate] = SimpleQueue()

    @property
    def dispatcher(self) -> Dispatcher:
        return _BY_HAND

    def put(self, update: RequestUpdate) -> None:
        self._updates.put(update)

    def wait(self) -> RequestUpdate:
        """The next update. An interrupt breaks the wait off."""
        check_process()
        return self._updates.get()


class _ByHand:
    """Puts every update into its inbox."""

    def deliver(self, updates: Sequence[tuple[Mailbox, RequestUpdate]]) -> None:
        for mailbox, update in updates:
            assert isinstance(mailbox, Inbox)
            mailbox.put(update)


_BY_HAND = _ByHand()


# --- The thread that owns an engine: it loads models, takes commands between steps, steps, and hands over updates.
#
# The threads that compute belong to the thread that starts them, and the engine's books to one thread at a time. So
# everybody else asks: a command waits in a queue until the engine rests between two steps, and updates come back
# through a mailbox.


logger = logging.getLogger(__name__)

#: After so many steps in a row that broke off, the engine begins anew.
_PATIENCE = 3
#: Seconds that a process which was interrupted waits for the stage of a load that no interrupt can break off.
LONGEST_STAGE = 3.0

T = TypeVar("T")
Updates = list[tuple[Mailbox, RequestUpdate]]


class _Command(Generic[T]):
    """A call to make in the engine's thread, and what comes of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self.outcome: Future[T] = Future()

    def carry_out(self) -> None:
        call, self._call = self._call, None
        if call is None or not self.outcome.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            call = None  # whoever waits may let the engine go as soon as he is woken
            self.outcome.set_exception(error)
        else:
            call = None
            self.outcome.set_result(result)


_Commands = SimpleQueue[_Command[Any] | None]


@dataclass(frozen=True)
class Health:
    """Says how the engine has fared."""

    num_broken_steps: int = 0  # steps that were broken off
    num_rebuilds: int = 0  # how often the engine began anew, with an empty memory
    last_error: str | None = None  # what broke the latest one off
    #: Whether the engine's thread still runs. Without it nothing can be written any more.
    alive: bool = True
    #: Methods whose proposers bring nothing but faults, so that texts are written without them for now.
    switched_off: tuple[str, ...] = ()


class _Pulse:
    """Since when the thread has been at work on one command or step, by the clock of `monotonic`; None while it rests."""

    def __init__(self) -> None:
        self.since: float | None = None


class EngineThread:
    """The engine and its thread, which ends with `close`, with the last reference, or with the process.

    It computes with as many threads as PyTorch has where this is made. A request whose mailbox is gone is cancelled, so
    that nobody who was interrupted, or who forgot a stream, leaves work behind.
    """

    def __init__(self) -> None:
        check_process()
        self._commands: _Commands = SimpleQueue()
        self._served: dict[int, tuple[Request, ref[Mailbox]]] = {}
        self._engine: Engine | None = None
        self._closed = False
        self._num_failures = 0
        self.health = Health()
        self._process = os.getpid()
        self._pulse = _Pulse()
        self._unwanted = threading.Event()
        arguments = (self._commands, ref(self), self._pulse, torch.get_num_threads(), self._unwanted)
        self._thread = threading.Thread(target=_work, args=arguments, name="outrider-engine", daemon=True)
        self._thread.start()
        _alive[self._thread] = self._commands, self._unwanted
        finalize(self, _end, self._commands).atexit = False

    # -- for everybody else --------------------------------------------------------------------------------------------

    def load(self, build: Callable[[], Engine]) -> None:
        """Have the engine built where it will live. Where that fails, or is interrupted, the thread ends: a load that is
        under way does so at its next stage. It raises what `build` raises."""

        def command() -> None:
            self._engine = build()

        try:
            self.call(command)
        except BaseException:
            self._closed = True
            self._unwanted.set()
            _end(self._commands)
            raise

    @property
    def engine(self) -> Engine:
        """The engine, when all commands that were given before are carried out. It may be driven by hand while it rests."""
        if not self._closed and not self._is_mine():
            self.call(lambda: None)
        if self._engine is None:
            raise ClosedError
        return self._engine

    @property
    def busy_seconds(self) -> float:
        """Returns how long the command or the step under way has taken so far; 0 at rest. In an engine that hangs it only
        grows."""
        since = self._pulse.since
        return 0.0 if since is None else monotonic() - since

    def check(self) -> None:
        """Raise where there is no engine any more, or not in this process."""
        check_process()
        if self._closed:
            raise ClosedError
        if not self.health.alive:
            raise EngineDiedError

    def prepare(
        self,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        speculation: SpeculationConfig,
        *,
        prompt: str | None,
        options: RequestOptions,
    ) -> Request:
        """A request that can be admitted: `Engine.prepare`, in the thread that calls this, while the engine works."""
        self.check()
        engine = self._engine
        if engine is None:
            raise ClosedError
        return engine.prepare(prompt_token_ids, params, speculation, prompt=prompt, options=options)

    def call(self, function: Callable[[], T]) -> T:
        """Have a function called between two steps, and wait for it; raises what it raises, or what `check` does. In the
        engine's own thread, where something that a step has called asks for it, that is an EngineBusyError."""
        if self._is_mine():
            raise EngineBusyError
        return self.post(function).result()

    def post(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called between two steps, without waiting."""
        self.check()
        command = _Command(function)
        self._commands.put(command)
        if not self.health.alive:  # it died since the check, and nobody takes commands any more
            _refuse_all(self._commands)
        return command.outcome

    def admit(self, requests: Sequence[Request], mailbox: Mailbox) -> Future[list[OutriderError | None]]:
        """Queue prepared requests together, so that they share their first batch; updates go to the mailbox. Returns for
        each request the error with which it was refused, or None."""
        if self._is_mine():
            raise EngineBusyError
        return self.post(partial(self._admit, tuple(requests), ref(mailbox)))

    def cancel(self, request: Request) -> None:
        """Stop a request; its last update brings what it has written. It never waits; an ended request stays as it is."""
        self.post(partial(self._cancel, request))

    def drop(self, request: Request) -> None:
        """Cancel a request that nobody waits for any more. It never waits, and may be called anywhere and twice."""
        if os.getpid() == self._process and not self._closed:
            self._commands.put(_Command(partial(self._drop, request)))

    def close(self) -> None:
        """End what runs with a ClosedError, and free the engine. A forked process gives up what it cannot use."""
        if self._closed:
            return
        if os.getpid() != self._process:
            self._closed, self._engine = True, None
            return
        if self.health.alive:
            self.call(self._close)
        self._closed, self._engine = True, None
        _end(self._commands)
        self._thread.join()

    def _is_mine(self) -> bool:
        return threading.current_thread() is self._thread

    # -- in the engine's thread ----------------------------------------------------------------------------------------

    def _admit(self, requests: Sequence[Request], mailbox: ref[Mailbox]) -> list[OutriderError | None]:
        return [self._refusal(request, mailbox) for request in requests]

    def _refusal(self, request: Request, mailbox: ref[Mailbox]) -> OutriderError | None:
        assert self._engine is not None
        try:
            self._engine.admit(request)
        except OutriderError as error:
            return error  # this frame, which the error points at, does not point back
        self._served[request.request_id] = request, mailbox
        return None

    def _cancel(self, request: Request) -> None:
        if self._engine is not None:
            self._engine.cancel(request)

    def _drop(self, request: Request) -> None:
        self._served.pop(request.request_id, None)
        if self._engine is not None:
            self._engine.cancel(request)
        _release(request)

    def _close(self) -> None:
        for request, _ in self._served.values():
            request.error = ClosedError()
            if self._engine is not None:
                self._engine.cancel(request)
        self._engine = None
        _deliver(self._give_up())

    @property
    def serving(self) -> bool:
        """True if requests are served. Those that somebody drives by hand are left to him."""
        return self._engine is not None and bool(self._served)

    def advance(self) -> None:
        """A step, for the requests that are served.

        It keeps no updates: errors in them point at the frames of the step, and so at this one.
        """
        engine = self._engine
        assert engine is not None
        num_faults = engine.stats.num_faults
        try:
            engine.step()
            self._num_failures = 0
        except BaseException as error:
            self._recover(engine, error)
        else:
            if engine.stats.num_faults != num_faults:
                self._check_books(engine)
        off = tuple(sorted(engine.proposers.switched_off))
        if off != self.health.switched_off:
            self.health = replace(self.health, switched_off=off)

    def _recover(self, engine: Engine, error: BaseException) -> None:
        """Go on after a step was broken off, and those whom it served have ended.

        Where the books are wrong now, or where no step succeeds any more, the engine begins anew.
        """
        logger.error("a step was broken off: %r", error, exc_info=not isinstance(error, OutriderError))
        self._num_failures += 1
        self.health = replace(self.health, num_broken_steps=self.health.num_broken_steps + 1, last_error=repr(error))
        if self._num_failures >= _PATIENCE or isinstance(error, EngineStalledError):
            self._begin_anew(engine, error)
        else:
            self._check_books(engine)

    def _check_books(self, engine: Engine) -> None:
        """After a fault: where the books do not agree, the engine begins anew."""
        try:
            engine.check_integrity()
        except Exception as error:
            logger.exception("the books do not agree")
            self._begin_anew(engine, error)

    def _begin_anew(self, engine: Engine, error: BaseException) -> None:
        engine.rebuild([request for request, _ in self._served.values()], error)
        self._num_failures = 0
        self.health = replace(self.health, num_rebuilds=self.health.num_rebuilds + 1, last_error=repr(error))

    def gather(self) -> Updates:
        """The news of the step. Who has ended, or has no reader any more, is served no longer."""
        updates: Updates = []
        for request, mailbox in list(self._served.values()):
            updates += self._updates(request, mailbox)
            if request.finished:
                del self._served[request.request_id]
                _release(request)
            elif mailbox() is None:
                self._drop(request)
        return updates

    def surrender(self, error: Exception) -> Updates:
        """The errors for all who are served, where even the books of this thread have failed; the engine begins anew."""
        logger.critical("the engine's thread had to begin anew", exc_info=error)
        assert self._engine is not None
        self._begin_anew(self._engine, error)
        return self._give_up()

    def die(self, error: BaseException) -> Updates:
        """The errors for all who are served, where this thread cannot go on."""
        logger.critical("the engine's thread has died", exc_info=error)
        self.health = replace(self.health, alive=False, last_error=repr(error))
        for request, _ in self._served.values():
            request.error = EngineDiedError()
        return self._give_up()

    def _give_up(self) -> Updates:
        """The last updates of all requests, which have ended, and are served no longer."""
        served, self._served = list(self._served.values()), {}
        updates = [update for request, mailbox in served for update in self._updates(request, mailbox)]
        for request, _ in served:
            _release(request)
        return updates

    def _updates(self, request: Request, mailbox: ref[Mailbox]) -> Updates:
        """The update with what is new of a request, if anything is and somebody reads it."""
        reader, pieces = mailbox(), tuple(request.outbox or ())
        if request.outbox:
            request.outbox = []
        if reader is None or not (pieces or request.finished):
            return []
        output = request_output(request) if request.finished else None
        return [(reader, RequestUpdate(request.request_id, pieces, output))]


def _release(request: Request) -> None:
    """Let go what a request that has ended points at: whoever still has it keeps no model alive."""
    request.sequences.clear()
    request.error = None  # nor the frames in which it arose


def _work(
    commands: _Commands, owner: ref[EngineThread], pulse: _Pulse, num_threads: int, unwanted: threading.Event
) -> None:
    """The thread's life, and its death: nobody may wait for a thread that is no more."""
    torch.set_num_threads(num_threads)
    try:
        with abandonable(unwanted):
            _serve(commands, owner, pulse)
    except BaseException as error:
        pulse.since = None
        thread = owner()
        updates = [] if thread is None else thread.die(error)
        del thread
        _deliver(updates)
        _refuse_all(commands)


def _refuse_all(commands: _Commands) -> None:
    """Answer commands that nobody will carry out."""
    while not commands.empty():
        command = commands.get()
        if command is not None and command.outcome.set_running_or_notify_cancel():
            command.outcome.set_exception(EngineDiedError())


def _serve(commands: _Commands, owner: ref[EngineThread], pulse: _Pulse) -> None:
    """Carry out commands and step. While it rests it holds nothing of the engine, which may go with its last reference."""
    busy = False
    while True:
        while not busy or not commands.empty():
            pulse.since = None
            command = commands.get()
            if command is None:
                return
            pulse.since = monotonic()
            command.carry_out()
            del command
            busy = True
        pulse.since = monotonic()
        thread = owner()
        if thread is None:
            busy = False
            continue
        try:
            if thread.serving:
                thread.advance()
            updates = thread.gather()
        except Exception as error:
            updates = thread.surrender(error)
        busy = thread.serving
        del thread  # before the updates: their readers may let the engine go
        _deliver(updates)
        del updates


def _deliver(updates: Updates) -> None:
    """Hand each dispatcher its updates together. Updates that it cannot deliver had no readers."""
    by_dispatcher: dict[int, tuple[Dispatcher, Updates]] = {}
    for update in updates:
        dispatcher = update[0].dispatcher
        by_dispatcher.setdefault(id(dispatcher), (dispatcher, []))[1].append(update)
    for dispatcher, its_updates in by_dispatcher.values():
        try:
            dispatcher.deliver(its_updates)
        except Exception:
            logger.warning("updates of %d requests could not be delivered", len(its_updates), exc_info=True)


def _end(commands: _Commands) -> None:
    commands.put(None)


_alive: WeakKeyDictionary[threading.Thread, tuple[_Commands, threading.Event]] = WeakKeyDictionary()


def end_all_threads(seconds: float | None = None) -> bool:
    """End the threads of all engines, and the loads under way in them, and wait for so long. Returns whether all have
    ended. One that has not is in a stage of a load, or in a step, that takes longer."""
    threads = list(_alive.items())
    for _, (commands, unwanted) in threads:
        unwanted.set()
        _end(commands)
    until = None if seconds is None else monotonic() + seconds
    for thread, _ in threads:
        thread.join(None if until is None else max(0.0, until - monotonic()))
    return not any(thread.is_alive() for thread, _ in threads)


@atexit.register
def _end_with_the_process() -> None:
    """No thread may be inside a step when the interpreter is taken down: that would abort the process.

    After Ctrl-C the process does not wait for long, and after a second one not at all: it ends by the signal.
    """
    try:
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) and not end_all_threads(LONGEST_STAGE):
            raise KeyboardInterrupt
        end_all_threads()
    except KeyboardInterrupt:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


# --- Waits, in the thread of a caller, for what the engine's thread writes.


def write_all(thread: EngineThread, pending: dict[int, Request], settle: Callable[[int, RequestOutput], None]) -> None:
    """Have prepared requests written, by their place among the caller's, and settle each as it ends, with its output or
    refusal. Those that are done are taken out. Whoever breaks this off leaves none behind."""
    inbox, places = Inbox(), {request.request_id: place for place, request in pending.items()}
    admitted = thread.admit(list(pending.values()), inbox)
    try:
        for request, refusal in zip(list(pending.values()), admitted.result(), strict=True):
            if refusal is not None:
                place = places[request.request_id]
                settle(place, RequestOutput(-1, pending.pop(place).prompt, (), (), refusal))
        while pending:
            output = inbox.wait().output
            assert output is not None, "nobody streams"
            del pending[places[output.request_id]]
            settle(places[output.request_id], output)
    finally:
        for request in pending.values():
            thread.drop(request)


def stream_pieces(thread: EngineThread, request: Request, inbox: Inbox) -> Iterator[StreamPiece]:
    """The pieces that come in for a request, which was admitted with this inbox; who drops this drops the inbox, and so
    cancels the request. It raises the error of a request that failed on the way."""
    update = None
    try:
        while update is None or update.output is None:
            update = inbox.wait()
            yield from update.pieces
        if update.output.error is not None:
            raise update.output.error
    finally:
        del update  # an error in it points at this frame, and the two would keep everything alive
        thread.drop(request)

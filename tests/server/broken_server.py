"""`outrider serve` with planted faults, each to be had by a signal.

SIGUSR1 lets the next verification raise, in the middle of a step. SIGUSR2 does the same and loses a block from the books,
so that the engine must begin anew. With OUTRIDER_HANGS in the environment the verification says that it hangs, and hangs
for ever instead. With OUTRIDER_TAKES the system takes so few bytes of an answer for a client that does not read, and no
megabytes. With OUTRIDER_PLANTED a defect is there from the beginning. If it is "a tenant's requests take long to prepare",
those of the tenant `flood` take until SIGUSR1 comes.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from outrider.cache.state import SequenceState
from outrider.cli.main import main
from outrider.engine.scheduler import WaitingLine
from outrider.engine.verification import Verification
from outrider.propose.draft_model import DraftModelProposer
from outrider.server import run
from outrider.server.answers import CompletionAnswer
from outrider.server.errors import log
from outrider.server.requests import Job, JobMaker
from outrider.server.schemas import CommonRequest
from outrider.server.tenants import Meter

_due: list[int] = []


def plant_faults() -> None:
    """Let signals break steps off."""

    def arm(number: int, frame: FrameType | None) -> None:
        _due.append(number)

    def verify(self: Verification, plan: Any, drafts: Any, out: Any) -> Any:
        if _due:
            if _due.pop() == signal.SIGUSR2:
                plan.items[0].seq.state.block_table.pop()
            if "OUTRIDER_HANGS" in os.environ:
                run._HANGING_SECONDS = run.PARTING_SECONDS = 1  # it waits no longer than this for what never comes
                log("it hangs", {})
                threading.Event().wait()
            raise RuntimeError("a planted fault")
        return sound(self, plan, drafts, out)

    sound = Verification.verify
    Verification.verify = verify  # type: ignore[method-assign]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, arm)


def take_little(num_bytes: int) -> None:
    """Have the system take few bytes of an answer that is not read."""
    listen = run.listen

    def listen_to(*given: Any) -> socket.socket:
        place = listen(*given)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)  # its connections have the same
        return place

    run.listen, run.PARTING_SECONDS = listen_to, 1


def plant_defect(name: str) -> None:
    """Put a defect in that a soak must find."""
    if name == "a place is kept":
        place = Meter.place

        @contextmanager
        def keep(meter: Meter, num_texts: int) -> Iterator[None]:
            with place(meter, num_texts):
                yield
                meter.num_texts += 1  # not reached where the block raises

        Meter.place = keep  # type: ignore[method-assign]
    elif name == "a piece is told twice":
        delta = CompletionAnswer._delta

        def twice(answer: Any, number: int, piece: Any) -> Any:
            told = delta(answer, number, piece)
            if told is not None and told["finish_reason"] is None and len(told["token_ids"]) > 4:
                told["text"] *= 2
            return told

        CompletionAnswer._delta = twice  # type: ignore[method-assign]
    elif name == "a block is lost":
        free = SequenceState.free

        def lose(state: SequenceState) -> None:
            if len(state.block_table) > 2:
                state.block_table.pop()
            free(state)

        SequenceState.free = lose  # type: ignore[method-assign]
    elif name == "the draft model keeps a text":
        DraftModelProposer.finish = lambda self, sequence: None  # type: ignore[method-assign]
    elif name == "a tenant's requests take long to prepare":
        make, over = JobMaker.make, threading.Event()
        signal.signal(signal.SIGUSR1, lambda number, frame: over.set())

        def wait(maker: JobMaker, asked: CommonRequest, namespace: str | None) -> Job:
            if namespace == "flood":
                over.wait()
            return make(maker, asked, namespace)

        JobMaker.make = wait  # type: ignore[method-assign]
    elif name == "the newest comes first":
        add = WaitingLine.add

        def push(line: WaitingLine, seq: Any) -> None:
            if seq.request.arrival is None:
                seq.request.arrival = -next(line._arrivals)
            add(line, seq)

        WaitingLine.add = push  # type: ignore[method-assign]
    elif name:
        raise ValueError(name)


if __name__ == "__main__":
    plant_faults()
    if "OUTRIDER_TAKES" in os.environ:
        take_little(int(os.environ["OUTRIDER_TAKES"]))
    plant_defect(os.environ.get("OUTRIDER_PLANTED", ""))
    main()

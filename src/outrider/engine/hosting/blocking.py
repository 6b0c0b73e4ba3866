"""Waits, in the thread of a caller, for what the engine's thread writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outrider.engine.hosting.dispatcher import Inbox
from outrider.engine.hosting.thread import EngineThread
from outrider.engine.sequence import Request
from outrider.params import RequestOutput, StreamPiece


def write_all(thread: EngineThread, pending: dict[int, Request], settle: Callable[[int, RequestOutput], None]) -> None:
    """Have prepared requests written, and settle each as it ends. Whoever breaks this off leaves none behind.

    Args:
        thread: Where the engine runs.
        pending: Requests by their place among the caller's. Those that are done are taken out.
        settle: Called with the place of each and its output, refusals included.

    Raises:
        ClosedError: The engine is closed.
    """
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
    """What comes in for a streaming request; who drops this drops the inbox, and so cancels the request.

    Args:
        thread: Where the engine runs.
        request: It was admitted with this inbox.
        inbox: Where its updates come in.

    Raises:
        OutriderError: The request failed on the way.
    """
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

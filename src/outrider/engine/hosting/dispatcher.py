"""The updates that the engine's thread hands over after a step, and the mailboxes that receive them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from outrider.kernels.library import check_process
from outrider.params import RequestOutput, StreamPiece


@dataclass(frozen=True)
class RequestUpdate:
    """What a step brought to a request.

    Attributes:
        request_id: The request.
        pieces: What was added to its texts, where it is streamed.
        output: What it came to, or its error; None while it goes on.
    """

    request_id: int
    pieces: tuple[StreamPiece, ...]
    output: RequestOutput | None


class Dispatcher(Protocol):
    """Carries the updates of a step to the mailboxes that it serves, all at once."""

    def deliver(self, updates: Sequence[tuple[Mailbox, RequestUpdate]]) -> None:
        """Called in the engine's thread. It must not wait for anybody.

        Raises:
            Exception: Nobody reads these updates any more; the requests are cancelled.
        """
        ...


class Mailbox(Protocol):
    """Where the updates of some requests go. Requests whose mailbox nobody holds any more are cancelled."""

    @property
    def dispatcher(self) -> Dispatcher:
        """Who carries updates here."""
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
        """The next update. An interrupt breaks the wait off.

        Raises:
            ForkedProcessError: Nobody sends any in this process.
        """
        check_process()
        return self._updates.get()


class _ByHand:
    """Puts every update into its inbox."""

    def deliver(self, updates: Sequence[tuple[Mailbox, RequestUpdate]]) -> None:
        for mailbox, update in updates:
            assert isinstance(mailbox, Inbox)
            mailbox.put(update)


_BY_HAND = _ByHand()

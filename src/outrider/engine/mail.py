"""What the engine's thread hands over after a step, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from outrider.kernels.library import check_process
from outrider.params import RequestOutput, StreamPiece


@dataclass(frozen=True)
class News:
    """What a step brought to a request.

    Attributes:
        request_id: The request.
        pieces: What was added to its texts, where it is streamed.
        output: What it came to, or its error; None while it goes on.
    """

    request_id: int
    pieces: tuple[StreamPiece, ...]
    output: RequestOutput | None


class Office(Protocol):
    """Carries the news of a step to the mailboxes that it serves, all at once."""

    def deliver(self, letters: Sequence[tuple[Mailbox, News]]) -> None:
        """Called in the engine's thread. It must not wait for anybody.

        Raises:
            Exception: Nobody reads these letters any more; the requests are cancelled.
        """
        ...


class Mailbox(Protocol):
    """Where the news of some requests go. Requests whose mailbox nobody holds any more are cancelled."""

    @property
    def office(self) -> Office:
        """Who carries news here."""
        ...


class Inbox:
    """A mailbox that a thread waits at."""

    def __init__(self) -> None:
        self._news: SimpleQueue[News] = SimpleQueue()

    @property
    def office(self) -> Office:
        return _BY_HAND

    def put(self, news: News) -> None:
        self._news.put(news)

    def wait(self) -> News:
        """The next news. An interrupt breaks the wait off.

        Raises:
            ForkedProcessError: Nobody sends any in this process.
        """
        check_process()
        return self._news.get()


class _ByHand:
    """Puts every letter into its inbox."""

    def deliver(self, letters: Sequence[tuple[Mailbox, News]]) -> None:
        for mailbox, news in letters:
            assert isinstance(mailbox, Inbox)
            mailbox.put(news)


_BY_HAND = _ByHand()

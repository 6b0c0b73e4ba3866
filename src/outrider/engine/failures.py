"""How a fault ends the requests that it concerns, and nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from outrider.engine.sequence import Request, Sequence
from outrider.engine.stats import EngineStats
from outrider.errors import (
    ForwardError,
    NonFiniteLogitsError,
    NoTokenLeftError,
    ProcessingError,
    RequestError,
    StepAbortedError,
)

logger = logging.getLogger(__name__)

REMEDIES: dict[type[RequestError], str] = {
    ForwardError: "See its cause.",
    NonFiniteLogitsError: "Use a wider dtype, or check the weights.",
    NoTokenLeftError: "Allow more tokens.",
    ProcessingError: "See its cause.",
    StepAbortedError: "Send it again.",
}


class Failures:
    """Ends requests during a step.

    Args:
        stats: Where faults are counted.

    Attributes:
        ended: Requests that are to be stopped when the step under way is over: the pass counts on their rows until then.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self.ended: list[Request] = []

    @contextmanager
    def contained(self, seq: Sequence, doing: str) -> Iterator[None]:
        """What raises in this block ends the request of one sequence, and no other."""
        try:
            yield
        except Exception as error:
            logger.exception("%s raised, request %d", doing, seq.request.request_id)
            self._stats.num_faults += 1
            self.fail(seq.request, StepAbortedError, f"{doing} raised {error!r}", cause=error)

    def fail(self, request: Request, kind: type[RequestError], problem: str, *, cause: BaseException | None = None) -> None:
        """End a request with an error of `kind`; what it holds is given back after the step."""
        error = kind(request.request_id, problem, _remedy(kind, request))
        error.__cause__ = cause
        request.error = error
        self.ended.append(request)

    def abandon(self, sequences: Iterable[Sequence], error: BaseException) -> None:
        """End the requests of a step that broke off: nobody knows how much of it is in their books."""
        for request in {seq.request.request_id: seq.request for seq in sequences}.values():
            if request.error is None and not request.finished:
                self.fail(request, StepAbortedError, f"its step was broken off by {type(error).__name__}", cause=error)


def _remedy(kind: type[RequestError], request: Request) -> str:
    if kind is NoTokenLeftError and request.params.min_tokens:
        return "Allow more tokens, or ask for fewer min_tokens."
    return REMEDIES[kind]

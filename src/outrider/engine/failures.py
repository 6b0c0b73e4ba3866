"""Ends the requests that a fault concerns, and no others."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from outrider.engine.sequence import Request, Sequence
from outrider.engine.stats import EngineStats
from outrider.errors import (
    Contained,
    ForwardError,
    NonFiniteLogitsError,
    NoTokenLeftError,
    OutriderError,
    ProcessingError,
    RequestError,
    StepAbortedError,
)
from outrider.structured.grammar import GrammarError
from outrider.verify.processing import NothingAllowedError

logger = logging.getLogger(__name__)

REMEDIES: dict[type[RequestError], str] = {
    ForwardError: "See its cause.",
    NonFiniteLogitsError: "Use a wider dtype, or check the weights.",
    NoTokenLeftError: "Allow more tokens.",
    ProcessingError: "See its cause.",
    StepAbortedError: "Send it again.",
}


class NotFiniteError(OutriderError):
    """The target wrote NaN or infinity in a row; a request whose text comes there fails with a NonFiniteLogitsError."""


class Failures:
    """Ends requests during a step."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self.ended: list[Request] = []  # to be stopped after the step: the pass counts on their rows until then

    def contained(self, seq: Sequence, doing: str) -> Contained:
        """A block in which whatever raises ends the request of one sequence, and no other."""

        def report(error: BaseException) -> None:
            logger.exception("%s raised, request %d", doing, seq.request.request_id)
            self._stats.num_faults += 1
            self.fail(seq.request, StepAbortedError, f"{doing} raised {error!r}", cause=error)

        return Contained(report)

    def fail(self, request: Request, kind: type[RequestError], problem: str, *, cause: BaseException | None = None) -> None:
        """End a request with an error of `kind`; what it holds is given back after the step."""
        error = kind(request.request_id, problem, _remedy(kind, request))
        error.__cause__ = cause
        request.error = error
        self.ended.append(request)

    def fail_at_row(self, seq: Sequence, fault: BaseException) -> None:
        """End the request of a sequence whose text has come to a row from which no token can be chosen, for `fault`."""
        if isinstance(fault, NothingAllowedError):
            self.fail(seq.request, NoTokenLeftError, _nothing_left(seq.num_output_tokens))
        elif isinstance(fault, NotFiniteError):
            problem = f"the target wrote NaN or infinity after {len(seq.token_ids)} tokens"
            self.fail(seq.request, NonFiniteLogitsError, problem)
        elif isinstance(fault, GrammarError):
            self.fail(seq.request, ProcessingError, str(fault), cause=fault)
        else:
            self.fail(seq.request, ProcessingError, f"processing its logits raised {fault!r}", cause=fault)

    def abandon(self, sequences: Iterable[Sequence], error: BaseException) -> None:
        """End the requests of a step that broke off: nobody knows how much of it is in their books."""
        for request in {seq.request.request_id: seq.request for seq in sequences}.values():
            if request.error is None and not request.finished:
                self.fail(request, StepAbortedError, f"its step was broken off by {type(error).__name__}", cause=error)


def _nothing_left(count: int) -> str:
    where = (
        f"after {count} {'token' if count == 1 else 'tokens'} of the text" if count else "at the first token of the text"
    )
    return f"{where}, its parameters together forbid every token"


def _remedy(kind: type[RequestError], request: Request) -> str:
    if kind is NoTokenLeftError and request.params.min_tokens:
        return "Allow more tokens, or ask for fewer min_tokens."
    return REMEDIES[kind]

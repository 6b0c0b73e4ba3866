"""The state of one proposer for one sequence."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from outrider.engine.proposing.breaker import ProposerBreaker
from outrider.propose.base import Proposer, Requirements
from outrider.propose.method import Method

logger = logging.getLogger(__name__)


@dataclass
class Drafter:
    """How a proposer stands with a sequence. A sequence may have several, each with its own faults.

    Attributes:
        index: Its number among those that the sequence has had, from 0; part of the keys of its shadows.
        method: Its settings.
        proposer: Shared with other sequences that ask for the same method.
        requires: What it wants to be shown, as it said when it was first used; what it says later changes nothing.
        breaker: The circuit breaker of the proposer, shared by all its sequences.
        demoted: A fault has happened; from then on its drafts are verified as opaque.
        num_faults: How many.
        last_round: Verify pass of the sequence in which it was last asked.
    """

    index: int
    method: Method
    proposer: Proposer
    requires: Requirements | None = None
    breaker: ProposerBreaker = field(default_factory=ProposerBreaker)
    demoted: bool = False
    num_faults: int = 0
    last_round: int = 0

    def report_fault(self, request_id: int, problem: str, *, useless: bool = True) -> None:
        """Count a fault and stop believing what the proposer says of its laws, for the rest of this sequence.

        Args:
            request_id: Whose sequence it is.
            problem: What happened.
            useless: Whether nothing of its draft is left. A proposer that brings only such faults is switched off.
        """
        self.num_faults += 1
        self.demoted = True
        if useless:
            self.breaker.failed(request_id)
        self._log(request_id, problem)

    def report_inner_fault(self, request_id: int, problem: str) -> None:
        """A proposer inside this one had a fault, which says nothing about the drafts of this one."""
        self._log(request_id, problem)

    def _log(self, request_id: int, problem: str) -> None:
        logger.warning("method %s, request %d: %s", self.method.name, request_id, problem)

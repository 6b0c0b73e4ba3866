"""The drafters of each sequence: when they begin, fork and end."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from outrider.engine.proposing.drafter import Drafter
from outrider.engine.proposing.proposers import ProposerSet
from outrider.engine.sequence import Sequence
from outrider.errors import OutriderError
from outrider.propose.method import Method, same_method

logger = logging.getLogger(__name__)

#: Proposers that one sequence keeps, unless one step asks for more.
MAX_DRAFTERS = 8


class Drafters:
    """Brings sequences and proposers together.

    Args:
        proposers: Who may draft.
    """

    def __init__(self, proposers: ProposerSet) -> None:
        self._proposers = proposers

    def of(self, seq: Sequence, method: Method) -> Drafter | None:
        """The proposer with these settings at work for a sequence, begun on first use; None where it cannot be had."""
        if self._proposers.is_off(method):
            return None
        found = seq.drafter(method)
        if found is not None:
            found.last_round = seq.view.round
        if found is not None or any(same_method(method, refused) for refused in seq.refused):
            return found
        try:
            proposer = self._proposers.acquire(method)
        except OutriderError as error:
            logger.warning("method %s, request %d: %s", method.name, seq.request.request_id, error)
            seq.stats.num_proposer_faults += 1
            seq.refused.append(method)
            return None
        breaker = self._proposers.breaker_of(proposer)
        found = Drafter(seq.num_drafters, method, proposer, proposer.requires, breaker, last_round=seq.view.round)
        seq.num_drafters += 1
        seq.drafters.append(found)
        if found.requires is not None:
            seq.reads_every_row |= found.requires.needs_uncached_prompt
            if found.requires.added_layers is not None:
                seq.added_layers |= {found.requires.added_layers.number}
        self.tell(seq, found, "begin", seq.view)
        self._dismiss_unused(seq)
        return found

    def _dismiss_unused(self, seq: Sequence) -> None:
        """Part with the proposers that a sequence has not used for longest, where a planner has named very many."""
        idle = sorted((d for d in seq.drafters if d.last_round < seq.view.round), key=lambda d: d.last_round)
        for drafter in idle[: max(0, len(seq.drafters) - MAX_DRAFTERS)]:
            self.part(seq, drafter)

    def part(self, seq: Sequence, drafter: Drafter) -> None:
        """A sequence goes on without one of its proposers."""
        seq.drafters.remove(drafter)
        self.tell(seq, drafter, "finish", seq.view)
        self._proposers.release(drafter.method)

    def switch_off(self, method: Method, sequences: Iterable[Sequence]) -> None:
        """A proposer brings nothing but faults: all sequences go on without it, and it is asked again after a while."""
        logger.warning("method %s is switched off for %d steps", method.name, self._proposers.switched_off[method.name])
        for seq in sequences:
            drafter = seq.drafter(method)
            if drafter is not None:
                self.part(seq, drafter)

    def tell(self, seq: Sequence, drafter: Drafter, verb: str, *args: object) -> None:
        """Call a proposer's life-cycle method; what it raises is its own fault and no one else's."""
        try:
            getattr(drafter.proposer, verb)(*args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            drafter.report_fault(seq.request.request_id, f"{verb} raised {error!r}")
            seq.stats.num_proposer_faults += 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The proposers of a sequence go on with a copy of it too."""
        child.reads_every_row, child.refused = parent.reads_every_row, list(parent.refused)
        child.added_layers = parent.added_layers
        child.num_drafters = parent.num_drafters
        for drafter in parent.drafters:
            self._proposers.acquire(drafter.method)
            child.drafters.append(replace(drafter, num_faults=0))
            self.tell(child, child.drafters[-1], "fork", parent.view, child.view)

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended."""
        for drafter in seq.drafters:
            self.tell(seq, drafter, "finish", seq.view)
            self._proposers.release(drafter.method)

"""What preempted texts find of themselves in the prefix cache when they come back, of which no statistic tells."""

from __future__ import annotations

import pytest

from outrider.engine.scheduler import Schedule, Scheduler
from outrider.engine.sequence import Sequence


def found_again(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the tokens that a text takes from the cache whenever one comes back from now on."""
    found, run = list[int](), Scheduler._run_newcomer

    def watched(self: Scheduler, plan: Schedule, seq: Sequence, most: int | None = None) -> None:
        if seq.stats.num_preemptions:
            found.append(seq.state.num_computed)
        run(self, plan, seq, most)

    patch.setattr(Scheduler, "_run_newcomer", watched)
    return found

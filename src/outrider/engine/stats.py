"""Totals of the engine: steps, rows, tokens, and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from outrider.results import RequestStats

PHASES = ("schedule", "propose", "forward", "verify", "commit")


@dataclass
class EngineStats:
    """Totals since the engine started or `reset`."""

    num_steps: int = 0  # steps that ran a target pass
    num_rows: int = 0  # rows those passes computed
    num_resumed_rows: int = 0  # rows whose first layers a proposer had run already
    num_committed_tokens: int = 0  # output tokens
    num_faults: int = 0  # requests that ended because something raised in a step where nobody expected it
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # wall time by phase of a step
    step_seconds: dict[str, float] = field(default_factory=dict)  # of the latest step
    finished: RequestStats = field(default_factory=RequestStats)  # counts of the sequences that ended
    #: Counts by the name of the method that the requests asked for.
    by_method: dict[str, RequestStats] = field(default_factory=dict)
    #: Where the engine chooses who drafts: rounds by method and number of draft tokens; ("none", 0) is plain.
    chosen: Counter[tuple[str, int]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # these rounds by the word that says why (`Decision.why`)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.step_seconds[phase] = perf_counter() - start
            self.seconds[phase] += self.step_seconds[phase]

    def shares(self) -> dict[str, float]:
        """Fraction of the measured time by phase; schedule and commit together are the host's share."""
        total = sum(self.seconds.values()) or 1.0
        shares = {phase: seconds / total for phase, seconds in self.seconds.items()}
        return {
            "propose": shares["propose"],
            "forward": shares["forward"],
            "verify": shares["verify"],
            "host": shares["schedule"] + shares["commit"],
        }

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

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
    """Totals since the engine started or `reset`. The page of methods shows what they mean.

    Attributes:
        num_steps: Steps that ran a target pass.
        num_rows: Rows those passes computed.
        num_resumed_rows: Of these, rows whose first layers a proposer had run already.
        num_committed_tokens: Output tokens.
        num_faults: Requests that ended because something raised in a step where nobody expected it.
        seconds: Wall time by phase of a step.
        step_seconds: Wall time by phase of the latest step.
        finished: Counts of the sequences that ended.
        by_method: Counts by the name of the method that the requests asked for.
        chosen: Where the engine chooses who drafts: rounds by method and number of draft tokens; ("none", 0) is plain.
        reasons: These rounds by the word that says why (`Decision.why`).
    """

    num_steps: int = 0
    num_rows: int = 0
    num_resumed_rows: int = 0
    num_committed_tokens: int = 0
    num_faults: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    step_seconds: dict[str, float] = field(default_factory=dict)
    finished: RequestStats = field(default_factory=RequestStats)
    by_method: dict[str, RequestStats] = field(default_factory=dict)
    chosen: Counter[tuple[str, int]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

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

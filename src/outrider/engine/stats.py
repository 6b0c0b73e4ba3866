"""Counting what speculation did, per sequence and for the engine as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from outrider.params import RequestStats


@dataclass
class SequenceStats:
    """Running counts behind a RequestStats; see there for definitions."""

    num_target_passes: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    histogram: Counter[int] = field(default_factory=Counter)
    num_proposer_faults: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def observe_draft(self, num_draft_tokens: int, depth: int, num_accepted: int) -> None:
        """One verified draft.

        Args:
            num_draft_tokens: Nodes it held.
            depth: Longest path, at most that many positions.
            num_accepted: Tokens of it that stood.
        """
        missing = depth - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for i in range(depth):
            self.drafted_per_position[i] += 1
        for i in range(num_accepted):
            self.accepted_per_position[i] += 1
        self.histogram[num_accepted] += 1
        self._num_draft_tokens += num_draft_tokens

    _num_draft_tokens: int = 0

    def add(self, other: SequenceStats) -> None:
        """Fold another sequence's counts into these."""
        missing = len(other.drafted_per_position) - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for i, (drafted, accepted) in enumerate(zip(other.drafted_per_position, other.accepted_per_position, strict=True)):
            self.drafted_per_position[i] += drafted
            self.accepted_per_position[i] += accepted
        self.histogram.update(other.histogram)
        for name in (
            "num_target_passes",
            "num_proposer_faults",
            "num_cached_tokens",
            "num_preemptions",
            "_num_draft_tokens",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def freeze(self) -> RequestStats:
        longest = max(self.histogram, default=-1)
        return RequestStats(
            num_target_passes=self.num_target_passes,
            num_drafts=sum(self.histogram.values()),
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(length * count for length, count in self.histogram.items()),
            drafted_per_position=tuple(self.drafted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            acceptance_histogram=tuple(self.histogram[i] for i in range(longest + 1)),
            num_proposer_faults=self.num_proposer_faults,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )


PHASES = ("schedule", "propose", "forward", "verify", "commit")


@dataclass
class EngineStats:
    """Totals since the engine started or `reset`.

    Attributes:
        num_steps: Steps that ran a target pass.
        num_rows: Rows those passes computed.
        num_committed_tokens: Output tokens.
        seconds: Wall time by phase of a step.
        finished: Counts of the sequences that ended.
    """

    num_steps: int = 0
    num_rows: int = 0
    num_committed_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    finished: SequenceStats = field(default_factory=SequenceStats)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += perf_counter() - start

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

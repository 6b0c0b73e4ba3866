"""Predicts speculation from sizes and rates alone, for `outrider plan`: tokens a round, the best length, the speedup.

Nothing is measured here, and the engine's own choice does not use it: that follows measured times (`govern/costs.py`).
Leviathan et al. 2023 (arXiv 2211.17192) take a pass of several rows to cost as much as a pass of one. Here a pass costs the
time of its bytes or the time of its arithmetic, whichever is longer, so that the batch counts too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


def expected_tokens(chances: Iterable[float]) -> float:
    """Tokens that a round is expected to write, the target's own included."""
    total: float = sum(accumulate((1.0, *chances), mul))
    return total


@dataclass(frozen=True)
class PassCost:
    """Holds what a pass of a model takes: the time of its bytes or of its arithmetic, whichever is longer."""

    read_seconds: float  # time to read all weights
    row_seconds: float = 0.0  # time of the arithmetic of one row; 0 where arithmetic never limits
    text_seconds: float = 0.0  # time to read the KV of one text

    @staticmethod
    def of(
        gigabytes: float,
        bandwidth: float,
        *,
        teraflops: float | None = None,
        bytes_per_weight: float = 2.0,
        kv_gb: float = 0.0,
    ) -> PassCost:
        """The cost from sizes: two operations for each weight and row. Teraflops are None where arithmetic never limits."""
        row_seconds = 0.0 if teraflops is None else 2.0 * gigabytes / bytes_per_weight / (1000.0 * teraflops)
        return PassCost(gigabytes / bandwidth, row_seconds, kv_gb / bandwidth)

    def seconds(self, rows: int, texts: int) -> float:
        """Time of a pass of so many rows, of all texts together."""
        return max(self.read_seconds + texts * self.text_seconds, rows * self.row_seconds)


@dataclass(frozen=True)
class Round:
    """One round of drafting and verifying."""

    num_draft_tokens: int  # length of each draft
    tokens: float  # tokens that each text is expected to gain
    passes: float  # time of the round, in passes of plain decoding

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens / self.passes


@dataclass(frozen=True)
class Economics:
    """A target, a draft and what lies between them."""

    target: PassCost  # what a pass of the target costs
    draft: PassCost  # what a pass of the draft costs
    host: float = 0.0  # time of a round outside of all passes, in passes of plain decoding

    @staticmethod
    def of_ratio(cost_ratio: float, host: float = 0.0) -> Economics:
        """A draft pass costs so much of a target pass, and rows cost nothing (Leviathan's c)."""
        return Economics(PassCost(1.0), PassCost(cost_ratio), host)

    def cost_ratio(self, batch: int) -> float:
        """A pass of the draft over a pass of the target, one row each text."""
        return self.draft.seconds(batch, batch) / self.target.seconds(batch, batch)

    def round(self, acceptance: float, num_draft_tokens: int, batch: int = 1) -> Round:
        """A round of drafts of this length."""
        plain = self.target.seconds(batch, batch)
        verify = self.target.seconds(batch * (num_draft_tokens + 1), batch)
        passes = verify / plain + num_draft_tokens * self.cost_ratio(batch) + (self.host if num_draft_tokens else 0.0)
        return Round(num_draft_tokens, expected_tokens([acceptance] * num_draft_tokens), passes)

    def best(self, acceptance: float, longest: int, batch: int = 1) -> Round:
        """The round of the highest speedup among lengths up to `longest`; the shortest of equal ones, 0 among them."""
        rounds = [self.round(acceptance, length, batch) for length in range(longest + 1)]
        return max(rounds, key=lambda each: each.speedup)

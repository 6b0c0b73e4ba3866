"""RequestStats: the counts of drafting and verification, for completions, engines and benchmarks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any

#: As which method the tokens are counted and shown that the structure of an output forces.
FORCED = "forced"


@dataclass
class RequestStats:
    """Counts of one completion, or of several added up; definitions as in vLLM.

    Attributes:
        num_target_passes: Target passes in which a token was committed.
        num_drafts: Of these, the passes that verified a draft of at least one token.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens that entered the text.
        drafted_per_position: Drafts that reached position i (0-based).
        tried_per_position: Drafts whose earlier tokens stood and that went on at position i, so that its fate was decided.
        accepted_per_position: Drafts whose token at position i was accepted.
        acceptance_histogram: Number of drafts by how many of their tokens were accepted.
        offered_per_rank: Draft tokens by how many elder siblings they had, whose parent stood; chains have rank 0 alone.
        accepted_per_rank: Of these, the tokens that entered the text.
        drafted_by_method: Draft tokens by the name of the method that proposed them; where two methods propose the same
            token, both have proposed it. What the structure of the output forces stands under "forced".
        accepted_by_method: Of these, the tokens that entered the text.
        passes_by_stage: Passes in which the model of a stage (method `staged`) went on with its draft, whether or not its
            drafter had a guess to verify. A stage is named by the methods from the outermost to its drafter, such as
            "staged.suffix", or "staged.staged.ngram" for a stage inside a stage.
        drafted_by_stage: Tokens that the drafter of a stage guessed for these passes.
        accepted_by_stage: Of these, the tokens that entered the draft of the stage.
        num_proposer_faults: Rounds in which a proposer misbehaved and its draft was cut or dropped.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache.
        num_preemptions: How often a sequence lost its KV and was recomputed.
    """

    num_target_passes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    tried_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)
    offered_per_rank: list[int] = field(default_factory=list)
    accepted_per_rank: list[int] = field(default_factory=list)
    drafted_by_method: dict[str, int] = field(default_factory=dict)
    accepted_by_method: dict[str, int] = field(default_factory=dict)
    passes_by_stage: dict[str, int] = field(default_factory=dict)
    drafted_by_stage: dict[str, int] = field(default_factory=dict)
    accepted_by_stage: dict[str, int] = field(default_factory=dict)
    num_proposer_faults: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, without the bonus token; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens a verified draft yields, the target's own included (tau); 1 without drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    def observe_draft(self, num_draft_tokens: int, depth: int, num_accepted: int, *, rejected: bool) -> None:
        """Count one verified draft.

        Args:
            num_draft_tokens: Nodes it held.
            depth: Longest path, at most that many positions.
            num_accepted: Tokens of it that entered the text.
            rejected: Whether the target wrote another token in place of the next one.
        """
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        _count(self.drafted_per_position, depth)
        _count(self.tried_per_position, num_accepted + rejected)
        _count(self.accepted_per_position, num_accepted)
        self.accepted_per_position += [0] * (len(self.drafted_per_position) - len(self.accepted_per_position))
        self.acceptance_histogram += [0] * (num_accepted + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[num_accepted] += 1

    def observe_ranks(self, parents: Sequence[int], accepted: Collection[int]) -> None:
        """Count the tokens of one verified draft by rank.

        Args:
            parents: Of its nodes.
            accepted: The nodes that entered the text.
        """
        ranks: dict[int, int] = {}
        for node, parent in enumerate(parents):
            rank = ranks[parent] = ranks.get(parent, -1) + 1
            if parent < 0 or parent in accepted:
                missing = [0] * (rank + 1 - len(self.offered_per_rank))
                self.offered_per_rank += missing
                self.accepted_per_rank += missing
                self.offered_per_rank[rank] += 1
                self.accepted_per_rank[rank] += node in accepted

    def observe_method(self, name: str, num_drafted: int, num_accepted: int) -> None:
        """Count the tokens that one method proposed in one draft."""
        _add(self.drafted_by_method, name, num_drafted)
        _add(self.accepted_by_method, name, num_accepted)

    def observe_stage(self, name: str, num_drafted: int, num_accepted: int) -> None:
        """Count one pass of the model of a stage, and the tokens that its drafter guessed for it."""
        _add(self.passes_by_stage, name, 1)
        _add(self.drafted_by_stage, name, num_drafted)
        _add(self.accepted_by_stage, name, num_accepted)

    def add(self, other: RequestStats) -> None:
        """Fold another's counts into these."""
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, _both(mine, theirs))

    def as_mapping(self) -> dict[str, Any]:
        """All counts by their names, with acceptance_rate and mean_acceptance_length, as JSON can hold them."""
        rates = {"acceptance_rate": self.acceptance_rate, "mean_acceptance_length": self.mean_acceptance_length}
        return {**asdict(self), **rates}

    def copy(self) -> RequestStats:
        """The same counts, which further ones do not change."""
        return deepcopy(self)


def _both(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, dict):
        return {name: mine.get(name, 0) + theirs.get(name, 0) for name in (*mine, *(n for n in theirs if n not in mine))}
    return [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)] if isinstance(mine, list) else mine + theirs


def _add(counts: dict[str, int], name: str, count: int) -> None:
    counts[name] = counts.get(name, 0) + count


def _count(positions: list[int], length: int) -> None:
    """One more draft at each of the first so many positions."""
    positions += [0] * (length - len(positions))
    for position in range(length):
        positions[position] += 1

"""What is told of finished work: counts of drafting and verification, and traces of rounds. Frozen values, no tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any

# --- RequestStats: the counts of drafting and verification, for completions, engines and benchmarks.


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
        tried_per_position: Drafts whose token at position i was accepted or refused, as all tokens before it were accepted.
        accepted_per_position: Drafts whose token at position i was accepted.
        acceptance_histogram: Number of drafts by how many of their tokens were accepted.
        offered_per_rank: Draft tokens whose parent was accepted, by the siblings before them; chains have rank 0 alone.
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
        num_cached_tokens: Prompt tokens whose KV the prefix cache had when the sequence began. What it takes from there
            after a preemption does not count.
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
        """Returns the same counts, which further ones do not change."""
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


# --- Traces: what happened in one round of drafting and verifying. Frozen values, no tensors.


@dataclass(frozen=True)
class CoinToss:
    """A coin of an acceptance rule."""

    node: int  # the draft token that it was about
    probability: float  # with which it was to fall for the token
    stands: bool  # how it fell
    member: int  # whose draw of that token it was about, as in `DrawTrace`


@dataclass(frozen=True)
class DraftedBy:
    """A method's share of a draft."""

    method: str  # its name
    first: int  # its first draw in `RoundTrace.draws`
    end: int  # one behind its last


@dataclass(frozen=True)
class DrawTrace:
    """One proposal of a draft token. Two methods that propose the same token after the same text share the draft token, and
    each has a draw of its own."""

    node: int  # the draft token
    member: int  # who proposed it: the methods of a draft are numbered in the order in which they drafted
    law: str  # how it was chosen
    draft_prob: float | None  # probability that it was drawn with; None where it was not drawn


@dataclass(frozen=True)
class Likely:
    """A token that a model held likely, or that was drafted or written."""

    token_id: int  # the token
    text: str | None  # how it reads by itself; None without a tokenizer
    target: float  # the target's probability, after all parameters
    draft: float | None  # the probability under which the draft was drawn; None where it was not drawn
    # Its probability in what the target still owed when a token was drawn here, after a refusal; None where no token was
    # drawn so.
    residual: float | None


@dataclass(frozen=True)
class RowTrace:
    """Holds what could have come after one token of a round."""

    node: int  # the draft token that it follows; -1 is the last committed token
    # The likeliest tokens of either model, and those that were drafted or written here; the target's likeliest first.
    likely: tuple[Likely, ...]
    # The mass that both models share, which is the chance that a token drawn from the draft stands by itself (Leviathan et
    # al. 2023); None where nothing was drawn.
    overlap: float | None


@dataclass(frozen=True)
class RoundTrace:
    """One verify pass of one sequence.

    Attributes:
        round: Verify passes of the sequence before this one.
        position: Index in the text of the first token that was committed.
        token_ids: Draft tokens.
        parents: Of each, the draft token that it follows; -1 is the last committed token.
        laws: How each was chosen; where several methods proposed one, by the first of them.
        drafted_by: Which methods drafted.
        draft_probs: Probability that each was drawn with, by the first who proposed it; None where it was not drawn.
        target_probs: The target's probability of each, after all parameters.
        num_scratch_rows: Rows computed beside the draft.
        num_sequences: Sequences that shared the step, this one included.
        rule: How the draft was checked; None where nothing was drafted.
        coins: In the order they were tossed.
        accepted: Draft tokens that entered the text.
        token_id: The token that the target wrote behind them; None where an accepted token ended the text.
        reason: Why the engine chose so; empty where it had no choice.
        seconds: Of the step that held this round, by phase; shared with the other sequences of the step.
        texts: How each draft token reads by itself; None without a tokenizer.
        rows: What could have come after the last committed token, then after each draft token.
        at: Seconds from the beginning of the request to the end of this round.
        draws: Who proposed the draft tokens, and how. The draws of one method follow one another.
    """

    round: int
    position: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    laws: tuple[str, ...]
    drafted_by: tuple[DraftedBy, ...]
    draft_probs: tuple[float | None, ...]
    target_probs: tuple[float, ...]
    num_scratch_rows: int
    num_sequences: int
    rule: str | None
    coins: tuple[CoinToss, ...]
    accepted: tuple[int, ...]
    token_id: int | None
    reason: str
    seconds: dict[str, float]
    texts: tuple[str | None, ...]
    rows: tuple[RowTrace, ...]
    at: float
    draws: tuple[DrawTrace, ...]

"""Traces: what happened in one round of drafting and verifying. Frozen values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CoinToss:
    """A coin of an acceptance rule.

    Attributes:
        node: The draft token that it was about.
        probability: With which it was to fall for the token.
        stands: How it fell.
        member: Whose draw of that token it was about, as in `DrawTrace`.
    """

    node: int
    probability: float
    stands: bool
    member: int


@dataclass(frozen=True)
class DraftedBy:
    """A method's share of a draft.

    Attributes:
        method: Its name.
        first: Its first draw in `RoundTrace.draws`.
        end: One behind its last.
    """

    method: str
    first: int
    end: int


@dataclass(frozen=True)
class DrawTrace:
    """One proposal of a draft token. Two methods that propose the same token after the same text share the draft token, and
    each has a draw of its own.

    Attributes:
        node: The draft token.
        member: Who proposed it: the methods of a draft are numbered in the order in which they drafted.
        law: How it was chosen.
        draft_prob: Probability that it was drawn with; None where it was not drawn.
    """

    node: int
    member: int
    law: str
    draft_prob: float | None


@dataclass(frozen=True)
class Likely:
    """A token that a model held likely, or that was drafted or written.

    Attributes:
        token_id: The token.
        text: How it reads by itself; None without a tokenizer.
        target: The target's probability, after all parameters.
        draft: The probability under which the draft was drawn; None where it was not drawn.
        residual: Its probability in what the target still owed when a token was drawn here, after a refusal; None where no
            token was drawn so.
    """

    token_id: int
    text: str | None
    target: float
    draft: float | None
    residual: float | None


@dataclass(frozen=True)
class RowTrace:
    """What could have come after one token of a round.

    Attributes:
        node: The draft token that it follows; -1 is the last committed token.
        likely: The likeliest tokens of either model, and those that were drafted or written here; the target's likeliest
            first.
        overlap: The mass that both models share, which is the chance that a token drawn from the draft stands by itself
            (Leviathan et al. 2023); None where nothing was drawn.
    """

    node: int
    likely: tuple[Likely, ...]
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

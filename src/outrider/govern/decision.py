"""What the governor is told of methods and requests, and what it decides for each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.govern.acceptance import Experience
from outrider.govern.composites import Composite
from outrider.govern.costs import DraftWork, StepWork


@dataclass(frozen=True)
class Candidate:
    """A method that may be chosen.

    Attributes:
        name: Tells it from the others.
        longest: Most draft tokens.
        lookup: Whether it needs no model of its own, so that it costs little and has nothing to read first.
        in_one_pass: Whether a draft takes one pass of its own, however long it is.
        prior: Chance that its draft tokens stand, before anything was seen.
        experience: What it showed in earlier processes.
        composite: How it is made of other candidates; None for a method by itself. What is learnt is learnt of those.
        alone: Whether it may be chosen by itself, and not as a member of others only.
    """

    name: str
    longest: int
    lookup: bool = False
    in_one_pass: bool = False
    prior: float = 0.6
    experience: Experience | None = None
    composite: Composite | None = None
    alone: bool = True

    @property
    def members(self) -> tuple[str, ...]:
        """The methods that draft where it is chosen, in the order of their turns."""
        return (self.name,) if self.composite is None else self.composite.together.members

    def shares(self, rows: int) -> list[tuple[str, int]]:
        """Who drafts where it has so many rows, and how many tokens."""
        if self.composite is None:
            return [(self.name, rows)]
        return [(name, own) for name, own in zip(self.members, self.composite.shares(rows), strict=True) if own]

    def reads(self, running: Running, at_once: int) -> int:
        """Tokens that its own model reads in the coming step, `at_once` at most: those that no draft has read."""
        lag = running.lags.get(self.name, 0)
        return min(lag, at_once) if lag > self.longest + 1 else 0


@dataclass(frozen=True)
class Running:
    """A request that decodes in the step to come.

    Attributes:
        request: Which.
        context: Its tokens.
        longest: Draft tokens that may be of use; 0 where none may be drafted.
        methods: Names of the candidates that may draft for it.
        lags: By name, tokens that a method's own model has yet to read.
        why_plain: Why none may be drafted, if so.
        forced: Rows of the step, beside its own, for tokens that the structure of its output forces.
        to_write: Tokens that it may still write; None where there is no bound.
    """

    request: int
    context: int
    longest: int
    methods: tuple[str, ...]
    lags: Mapping[str, int] = field(default_factory=dict)
    why_plain: str = ""
    forced: int = 0
    to_write: int | None = None


@dataclass(frozen=True)
class Decision:
    """What a request does in a step.

    Attributes:
        method: Who drafts; None decodes plainly.
        num_draft_tokens: Most that it may draft.
        reason: In words.
        why: The same in one word, to count by: a draft "pays", or is "longer" to measure it; "plain" is to be measured; a
            draft would be a "loss", or cost more than trials may ("saving"); "fixed" is what had no choice, "fault" what no
            governor decided.
    """

    method: str | None
    num_draft_tokens: int
    reason: str
    why: str = "pays"


@dataclass(frozen=True)
class MemberDraft:
    """What became of one member's part of a draft.

    Attributes:
        member: Which.
        asked: Draft tokens that were asked for.
        offered: That there were.
        scores: For each position that was tried, in order: 1 or 0, or the chance with which it would have stood.
    """

    member: str
    asked: int
    offered: int
    scores: Sequence[float]


def most_work(
    candidates: Mapping[str, Candidate], running: Sequence[Running], decisions: Mapping[int, Decision], at_once: int
) -> StepWork:
    """What a step does in which all drafts are as long as they may be.

    Args:
        candidates: By name.
        running: The texts that decode.
        decisions: Of each.
        at_once: Tokens that a method's own model reads in a step at most.
    """
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for each in running:
        decision = decisions[each.request]
        if decision.method is not None:
            for member, length in candidates[decision.method].shares(decision.num_draft_tokens):
                reads = candidates[member].reads(each, at_once)
                found.setdefault((decision.method, member), []).append((length, reads))
    drafts = tuple(
        DraftWork(
            member,
            len(asked),
            max(length for length, _ in asked),
            sum(reads for _, reads in asked),
            chosen if chosen != member else "",
        )
        for (chosen, member), asked in found.items()
    )
    forced = sum(each.forced for each in running)
    rows = len(running) + forced + sum(decision.num_draft_tokens for decision in decisions.values())
    return StepWork(rows, len(running), sum(each.context for each in running), drafts, forced)

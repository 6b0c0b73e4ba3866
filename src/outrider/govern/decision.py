"""What the governor is told of methods and requests, and what it decides for each request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul, sub

from outrider.govern.acceptance import Experience, Outlook
from outrider.govern.costs import DraftWork, StepWork

# --- Candidates that several members draft for together, and what is expected of them by what is known of each member.


#: Share of the past that each further outcome leaves, and what is believed before any of them and how much it weighs. Shows
#: in benchmarks.members, the choices.
_KEPT, _PRIOR, _PRIOR_WEIGHT = 0.99, 0.5, 2.0

#: Numbers of rows for which it is computed what is expected; between them it lies on a line. Planning takes time.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Together:
    """Says how members draft together: all from the same place, or one behind the other."""

    parts: tuple[str | Together, ...]  # names of members, or further groups, in the order of their turns
    in_line: bool  # whether each goes on behind the ones before it

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Names of all members in the order of their turns."""
        return tuple(name for part in self.parts for name in ((part,) if isinstance(part, str) else part.members))


@dataclass(frozen=True)
class Composite:
    """Says how a candidate is made of members."""

    together: Together
    #: Rows of each member, in the order of their turns, where the candidate has so many.
    shares: Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class Forecast:
    """The outlook of a composite, and who drafts in it."""

    outlook: Outlook  # what each further row adds to the text
    #: For each number of rows, the members that draft and how many tokens each of them does.
    levels: tuple[tuple[tuple[str, int], ...], ...]


class Differences:
    """Learns how often one member of a group stands where another does not.

    Members are right in easy places, so that what they bring together lies between the better one alone and what they would
    bring if they did not depend on each other.
    """

    def __init__(self) -> None:
        self._gained = _PRIOR * _PRIOR_WEIGHT
        self._possible = _PRIOR_WEIGHT

    @property
    def share(self) -> float:
        """Returns where between the two, 0 to 1."""
        return min(max(self._gained / self._possible, 0.0), 1.0)

    def observe(self, chances: Sequence[float], *, stood: bool) -> None:
        """Members with these chances proposed a token at one place, and one of their tokens stood or none did."""
        best = max(chances)
        possible = _any(chances) - best
        self._gained = _KEPT * self._gained + (stood - best)
        self._possible = _KEPT * self._possible + possible


def forecast(
    composite: Composite, outlooks: Mapping[str, Outlook], lookups: Collection[str], longest: int, share: float
) -> Forecast:
    """The forecast of a composite with 1 to `longest` rows, from the outlooks of its members. Unused rows of lookups go
    to those behind them. `share` is that of `Differences`."""
    members = composite.together.members
    alone = {name: _Alone(outlooks[name], longest) for name in members}
    sizes = [size for size in _SIZES if size < longest] + [longest]
    gains, rows, levels = list[float](), list[float](), list[tuple[tuple[str, int], ...]]()
    brought = used = 0.0
    for before, size in zip([0, *sizes], sizes, strict=False):
        granted = _with_spare(members, composite.shares(size), alone, lookups)
        tokens = sum(_course(composite.together, iter(granted), alone, share).through)
        now = min(sum(alone[name].offered(own) for name, own in zip(members, granted, strict=True)), size)
        step = size - before
        gains += [max(tokens - brought, 1e-6) / step] * step
        rows += [min(max(now - used, 0.02 * step), step) / step] * step
        levels += [tuple((name, own) for name, own in zip(members, granted, strict=True) if own)] * step
        brought, used = max(tokens, brought), max(used, now)
    return Forecast(_outlook(_falling(gains), rows), tuple(levels))


@dataclass(frozen=True)
class _Course:
    """Says how far a text comes in what members draft."""

    #: Chances that it comes through 1, 2, ... tokens of it.
    through: list[float]
    #: Chances that there are just 0, 1, ... tokens, and that all of them stand.
    whole: list[float]


class _Alone:
    """Says how far a text comes in what one member drafts, with `longest` rows at most; what a lookup leaves over may
    double them."""

    def __init__(self, outlook: Outlook, longest: int) -> None:
        further = max(0, 2 * longest - len(outlook.stands))
        reach = list(accumulate([*outlook.stands, *outlook.stands[-1:] * further], mul))
        exists = list(accumulate([*outlook.exists, *outlook.exists[-1:] * further], min))
        self._through = list(map(mul, exists, reach))
        self._ends = list(map(mul, map(sub, [1.0, *exists], exists), [1.0, *reach]))
        self._open = [1.0, *self._through]
        self._offered = list(accumulate(exists, initial=0.0))

    def course(self, rows: int) -> _Course:
        """With so many rows."""
        return _Course(self._through[:rows], [*self._ends[:rows], self._open[rows]])

    def offered(self, rows: int) -> float:
        """Tokens that it is expected to offer where it is asked for so many."""
        return self._offered[rows]


def _course(part: str | Together, granted: Iterator[int], alone: Mapping[str, _Alone], share: float) -> _Course:
    if isinstance(part, str):
        return alone[part].course(next(granted))
    courses = [_course(each, granted, alone, share) for each in part.parts]
    found = courses[0]
    for other in courses[1:]:
        found = _behind(found, other) if part.in_line else _beside(found, other, share)
    return found


def _beside(one: _Course, other: _Course, share: float) -> _Course:
    through = [
        a + share * (b - a * b) if a > b else b + share * (a - a * b)
        for a, b in zip(one.through, other.through, strict=False)
    ]
    both = len(through)
    through += one.through[both:] or other.through[both:]
    if not through:
        return _Course([], [1.0])
    return _Course(through, [one.whole[0] * other.whole[0], *[0.0] * (len(through) - 1), through[-1]])


def _behind(one: _Course, other: _Course) -> _Course:
    through = [*one.through, *[0.0] * len(other.through)]
    whole = [0.0] * (len(one.whole) + len(other.whole) - 1)
    for size, chance in enumerate(one.whole):
        if chance > 0.0:
            for place, reach in enumerate(other.through, size):
                through[place] += chance * reach
            for place, reach in enumerate(other.whole, size):
                whole[place] += chance * reach
    return _Course(through, whole)


def _with_spare(
    members: Sequence[str], shares: Sequence[int], alone: Mapping[str, _Alone], lookups: Collection[str]
) -> list[int]:
    """Rows that each member is expected to have in its turn: its own, and what lookups before it leave over."""
    granted, spare = list[int](), 0.0
    for name, own in zip(members, shares, strict=True):
        rows = round(own + spare)
        spare = own + spare - alone[name].offered(rows) if name in lookups else 0.0
        granted.append(rows)
    return granted


def _falling(gains: Sequence[float]) -> list[float]:
    """Gains of rows of which none brings more than the one before: a row that does so shares its gain with those before it,
    since it is not to be had without them."""
    blocks: list[tuple[float, int]] = []
    for gain in gains:
        mean, size = gain, 1
        while blocks and blocks[-1][0] < mean:
            before, length = blocks.pop()
            mean, size = (mean * size + before * length) / (size + length), size + length
        blocks.append((mean, size))
    return [mean for mean, size in blocks for _ in range(size)]


def _outlook(chances: Sequence[float], rows: Sequence[float]) -> Outlook:
    """An outlook by which each further row brings its chance, and is used as often as is expected."""
    reaches = [chance / used for chance, used in zip(chances, rows, strict=True)]
    stands = [reach / before for reach, before in zip(reaches, [1.0, *reaches], strict=False)]
    return Outlook(stands, list(rows))


def _any(chances: Sequence[float]) -> float:
    """Chance that one of several things happens that do not depend on each other."""
    return 1.0 - prod(1.0 - chance for chance in chances)


# --- Methods, requests, and what is decided for each request.


@dataclass(frozen=True)
class MethodCandidate:
    """A method that may be chosen."""

    name: str  # unlike all others
    longest: int  # most draft tokens
    lookup: bool = False  # whether it needs no model of its own, so that it costs little and has nothing to read first
    scored: bool = True  # whether it can be scored while it is idle; a model that cannot is tried now and then
    in_one_pass: bool = False  # whether a draft takes one pass of its own, however long it is
    ends_drafts: bool = False  # whether it ends drafts by itself, before the length that it is asked for
    prior: float = 0.6  # chance that its draft tokens stand, before anything was seen
    experience: Experience | None = None  # what it showed in earlier processes
    #: How it is made of other candidates; None for a method by itself. What is learnt is learnt of those.
    composite: Composite | None = None
    alone: bool = True  # whether it may be chosen by itself, and not as a member of others only

    @property
    def members(self) -> tuple[str, ...]:
        """The methods that draft where it is chosen, in the order of their turns."""
        return (self.name,) if self.composite is None else self.composite.together.members

    def reads(self, running: Running, at_once: int) -> int:
        """Tokens that its own model reads in the coming step, `at_once` at most: those that no draft has read."""
        lag = running.lags.get(self.name, 0)
        return min(lag, at_once) if lag > self.longest + 1 else 0


@dataclass(frozen=True)
class Running:
    """A request that decodes in the step to come."""

    request: int
    context: int  # its tokens
    longest: int  # draft tokens that may be of use; 0 where none may be drafted
    methods: tuple[str, ...]  # names of the candidates that may draft for it
    lags: Mapping[str, int] = field(default_factory=dict)  # by name, tokens that a method's own model has yet to read
    why_plain: str = ""  # why none may be drafted, if so
    forced: int = 0  # rows of the step, beside its own, for tokens that the structure of its output forces
    to_write: int | None = None  # tokens that it may still write; None where there is no bound
    written: int = 0  # tokens of its output


@dataclass(frozen=True)
class Decision:
    """The part of a request in a step."""

    method: str | None  # who drafts; None decodes plainly
    num_draft_tokens: int  # most that it may draft
    reason: str  # in words
    #: The reason in one word, to count by: a draft "pays", is "longer" to measure it, or is a "trial"; "plain" is to be
    #: measured; a draft would be a "loss", or cost more than trials may ("saving"); "fixed" is what had no choice, "fault"
    #: what no governor decided.
    why: str = "pays"


@dataclass(frozen=True)
class MemberDraft:
    """The outcome of one member's part of a draft."""

    member: str
    asked: int  # draft tokens requested
    offered: int  # draft tokens returned
    #: For each position that was tried, in order: 1 or 0, or the chance with which it would have stood.
    scores: Sequence[float]


def most_levels(candidates: Mapping[str, MethodCandidate], name: str, rows: int) -> Iterator[tuple[str, int]]:
    """The members that may draft where a method has so many rows, and how many tokens each of them does: lookups may leave
    all of theirs over."""
    chosen, spare = candidates[name], 0
    shares = [rows] if chosen.composite is None else chosen.composite.shares(rows)
    for member, own in zip(chosen.members, shares, strict=True):
        length = own + spare
        spare = length if candidates[member].lookup else 0
        if length:
            yield member, length


def most_work(
    candidates: Mapping[str, MethodCandidate], running: Sequence[Running], decisions: Mapping[int, Decision], at_once: int
) -> StepWork:
    """The work of a step in which all drafts are as long as they may be, and in which the model of a method reads so many
    tokens at once at most."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for each in running:
        decision = decisions[each.request]
        if decision.method is not None:
            for member, length in most_levels(candidates, decision.method, decision.num_draft_tokens):
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

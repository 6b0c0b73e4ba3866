"""Chooses how many rows pay and for whom, with one budget for the batch, from history before anything is drawn.

Rows are taken in the order of the chance that the text comes to them, over all requests at once (the scheduling of DSpark's
algorithm 1). The budget is the number of them at which most tokens a second are expected. Every quantity here was known
before the step, so it may be the best one: a maximum over something that was drawn would be lossy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from outrider.govern.acceptance import Outlook
from outrider.govern.costs import CostModel
from outrider.govern.exploration import SecondsBucket

#: A row that the text comes to less often is not worth being looked at. Shows in benchmarks.governor at batch 32, where
#: planning takes time.
_LEAST_CHANCE = 0.02
#: After every so many rows it is asked whether further ones could pay. Shows in benchmarks.governor at batch 32.
_LOOKS_EVERY = 4
#: By which factor several methods together must be expected to beat each of them. The best of several guesses is mostly one
#: that was guessed too high, and methods by themselves are known better. Shows in benchmarks.members, the choices.
_JOINED = 1.05
#: By which factor a plan must be expected to beat plain decoding so that it may use the reserve. Shows in
#: test_the_reserve_is_for_plans_of_which_much_is_expected.
MUCH = 1.15
#: Steps over which what a late start costs is spread at least. A text that has gone on for longer is expected to go on for
#: as long again. Shows in test_it_gains_where_a_draft_reads_the_prompt_first.
_HORIZON = 48.0


class UnreadTokens(NamedTuple):
    """The tokens that a model has to read: in all, and in the step to come."""

    method: str
    lag: int
    reads: int


@dataclass(frozen=True)
class Option:
    """A method as it stands with one request."""

    method: str
    outlook: Outlook
    longest: int  # draft tokens that may be of use
    lag: int = 0  # tokens that its own model has yet to read
    reads: int = 0  # tokens of these that it reads in the step to come
    members: tuple[UnreadTokens, ...] = ()  # each member that has a model; empty for a method by itself
    #: Who drafts how many tokens, for each number of rows; empty for a method by itself.
    levels: tuple[tuple[tuple[str, int], ...], ...] = ()

    @property
    def readings(self) -> tuple[UnreadTokens, ...]:
        """The tokens that each model has to read."""
        return self.members or (UnreadTokens(self.method, self.lag, self.reads),)

    def drafting(self, rows: int) -> tuple[tuple[str, int], ...]:
        """The methods that draft, and how many tokens each of them does, where so many rows are granted."""
        return self.levels[rows - 1] if self.levels else ((self.method, rows),)

    def unread_seconds(self, costs: CostModel) -> float:
        """Time in which its models read all that no draft has read."""
        return sum(costs.reading_seconds(each.method, each.lag) for each in self.readings if each.reads)


@dataclass(frozen=True)
class Text:
    """A request that decodes."""

    request: int
    options: Mapping[str, Option]  # the methods that may draft for it, by name
    worth: float = 1.0  # of each of its tokens; 1 on average over the batch
    written: int = 0  # tokens of its output
    to_write: int | None = None  # tokens that it may still write; None where there is no bound

    @property
    def horizon(self) -> float:
        """Steps over which what a late start costs is spread."""
        steps = max(_HORIZON, self.written)
        return steps if self.to_write is None else min(steps, max(self.to_write, 1))

    def unread_seconds(self, costs: CostModel) -> float:
        """Time in which a method whose model has not read the text comes to its end, of several the shortest; 0 without
        such a method."""
        unread = [option.unread_seconds(costs) for option in self.options.values()]
        return min(filter(None, unread), default=0.0)


@dataclass(frozen=True)
class DraftPlan:
    """The plan of a step: who drafts how much."""

    #: Method and draft tokens, by request; requests that are not there decode plainly.
    rows: dict[int, tuple[str, int]] = field(default_factory=dict)
    tokens: float = 1.0  # expected of the step, all texts together, by what they are worth
    seconds: float = 1.0  # expected of the step
    #: The share of the rows that methods are expected to use: where they have nothing to say, they use none.
    used: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass
class _Filling:
    """A plan in the making."""

    tokens: float  # expected
    granted: int = 0  # rows
    expected: float = 0.0  # rows that methods are expected to use
    texts: dict[str, int] = field(default_factory=dict)  # texts for each method
    levels: dict[str, int] = field(default_factory=dict)  # rows of the longest draft of each method
    #: Who drafts how many tokens in the longest draft of each method.
    drafting: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    late: float = 0.0  # seconds a step for models that must read texts first
    reading: float = 0.0  # seconds of reading in the step to come
    unread: float = 0.0  # seconds of reading in all


class Chooser:
    """Finds the plan of most tokens a second for one batch, of texts with `context` tokens all together.

    All may have `max_rows` draft rows together. `budget` says by how much the step may be longer than a plain one, should
    no draft token stand; None sets no limit.
    """

    def __init__(
        self, costs: CostModel, texts: Sequence[Text], context: int, max_rows: int, budget: SecondsBucket | None = None
    ) -> None:
        self._costs = costs
        self._texts = texts
        self._may_lose, self._reserve = (inf, inf) if budget is None else (budget.left, budget.reserve)
        self.limited = False  # whether a plan was left out since it might have lost more
        most = sum(max((o.longest for o in text.options.values()), default=0) for text in texts)
        self._max_rows = min(max_rows, most)
        self._context = context
        self._times: dict[int, float] = {}
        self._drafts: dict[tuple[str, int, int], float] = {}
        self._doubts: dict[int, float] = {}
        self._plain = self._time(0)

    def plain(self) -> DraftPlan:
        """Nobody drafts."""
        return DraftPlan({}, float(len(self._texts)), self._plain)

    def best(self) -> DraftPlan:
        """The best of: nobody drafts, all texts take the same method, each text takes the method that suits it."""
        found = self.plain()
        methods = {name for text in self._texts for name in text.options}
        alike = [[text.options.get(name) for text in self._texts] for name in sorted(methods)]
        for options in sorted(alike, key=_joins):
            found = self._better(found, options)
        if len(methods) > 1 and len(self._texts) > 1:  # one text has been given each of them
            rate = found.rate
            found = self._better(found, [self._favourite(text, rate) for text in self._texts])
        return found

    def again(self, plan: DraftPlan) -> DraftPlan:
        """An earlier plan by what is expected now. Requests that have ended or begun decode plainly, and
        all do where it might lose more than it may."""
        filling = _Filling(float(len(self._texts)))
        rows = {}
        for text in self._texts:
            method, asked = plan.rows.get(text.request, ("", 0))
            option = text.options.get(method)
            reach = 1.0
            for place in range(min(asked, option.longest) if option is not None else 0):
                assert option is not None
                reach = self._add(filling, text, option, place, reach)
                rows[text.request] = (method, place + 1)
        if not self._may(filling):
            return self.plain()
        return DraftPlan(rows, filling.tokens, self._seconds(filling), _used(filling))

    def _time(self, rows: int) -> float:
        """Seconds of a step with so many draft rows, its drafts left out. An earlier plan may have more than there is room
        for."""
        rows = min(rows, self._max_rows)
        seconds = self._times.get(rows)
        if seconds is None:
            seconds = self._times[rows] = self._costs.step_seconds(len(self._texts) + rows, self._context)
        return seconds

    def _least_slope(self, rows: int) -> float:
        """Seconds that each row beyond so many costs at least, however many there will be: to the end of the best stair, or
        to the row behind it, from which on other corrections hold."""
        count, now = len(self._texts), self._time(rows)
        ends = [size - count + behind for size in self._costs.passes.sizes for behind in (0, 1)]
        ends = [end for end in ends if rows < end < self._max_rows]
        return min((self._time(end) - now) / (end - rows) for end in [*ends, self._max_rows])

    def _filled(self, chosen: Sequence[Option | None]) -> DraftPlan:
        """Rows best first for an option of each text, and of all prefixes of this order the best. Further rows are not
        looked at where none of them could bring more than it costs."""
        pairs = zip(self._texts, chosen, strict=True)
        options = {text.request: (text, option) for text, option in pairs if option is not None}
        filling = _Filling(float(len(self._texts)))
        heap = [
            (-text.worth * option.outlook.stands[0], request, 0, 1.0)
            for request, (text, option) in options.items()
            if option.longest > 0
        ]
        heapify(heap)
        order: list[int] = []
        best, best_rows, seconds = filling.tokens / self._plain, 0, self._plain
        best_tokens, best_seconds, best_used = filling.tokens, seconds, 0.0
        while heap and filling.granted < self._max_rows:
            chance, request, place, reach = heappop(heap)
            if -chance < _LEAST_CHANCE:
                break
            if filling.granted % _LOOKS_EVERY == 0 and -chance <= best * self._least_slope(filling.granted):
                break
            text, option = options[request]
            reach = self._add(filling, text, option, place, reach)
            order.append(request)
            seconds = self._seconds(filling)
            if filling.tokens / seconds > best and self._may(filling):
                best, best_rows, best_tokens, best_seconds = filling.tokens / seconds, len(order), filling.tokens, seconds
                best_used = _used(filling)
            if place + 1 < option.longest:
                stands = option.outlook.stands
                following = reach * stands[min(place + 1, len(stands) - 1)]
                heappush(heap, (-text.worth * following, request, place + 1, reach))
        rows: dict[int, tuple[str, int]] = {}
        for request in order[:best_rows]:
            rows[request] = (options[request][1].method, rows.get(request, ("", 0))[1] + 1)
        return DraftPlan(rows, best_tokens, best_seconds, best_used)

    def _add(self, filling: _Filling, text: Text, option: Option, place: int, reach: float) -> float:
        """One more row; returns the chance that the text comes through it, where the method has a token there."""
        last = len(option.outlook.stands) - 1
        exists, name = option.outlook.exists[min(place, last)], option.method
        reach *= option.outlook.stands[min(place, last)]
        filling.tokens += exists * reach * text.worth
        filling.granted += 1
        filling.expected += exists
        if place + 1 > filling.levels.get(name, 0):
            filling.levels[name], filling.drafting[name] = place + 1, option.drafting(place + 1)
        if place == 0:
            filling.texts[name] = filling.texts.get(name, 0) + 1
            filling.unread += option.unread_seconds(self._costs)
            for reading in option.readings:
                filling.late += self._costs.catch_up_seconds(reading.method, reading.lag) / text.horizon
                filling.reading += self._costs.reading_seconds(reading.method, reading.reads)
        return reach

    def _better(self, found: DraftPlan, options: Sequence[Option | None]) -> DraftPlan:
        """The plan that was found, or the best one for an option of each text."""
        plan = self._filled(options)
        return plan if plan.rate > found.rate * (_JOINED if _joins(options) else 1.0) else found

    def _draft_seconds(self, filling: _Filling) -> float:
        total = 0.0
        for name, texts in filling.texts.items():
            for member, levels in filling.drafting[name]:
                total += self._draft_time(member, texts, levels)
        return total

    def _draft_time(self, member: str, texts: int, levels: int) -> float:
        key = (member, texts, levels)
        seconds = self._drafts.get(key)
        if seconds is None:
            seconds = self._drafts[key] = self._costs.draft_seconds(member, texts, levels)
        return seconds

    def _may(self, filling: _Filling) -> bool:
        beyond = self._most_lost(filling) - self._may_lose
        allowed = beyond <= 0.0
        if not allowed and beyond + filling.unread - filling.reading <= self._reserve:
            allowed = filling.tokens / self._seconds(filling) >= MUCH * len(self._texts) / self._plain
        self.limited |= not allowed
        return allowed

    def _most_lost(self, filling: _Filling) -> float:
        """Seconds by which the step is longer than a plain one where all rows are used, as far as times are certain."""
        seconds = self._time(filling.granted) + self._draft_seconds(filling) + filling.reading
        return seconds * (1.0 + self._doubt(filling.granted)) - self._plain

    def _doubt(self, rows: int) -> float:
        """The share by which the time of a step with so many draft rows may be wrong beside that of a plain one."""
        doubt = self._doubts.get(rows)
        if doubt is None:
            count = len(self._texts)
            doubt = self._doubts[rows] = self._costs.uncertainty(count + rows, count)
        return doubt

    def _seconds(self, filling: _Filling) -> float:
        """Time of the step. Where methods often have nothing to say, some steps are as long as plain ones and the others
        as long as all rows take, since steps of a staircase do not average."""
        share = _used(filling)
        seconds = (1.0 - share) * self._plain + share * self._time(filling.granted) + filling.late
        return seconds + self._draft_seconds(filling)

    def _favourite(self, text: Text, rate: float) -> Option | None:
        """The option that brings this text most beyond what its rows and its draft cost at this rate."""
        count = len(self._texts)
        best, found = 0.0, None
        for option in text.options.values():
            reach, gain, stands = 1.0, 0.0, option.outlook.stands
            level = self._level(option, count) / count
            for place in range(min(option.longest, self._max_rows // count)):
                reach *= stands[min(place, len(stands) - 1)]
                gain += text.worth * reach * option.outlook.exists[min(place, len(stands) - 1)]
                taken = (self._time((place + 1) * count) - self._plain) / count + (place + 1) * level
                if gain - rate * taken > best:
                    best, found = gain - rate * taken, option
        return found

    def _level(self, option: Option, texts: int) -> float:
        """Seconds that each draft token of so many texts takes."""
        if not option.levels:
            return self._draft_time(option.method, texts, 1)
        return sum(self._draft_time(member, texts, levels) for member, levels in option.levels[-1]) / len(option.levels)


def _used(filling: _Filling) -> float:
    return filling.expected / filling.granted if filling.granted else 0.0


def _joins(options: Sequence[Option | None]) -> bool:
    """True if several methods together draft for a text."""
    return any(option is not None and option.members for option in options)

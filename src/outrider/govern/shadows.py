"""Scores of idle methods: which are due and what scoring may cost; and what a token is worth to a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt

from outrider.govern.choice import DraftPlan
from outrider.govern.costs import CostModel
from outrider.govern.decision import MethodCandidate, Running
from outrider.govern.exploration import SHARE, ExplorationBudget

# --- Scores of idle methods: which of them are due, and what scoring may take of the time.


#: Share of the time in which idle methods may show what they would be worth. Lookups and models have half of it each where
#: there are both, so that lookups, of which each is cheap, leave something for models that have much to read. It is down to
#: a quarter of this where many texts decode, since what is learnt from one helps all of them. Shows in
#: test_scoring_idle_methods_costs_less_than_a_hundredth.
_SHADOW_SHARE = 0.007
#: Share of what may be saved up for all trials that the scoring of lookups leaves for drafts. Shows in
#: test_a_model_that_went_bad_once_is_scored_again_beside_busy_lookups.
_FOR_DRAFTS = 0.5
#: By which factor one score may take longer than usual and be believed. Shows in
#: test_pauses_of_the_machine_while_methods_are_scored_are_not_paid.
_MOST_BELIEVED = 6.0
#: Unspent time of that kind is kept up to so many steps' worth. Shows in
#: test_scoring_idle_methods_costs_less_than_a_hundredth.
_SAVED_STEPS = 16.0
#: Tokens that should be new before a method with a model of its own reads them to be scored. Shows in
#: benchmarks.governor_rivals, the change.
SHADOW_TOKENS = 12
#: Steps after which it is asked again which methods are idle, where none of those that were could be paid for. Shows in
#: test_idle_methods_are_asked_for_where_one_of_them_can_be_paid.
_ASKS_AGAIN = 3


@dataclass(frozen=True)
class Shadow:
    """An idle method that is to be scored without a row of the target: a model on text that is committed, a lookup on text
    that is to come.
    """

    request: int
    method: str


@dataclass(frozen=True)
class Idle:
    """A method that might be scored on a text."""

    request: int
    method: str
    waited: int  # steps since it was last scored there, or since the text began
    cost: float  # seconds that it would take
    lookup: bool  # whether it needs no model of its own


class Shadows:
    """Finds the idle methods whose turn it is, and pays for their scores. The model of a method reads `read_at_once` tokens
    in a step at most."""

    def __init__(
        self, candidates: Mapping[str, MethodCandidate], exploration: ExplorationBudget, read_at_once: int
    ) -> None:
        self._candidates = candidates
        self._exploration = exploration
        self._read_at_once = read_at_once
        self._saved = dict.fromkeys((each.lookup for each in candidates.values()), 0.0)  # of lookups, and of models
        self._begun: dict[int, int] = {}
        self._tried: dict[tuple[int, str], int] = {}
        self._usual: dict[str, float] = {}
        self.tried_at = 0  # the step of the latest trial
        self._asks_at = 0  # the step in which it is asked again in any case
        self._least: dict[bool, float] = {}  # by kind as in `_saved`, the least that one of the idle methods costs

    def begin(self, request: int, step: int) -> None:
        """A request begins."""
        self._begun[request] = step
        self._asks_at = step

    def finish(self, request: int) -> None:
        """A request has ended."""
        self._begun.pop(request, None)
        for key in [key for key in self._tried if key[0] == request]:
            del self._tried[key]

    def may_be_due(self, step: int) -> bool:
        """False where no method that was idle when it was last asked can be paid for."""
        return step >= self._asks_at or any(self._payable(lookup=lookup) >= least for lookup, least in self._least.items())

    def due(
        self, running: Sequence[Running], drafting: Mapping[int, tuple[str, int]], step: int, costs: CostModel
    ) -> list[Shadow]:
        """Idle methods to score in this step, on texts where they were not scored for longest, within their share of the
        time. `drafting` says who drafts how much, by request."""
        idle = self._idle(running, drafting, step, costs)
        lookups = sorted((each for each in idle if each.lookup), key=_longest_ago)
        models = sorted((each for each in idle if not each.lookup), key=_least_for_its_wait)
        found = self._affordable(lookups) + self._affordable(models[:1])  # it is saved for the one whose turn it is
        for shadow in found:
            self._tried[shadow.request, shadow.method] = step
        self._asks_at = step + (1 if found else _ASKS_AGAIN)
        self._least = {each[0].lookup: min(idle.cost for idle in each) for each in (lookups, models[:1]) if each}
        return found

    def trial(self, prices: Mapping[tuple[int, str], float], step: int) -> tuple[int, str] | None:
        """A request, and a method that can be told of by trials alone, which is to draft a token for it in this step: of
        those who waited longest, where that is saved what it is expected to lose. `prices` has the seconds of each."""
        if not prices:
            return None
        key = min(prices, key=lambda key: (self._tried.get(key, self._begun[key[0]]), key))
        if prices[key] > self._payable(lookup=False):
            return None
        self._saved[False] -= prices[key]
        self._tried[key] = self.tried_at = step
        return key

    def observe_seconds(self, method: str, texts: int, seconds: float, costs: CostModel) -> None:
        """Scoring a method on so many texts took so long. It is paid from what was saved, as far as it is believed, since a
        machine may pause for any reason."""
        usual = self._usual.get(method, 0.0)
        each = min(seconds / texts, _MOST_BELIEVED * max(usual, self._cost(method, self._read_at_once, costs)))
        self._saved[self._candidates[method].lookup] -= each * texts
        self._exploration.spend(each * texts)
        self._usual[method] = usual + (0.2 if each < _MOST_BELIEVED * usual else 1.0) * (each - usual)

    def earn(self, seconds: float, pause: int) -> None:
        """A step took so long, and scores are due in one step of so many. Models get what trials cannot save up."""
        is_full = self._exploration.left >= self._exploration.most
        for lookup, saved in self._saved.items():
            share = SHARE if is_full and not lookup else _SHADOW_SHARE / len(self._saved)
            self._saved[lookup] = min(saved + share / min(4, pause) * seconds, _SAVED_STEPS * seconds)

    def _idle(
        self, running: Sequence[Running], drafting: Mapping[int, tuple[str, int]], step: int, costs: CostModel
    ) -> list[Idle]:
        """The methods that do not draft, and that have something to be scored on."""
        found = []
        for each in running:
            chosen = drafting.get(each.request, (None, 0))[0]
            used = () if chosen is None else self._candidates[chosen].members
            for name in each.methods if each.longest > 0 else ():
                if self._candidates[name].composite is not None or not self._candidates[name].scored:
                    continue  # what it is made of is scored, or nothing can be told
                lookup, lag = self._candidates[name].lookup, each.lags.get(name, 0)
                last = self._tried.get((each.request, name), self._begun[each.request])
                if name not in used and (last < step if lookup else lag >= SHADOW_TOKENS):
                    found.append(Idle(each.request, name, step - last, self._cost(name, lag, costs), lookup=lookup))
        return found

    def _payable(self, *, lookup: bool) -> float:
        """Seconds that scores of lookups, or those of models, may take now."""
        kept = _FOR_DRAFTS * self._exploration.most if lookup else 0.0  # cheap ones would leave nothing for drafts
        return min(self._saved[lookup], self._exploration.left - kept)

    def _affordable(self, idle: Sequence[Idle]) -> list[Shadow]:
        """Those that can be paid for together, of idle methods of one kind."""
        found, left = list[Shadow](), self._payable(lookup=idle[0].lookup) if idle else 0.0
        for each in idle:
            if each.cost <= left:
                left -= each.cost
                found.append(Shadow(each.request, each.method))
        return found

    def _cost(self, method: str, lag: int, costs: CostModel) -> float:
        if not self._candidates[method].lookup:
            return costs.catch_up_seconds(method, min(lag, self._read_at_once))
        return self._usual.get(method, costs.draft_seconds(method, 1, 1))


def _longest_ago(idle: Idle) -> tuple[int, int]:
    return (-idle.waited, idle.request)


def _least_for_its_wait(idle: Idle) -> tuple[float, int, str]:
    """Texts that are long since scored come first, and of these the ones of which little is to be read."""
    return (idle.cost / (idle.waited + 1), idle.request, idle.method)


# --- Places of a batch: whether others take those of texts that end, and what tokens are worth where nobody does.
#
# Drafts let texts end at different times. Where others take their places, every token is worth the same. Where nobody
# does, the texts that are left are written in steps that cost hardly less, and the batch ends with the last of them.


#: Ends of texts that are remembered, and as how many ends it weighs that places are taken to stay empty at first. Shows in
#: test_it_gains_also_where_nobody_takes_the_places_of_texts_that_end.
_MEMORY, _PRIOR_WEIGHT = 32.0, 2.0
#: A place that nobody has taken within so many steps is empty. Shows in
#: test_it_keeps_its_promise_where_nobody_takes_the_places_of_texts_that_end.
_WAITS = 16
#: A text that would end sooner even if it drafted nothing, by more than this share of what it has to write, surely does.
#: Shows in test_a_text_that_is_ahead_drafts_on_where_the_others_are_fast.
_SURE_LEAD = 0.5
#: The variance of the draft tokens of a text that stand in a step, over their mean. Shows in
#: test_it_gains_also_where_nobody_takes_the_places_of_texts_that_end.
_VARIANCE = 0.3


class Places:
    """Learns whether the places of texts that end stay empty, from who decodes in each step."""

    def __init__(self) -> None:
        self._batch = frozenset[int]()
        self._vacant = deque[int]()  # the steps in which places were left
        self._ended = self._empty = 0.0

    @property
    def stay_empty(self) -> float:
        """Share of the texts that end at their bound, in a place that nobody takes while others decode."""
        return (self._empty + _PRIOR_WEIGHT) / (self._ended + _PRIOR_WEIGHT)

    def leave(self, step: int, request: int, *, at_length: bool) -> None:
        """A text has ended; `at_length` where it has all the tokens that it might have, so that its end could be foreseen.
        A text alone tells nothing."""
        if request not in self._batch or len(self._batch) == 1:
            return
        if at_length:
            self._vacant.append(step)
        else:
            self._count(empty=False)

    def see(self, step: int, requests: Iterable[int]) -> None:
        """These texts decode in this step."""
        now = frozenset(requests)
        if now == self._batch:
            return
        while self._vacant and (not now & self._batch or step - self._vacant[0] > _WAITS):
            self._vacant.popleft()
            self._count(empty=True)
        for _ in range(min(len(now - self._batch), len(self._vacant))):
            self._vacant.popleft()
            self._count(empty=False)
        self._batch = now

    def worths(self, running: Sequence[Running], costs: CostModel, speed: float) -> dict[int, float]:
        """The worth of a token of each text: the same, as far as others take the places of texts that end. A text which
        drafts is expected to write `speed` tokens in a step."""
        bounds = [each.to_write for each in running if each.to_write is not None]
        count, context = len(running), sum(each.context for each in running)
        if len(bounds) < count or count == 1:
            return {each.request: 1.0 for each in running}
        found = worths(bounds, lambda texts: costs.step_seconds(texts, context * texts // count), speed)
        empty = self.stay_empty
        return {each.request: empty * worth + 1.0 - empty for each, worth in zip(running, found, strict=True)}

    def lateness(self, running: Sequence[Running], plan: DraftPlan, worth: Mapping[int, float]) -> float:
        """The share by which the batch ends later than its texts do on average, as far as nobody takes their places."""
        bounds = [each.to_write for each in running if each.request in plan.rows and each.to_write is not None]
        if len(bounds) < 2:
            return 0.0
        tokens = 1.0 + (plan.tokens - len(running)) / len(plan.rows)
        late = lateness([worth[request] for request in plan.rows], tokens, sum(bounds) / len(bounds))
        return self.stay_empty * late

    def _count(self, *, empty: bool) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        self._ended, self._empty = keep * self._ended + 1.0, keep * self._empty + empty


def worths(to_write: Sequence[int], seconds: Callable[[int], float], speed: float) -> list[float]:
    """The worth of a token of each text, 1 on average, where all begin and end with the batch, from the tokens that each
    text may still write, the seconds of a plain step of so many texts, and the tokens that a text which drafts is expected
    to write in a step.

    A token lets its text end a step sooner, so that one step has a text less. What this saves depends on how many texts are
    still there: those that end later although they draft and this text does not, as far as a lead is sure to last.
    """
    known = [0.0, *(seconds(count + 1) for count in range(len(to_write)))]
    saved = [_between(known, _later(place, to_write, speed)) for place in range(len(to_write))]
    mean = sum(saved) / len(saved)
    return [each / mean if mean > 0.0 else 1.0 for each in saved]


def lateness(worths: Sequence[float], tokens: float, to_write: float) -> float:
    """The share of the time by which the last of texts that draft ends later than they do on average, by chance alone, from
    the worth of a token of each, the tokens that a text is expected to gain in a step, and those that it may still write on
    average.

    It is the largest of several sums of as many independent numbers as there are steps.
    """
    alike = sum(worths) ** 2 / max(sum(worth * worth for worth in worths), 1e-9)  # as many texts of equal worth
    variance = _VARIANCE * max(tokens - 1.0, 0.0)
    return sqrt(log(max(alike, 1.0)) * variance / (max(tokens, 1.0) * max(to_write, 1.0)))


def _later(place: int, to_write: Sequence[int], speed: float) -> float:
    """Returns how many other texts are expected to end after this one, if they draft and this one does not."""
    tokens = to_write[place]
    reach = max(_SURE_LEAD * tokens, 1.0)
    leads = (other / speed - tokens for other in [*to_write[:place], *to_write[place + 1 :]])
    return sum(min(max(0.5 + lead / (2.0 * reach), 0.0), 1.0) for lead in leads)


def _between(known: Sequence[float], later: float) -> float:
    """By how much a step of one text more than so many takes longer."""
    place = min(int(later), len(known) - 2)
    share, more = later - place, min(place + 2, len(known) - 1)
    return (1.0 - share) * (known[place + 1] - known[place]) + share * (known[more] - known[more - 1])

"""What speculation may lose against plain decoding: steps and trials are paid from a bucket of seconds."""

from __future__ import annotations

from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass, field, replace

from outrider.govern.costs import CostModel, StepTimes, StepWork

# --- What trials may cost: a token bucket of seconds that speculation may lose against plain decoding.
#
# A hundredth of the time is earned, and little of it is saved up. What a step costs beyond a plain one is paid for
# before it begins, as if no draft token stood. What its tokens would have taken plainly comes back afterwards. So in
# any stretch of time the loss is at most what was saved up and a hundredth of the stretch.
#
# Drafts that pay lose now and then, too, and several in a row would use up what trials may cost. So half of what drafts win
# beyond it is kept as a reserve, for steps of which much is expected. A model that must read a text before it drafts for it
# takes more at once than a trial may: the reserve begins with as much as that takes.


#: The share of the time that speculation may lose, and the seconds of it that are saved up. Shows in
#: benchmarks.governor_rivals, the method that is wrong.
SHARE, MOST_SAVED = 0.01, 0.24
#: The share of a plain step that is saved up where this is more. Shows in test_it_gains_where_there_is_something_to_gain.
_OF_PLAIN = 2.4
#: Plain steps whose time the reserve holds at most, and the share of what drafts win that comes into it: they may lose it
#: again where a text changes. Shows in test_it_gains_where_a_draft_reads_slowly, and in
#: test_it_gains_where_there_is_something_to_gain.
_RESERVE, _OF_GAINS = 12.0, 0.5
#: The share of what is earned that planning may take while less than so much of what may be saved up is there: it would
#: else take all, and nothing would be saved up for a draft. The share of what may be saved up that it may take at once.
#: Shows in test_what_trials_may_cost_is_saved_up_again.
_PLANNING, _SCARCE, _AT_ONCE = 0.3, 0.9, 1 / 16
#: The share of what may be saved up that may be owed. Shows in test_a_pause_of_the_machine_is_forgotten_within_seconds.
_MOST_OWED = 1 / 3


class SecondsBucket:
    """Seconds that may be lost, `most` of which are saved up.

    `plain` is the time of a plain step. Where it is long, a draft could hardly be paid, so a part of it is saved up.
    """

    def __init__(self, plain: float) -> None:
        self.most = max(MOST_SAVED, _OF_PLAIN * plain)
        self._saved, self._spent = self.most, 0.0
        self.reserve = self._lent = 0.0
        self._for_planning = _AT_ONCE * self.most

    @property
    def left(self) -> float:
        """Seconds that may be lost now."""
        return self._saved - self._spent

    def affords(self, seconds: float) -> bool:
        """True if so much may be lost; nothing may always."""
        return seconds <= 0.0 or seconds <= self.left

    @property
    def may_plan(self) -> bool:
        """True if planning leaves enough for drafts."""
        return self._for_planning > 0.0

    def spend(self, seconds: float) -> None:
        """So much is lost by the step under way or beside it, or won where it is negative."""
        self._spent += seconds

    def spend_on_planning(self, seconds: float) -> None:
        """Planning, or what is beside it, has taken so long."""
        self.spend(seconds)
        self._for_planning -= seconds

    def lend(self, reading: float, plain: float) -> None:
        """Models would have to read for so many seconds before they draft, beside plain steps of so many. The reserve has
        as much, once."""
        more = max(0.0, min(reading, _RESERVE * plain) - self._lent)
        self.reserve, self._lent = self.reserve + more, self._lent + more

    def draw(self, seconds: float) -> None:
        """Take so much of the reserve for the step to come."""
        self.reserve -= seconds
        self._spent -= seconds

    def earn(self, seconds: float, plain: float) -> None:
        """A step of so many seconds has ended, which would have taken so many plainly. No more is owed than a third of what
        may be saved up: where the machine paused in a trial, drafts are tried again within seconds."""
        self.most = max(MOST_SAVED, _OF_PLAIN * plain)
        left = self.left + SHARE * seconds
        self.reserve = min(self.reserve + _OF_GAINS * max(left - self.most, 0.0), max(self.reserve, _RESERVE * plain))
        self._saved, self._spent = max(min(left, self.most), -_MOST_OWED * self.most), 0.0
        at_once = _AT_ONCE * self.most
        is_scarce = self._saved < _SCARCE * self.most
        self._for_planning = min(self._for_planning + _PLANNING * SHARE * seconds, at_once) if is_scarce else at_once


# --- Pays for steps from what trials may cost: before they begin as if no draft token stood, and afterwards what they took.


@dataclass
class _OpenStep:
    """A step that was decided and has not ended yet."""

    work: StepWork  # at most
    plain: float  # seconds of a plain step of its texts
    longer: float = 0.0  # seconds by which it was expected to be longer


class ExplorationBudget(SecondsBucket):
    """The time that speculation may still lose, and the step that is under way."""

    def __init__(self, plain: float) -> None:
        super().__init__(plain)
        self._open: _OpenStep | None = None

    @property
    def is_empty(self) -> bool:
        """True if nothing may be lost."""
        return self.left <= 0.0

    def begin_step(self, work: StepWork, costs: CostModel, *, promises_much: bool = False) -> bool:
        """Pay for a step as if no draft token stood, where much is expected of it with the reserve; returns whether it may
        cost so much. If not, it is plain."""
        if self._open is not None:
            self.earn(self._open.plain + self._open.longer, self._open.plain)
        plain = costs.step_seconds(work.texts, work.context)
        longer = costs.most_longer(work)
        if promises_much and self.left < longer <= self.left + self.reserve:
            self.draw(longer - self.left)
        if not self.affords(longer):
            self._open = _OpenStep(replace(work, rows=work.plain_rows, drafts=()), plain)
            return False
        self._open = _OpenStep(work, plain, longer)
        self.spend(longer)
        return True

    def win(self, tokens: float) -> None:
        """So many draft tokens of the step stand: what they would have taken plainly comes back."""
        if self._open is not None:
            self.spend(-tokens * self._open.plain / self._open.work.texts)

    def as_begun(self, work: StepWork) -> StepWork:
        """The work of a step, with the tokens that methods caught up with in it."""
        if self._open is None or not work.drafts:
            return work
        late: Counter[str] = Counter()
        for each in self._open.work.drafts:
            late[each.method] += each.rows
        return replace(work, drafts=tuple(replace(each, rows=late.pop(each.method, 0)) for each in work.drafts))

    def end_step(self, work: StepWork, times: StepTimes, costs: CostModel) -> None:
        """Pay for a step that has ended what it cost by all that is known of costs now, instead of what was expected."""
        if self._open is None:
            return
        self.spend(costs.most_longer(work) - self._open.longer)
        self.earn(times.total, costs.step_seconds(work.texts, work.context))
        self._open = None

    def end_rest(self, times: StepTimes) -> None:
        """A plain step has ended, of which nothing else is to be learnt."""
        if self._open is not None:
            self.earn(times.total, self._open.plain)
            self._open = None


# --- What is learnt and held for one number of texts behind contexts of one length, apart from all others.
#
# What rows and drafts cost beside sixteen texts says little of one text alone, and a pause that drafting takes there
# must not last when they have gone.


#: Changes between drafting and not within so many steps that count as going to and fro, and for how long experience of
#: longer standing decides then; twice as long each time it happens again. Shows in test_it_does_not_oscillate.
_FLIPS, _FLIP_WINDOW, _STEADY_STEPS = 4, 256, 512
#: Contexts up to so many tokens a text are of one length; each further length reaches four times as far. Shows in
#: benchmarks.governor with long prompts.
_SHORT = 1024
#: Numbers of texts and lengths of which something is remembered; those unused for longest are forgotten.
_MOST_STANDINGS = 64


@dataclass
class BatchKnowledge:
    """Costs and plans at one number of texts."""

    costs: CostModel
    gain: float = 1.0  # by which factor the last plan was expected to beat plain decoding
    speed: float = 1.0  # tokens that a text which drafts in it was expected to write in a step
    was_on: bool | None = None  # whether that plan drafted for at least half of the texts; None before the first one
    longer_every: int = 0  # drafts between two of which one is longer by a token
    plain_due: bool = False  # whether the next step is to be plain, to be measured
    steady_until: int = 0  # the step up to which experience of longer standing decides
    _flips: deque[int] = field(default_factory=lambda: deque(maxlen=_FLIPS))
    _steady_steps: int = _STEADY_STEPS

    def note_plan(self, step: int, *, is_on: bool) -> None:
        """A plan was made. Where drafting goes on and off again and again, experience of longer standing decides for a
        while."""
        if self.was_on is not None and is_on != self.was_on:
            self._flips.append(step)
            if len(self._flips) == _FLIPS and step - self._flips[0] <= _FLIP_WINDOW:
                self.steady_until = step + self._steady_steps
                self._steady_steps *= 2
                self._flips.clear()
        self.was_on = is_on
        if step - self.steady_until > 4 * _STEADY_STEPS:
            self._steady_steps = _STEADY_STEPS


class BatchKnowledgeTable:
    """Finds what holds for a batch. Each number of texts begins with what was calibrated. Contexts of another length begin
    with what was learnt for as many texts, believed less."""

    def __init__(self, begun: CostModel) -> None:
        self._begun = begun
        self._known: dict[tuple[int, int], BatchKnowledge] = {}

    def of(self, num_texts: int, context: int) -> BatchKnowledge:
        """The knowledge of batches of so many texts with so many tokens, all together."""
        texts, length = max(num_texts - 1, 0).bit_length(), _length(context // max(num_texts, 1))
        found = self._known.pop((texts, length), None) or self._new(texts, length)
        self._known[texts, length] = found  # the most recently used come last
        if len(self._known) > _MOST_STANDINGS:
            del self._known[next(iter(self._known))]
        return found

    def _new(self, texts: int, length: int) -> BatchKnowledge:
        near = [key for key in self._known if key[0] == texts]
        if not near:
            return BatchKnowledge(deepcopy(self._begun))
        found = deepcopy(self._known[min(near, key=lambda key: abs(key[1] - length))])
        found.costs.doubt()
        return found


def _length(context: int) -> int:
    """Which of the lengths a context has: 0 is short, and each further one is four times as long."""
    return ((context // _SHORT).bit_length() + 1) // 2

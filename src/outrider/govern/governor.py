"""Governor: decides before every step which proposer drafts how much, or that none does.

It sees no token and no probability of the step that it decides on. What it learns from are counts of earlier rounds and
times; both come as arguments, so that a proof can script them and a simulator can make them up.

Each tuned constant of this package names where another value should show first: a benchmark, a test of the governor in
tests/unit, or a world of these tests, in quotes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from outrider.govern.acceptance import AcceptanceModel, Outlook
from outrider.govern.choice import MUCH, Chooser, DraftPlan, Option, Text, UnreadTokens
from outrider.govern.costs import CostModel, CostTable, DraftWork, StepTimes, StepWork
from outrider.govern.decision import (
    Decision,
    Differences,
    MemberDraft,
    MethodCandidate,
    Running,
    forecast,
    most_levels,
    most_work,
)
from outrider.govern.exploration import BatchKnowledgeTable, ExplorationBudget
from outrider.govern.shadows import Places, Shadow, Shadows

#: Steps for which a plan holds while the same requests decode and nothing seems to have changed. Shows in
#: benchmarks.governor, where planning takes time.
HOLDS = 4
#: Planning takes longer where more texts decode, and each of them counts for less. With n times as many texts as this, a
#: plan holds for n times as many steps, and idle methods are scored in every n-th step. Shows in benchmarks.governor at
#: batch 32.
_TEXTS_A_STEP = 4
#: Where all go on plainly, costs are observed in one step of so many. Shows in
#: test_a_batch_that_rests_is_observed_in_some_steps_and_earns_in_all.
_OBSERVES_EVERY = 4
#: Steps in which at most one trial is made of methods that nothing else tells of: where the times of passes differ much, it
#: is hardly known what a trial costs. Shows in test_trials_are_few_where_they_seem_to_cost_nothing.
_TRIED_EVERY = 8
#: By which factor drafting must be expected to beat plain decoding to begin and to go on, and another plan the present one.
#: Shows in test_it_does_not_oscillate.
_BEGINS, _GOES_ON, _BEATS_PLAN = 1.05, 1.02, 1.03
#: After so many steps without one, a step decodes plainly so that its time is known; sooner where drafting is expected to
#: be faster by less than this factor. Shows in test_plain_decoding_is_measured_from_time_to_time.
_PLAIN_EVERY, _PLAIN_SOON, _CLOSE = 200, 24, 1.12
#: Steps without a plain one where the time of these is not known, or not better than by this share of what drafting is to
#: gain. Shows in "noisy times".
_PLAIN_FIRST, _SURE = 3, 0.25
#: Every so many drafts at most one is longer by a token, so that it is known what longer ones would bring, and the share of
#: the time that this may take. Shows in benchmarks.governor_rivals, the best fixed length.
_LONGER_EVERY, _LONGER_SHARE = 12, 0.008


class Governor:
    """Decides step by step.

    A step may hold `max_rows` draft rows, all requests together. A plan holds for so many steps while nothing seems to have
    changed. The model of a method reads `read_at_once` tokens in a step at most.
    """

    def __init__(
        self,
        candidates: Sequence[MethodCandidate],
        table: CostTable,
        max_rows: int = 512,
        holds: int = HOLDS,
        read_at_once: int = 128,
    ) -> None:
        self._holds = holds
        self._read_at_once = read_at_once
        self.candidates = {each.name: each for each in candidates}
        self._lookups = frozenset(each.name for each in candidates if each.lookup)
        single = [each for each in candidates if each.composite is None and each.alone and not each.lookup]
        self._only_tried = tuple(each.name for each in single if not each.scored)
        in_one_pass = [each.name for each in candidates if each.in_one_pass]
        self._knowledge = BatchKnowledgeTable(CostModel(table, sorted(self._lookups), in_one_pass))
        self._differences = {each.name: Differences() for each in candidates if each.composite is not None}
        self._here = self._knowledge.of(1, 0)
        known = {each.name: each.experience for each in candidates if each.experience is not None}
        self.acceptance = AcceptanceModel({each.name: each.prior for each in candidates}, known, self._lookups)
        self.chosen: Counter[tuple[str, int]] = Counter()  # by method and length; ("none", 0) is plain decoding
        self._max_rows = max_rows
        self._plan, self._plan_reason = DraftPlan(), ""
        self._outlooks: dict[tuple[int, str], Outlook] = {}  # by which the plan was made
        self._trial: tuple[int, str] | None = None  # of the latest step: for whom, and who drafts
        self._since_longer: Counter[int] = Counter()
        self._batch: tuple[int, ...] = ()
        self._age, self._step, self._changed = 0, 0, True
        self._is_resting = False
        self._exploration = ExplorationBudget(self._here.costs.step_seconds(1, 0))
        self._shadows = Shadows(self.candidates, self._exploration, read_at_once)
        self._places = Places()
        self._worths: dict[int, float] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, request: int, tenant: Hashable = None) -> None:
        """A request begins."""
        self.acceptance.begin(request, tenant)
        self._shadows.begin(request, self._step)

    def finish(self, request: int, *, at_length: bool = False) -> None:
        """A request has ended; `at_length` where it has all the tokens that it might have."""
        self.acceptance.finish(request)
        self._places.leave(self._step, request, at_length=at_length)
        self._since_longer.pop(request, None)
        self._shadows.finish(request)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def rests(self, requests: Sequence[int]) -> bool:
        """True if nothing has to be decided for these requests: all of them go on as plainly as before."""
        goes_on = not self._plan.rows and self._trial is None
        return goes_on and self._batch == tuple(requests) and self._plan_holds()

    def rest(self) -> None:
        """A step in which everybody does what was decided for the one before it."""
        self._step += 1
        self._age += 1
        self._is_resting = True
        self.chosen["none", 0] += len(self._batch)
        self._exploration.begin_step(StepWork(len(self._batch), len(self._batch), 0), self._here.costs)

    def decide(self, running: Sequence[Running]) -> dict[int, Decision]:
        """The decision for each request in the coming step."""
        self._step += 1
        self._is_resting = False
        self._here = self._knowledge.of(len(running), sum(each.context for each in running))
        self._places.see(self._step, (each.request for each in running))
        free = [each for each in running if each.longest > 0 and each.methods]
        if free and self._must_plan(running):
            self._make_plan(running, free)
        measuring = bool(free) and self._is_time_for_plain(len(running) + sum(each.forced for each in running))
        self._trial = None if measuring else self._shadows.trial(self._prices(running, free), self._step)
        decisions = {each.request: self._decision(each, measuring=measuring) for each in running}
        work = most_work(self.candidates, running, decisions, self._read_at_once)
        if not self._exploration.begin_step(work, self._here.costs, promises_much=self._here.gain >= MUCH):
            self._changed = True  # another plan may cost less
            decisions = {request: _saving(decision) for request, decision in decisions.items()}
        for decision in decisions.values():
            self.chosen[decision.method or "none", decision.num_draft_tokens] += 1
        return decisions

    def _must_plan(self, running: Sequence[Running]) -> bool:
        batch = tuple(each.request for each in running if each.longest > 0)
        self._age += 1
        if batch == self._batch and self._plan_holds():
            return False
        self._batch, self._age, self._changed = batch, 0, False
        if self._exploration.is_empty:
            self._plan = DraftPlan()  # no draft could be paid, and no planning
        return not self._exploration.is_empty

    def _plan_holds(self) -> bool:
        pause = _pause(len(self._batch))
        holds = self._holds * pause * (1 if self._plan.rows or pause == 1 else 2)  # of idle methods little is learnt
        if not self._plan.rows and (self._exploration.is_empty or not self._exploration.may_plan):
            return True  # no draft could be paid, and no planning
        return self._age < holds and not (self._changed and self._age >= pause)

    def _make_plan(self, running: Sequence[Running], free: Sequence[Running]) -> None:
        here = self._here
        steady = self._step < here.steady_until
        self._outlooks.clear()
        self._worths = self._places.worths(running, here.costs, here.speed)
        texts = [
            Text(
                each.request,
                self._options(each, steady=steady),
                self._worths[each.request],
                each.written,
                each.to_write,
            )
            for each in free
        ]
        unread = sum(text.unread_seconds(here.costs) for text in texts)
        if unread > 0.0:
            self._exploration.lend(unread, here.costs.step_seconds(len(running), 0))
        texts += [Text(each.request, {}) for each in running if each.longest <= 0 or not each.methods]
        chooser = Chooser(here.costs, texts, sum(each.context for each in running), self._max_rows, self._exploration)
        plain, best = chooser.plain(), chooser.best()
        doubt = here.costs.uncertainty(len(running) + sum(rows for _, rows in best.rows.values()), len(running))
        least = (
            (_BEGINS if here.was_on is False else _GOES_ON)
            + doubt * best.used
            + self._places.lateness(running, best, self._worths)
        )
        if best.rate < plain.rate * least:
            best = plain
        present = chooser.again(self._plan)
        if len(present.rows) == len(self._plan.rows) and best.rows and present.rate * _BEATS_PLAN > best.rate > plain.rate:
            best = present if present.rate > plain.rate else plain
        self._plan = best
        here.gain = best.rate / plain.rate
        here.speed = self._speed(best)
        self._plan_reason = f"{here.gain:.2f}x of plain decoding expected"
        here.longer_every = self._pause_between_longer(len(running))
        if not chooser.limited:  # what may not be tried now says nothing of the text
            here.note_plan(self._step, is_on=2 * len(best.rows) >= len(free))

    def _speed(self, plan: DraftPlan) -> float:
        """Tokens that a text which drafts is expected to write in a step."""
        if not plan.rows:
            return 1.0
        drafts = [(self._outlooks[request, method], rows) for request, (method, rows) in plan.rows.items()]
        return 1.0 + sum(outlook.tokens(rows) for outlook, rows in drafts) / len(drafts)

    def _pause_between_longer(self, num_texts: int) -> int:
        """Drafts between two that are longer by a token, by what such a token costs beyond what it is expected to bring: it
        may be the next stair."""
        extra = 0.0
        before = num_texts + sum(rows for _, rows in self._plan.rows.values())
        costs = self._here.costs
        row = costs.step_seconds(before + 1, 0) - costs.step_seconds(before, 0)
        for request, (method, rows) in self._plan.rows.items():
            outlook = self._outlooks[request, method]
            level = sum(costs.draft_seconds(name, 1, own) for name, own in most_levels(self.candidates, method, rows + 1))
            level -= sum(costs.draft_seconds(name, 1, own) for name, own in most_levels(self.candidates, method, rows))
            worth = self._worths.get(request, 1.0)
            extra += level + outlook.exists_at(rows) * (row - worth * outlook.reach(rows) / self._plan.rate)
        return max(_LONGER_EVERY, round(extra / (_LONGER_SHARE * self._plan.seconds)))

    def _options(self, each: Running, *, steady: bool) -> dict[str, Option]:
        options = {}
        for name in each.methods:
            candidate = self.candidates[name]
            if candidate.alone:
                longest = min(each.longest, candidate.longest)
                option = self._option(each, name, longest, steady=steady)
                options[name] = option
                self._outlooks[each.request, name] = option.outlook
        return options

    def _option(self, each: Running, name: str, longest: int, *, steady: bool) -> Option:
        composite = self.candidates[name].composite

        def reads(member: str) -> int:
            return self.candidates[member].reads(each, self._read_at_once)

        if composite is None:
            outlook = self.acceptance.outlook(each.request, name, steady=steady)
            return Option(name, outlook, longest, each.lags.get(name, 0), reads(name))
        members = composite.together.members
        outlooks = {member: self.acceptance.outlook(each.request, member, steady=steady) for member in members}
        found = forecast(composite, outlooks, self._lookups, longest, self._differences[name].share)
        readings = [UnreadTokens(member, each.lags.get(member, 0), reads(member)) for member in members]
        return Option(name, found.outlook, longest, members=tuple(readings), levels=found.levels)

    def _is_time_for_plain(self, num_rows: int) -> bool:
        """True if a step should be plain, which then has so many rows."""
        if not self._plan.rows:
            return False
        here = self._here
        every = _PLAIN_SOON if here.gain < _CLOSE else _PLAIN_EVERY
        passes = here.costs.passes
        if not passes.knows(num_rows) or passes.uncertainty(num_rows) > _SURE * (here.gain - 1.0):
            every = _PLAIN_FIRST
        since = passes.last_seen(num_rows)
        due = since > every or (here.plain_due and since) or (passes.is_odd(num_rows) and since > 2)
        here.plain_due = False
        return bool(due)

    def _prices(self, running: Sequence[Running], free: Sequence[Running]) -> dict[tuple[int, str], float]:
        """Seconds that a draft of one token is expected to lose, by request and by method that only trials can tell of,
        where that does not draft as it is."""
        plan, found = self._plan.rows, dict[tuple[int, str], float]()
        if not self._only_tried or self._step < self._shadows.tried_at + _TRIED_EVERY:
            return found
        forced, context = sum(each.forced for each in running), sum(each.context for each in running)
        work = StepWork(len(running) + forced, len(running), context, (), forced)
        for each in free:
            chosen = plan.get(each.request, (None, 0))[0]
            used = () if chosen is None else self.candidates[chosen].members
            for name in self._only_tried:
                if name in each.methods and name not in used:
                    found[each.request, name] = self._price(each, name, work, self._here.costs)
        return found

    def _price(self, each: Running, method: str, work: StepWork, costs: CostModel) -> float:
        """Twice what it is expected to lose, as far as times are certain, and no less than half of what it may lose."""
        plain, reads = costs.step_seconds(work.texts, work.context), self.candidates[method].reads(each, self._read_at_once)
        tried = replace(work, rows=work.rows + 1, drafts=(DraftWork(method, 1, 1, reads),))
        longer = max(costs.most_longer(tried), costs.draft_seconds(method, 1, 1))
        instead = plain * (self._here.gain - 1.0) if each.request in self._plan.rows else 0.0
        won = self.acceptance.outlook(each.request, method).tokens(1) * plain / work.texts
        return max(2.0 * (longer + instead - won), 0.5 * longer)

    def _decision(self, each: Running, *, measuring: bool) -> Decision:
        if each.longest <= 0 or not each.methods:
            return Decision(None, 0, each.why_plain or "nothing could draft", "fixed")
        if self._trial is not None and self._trial[0] == each.request:
            return Decision(self._trial[1], 1, "a token, to see what drafts are worth here", "trial")
        if measuring:
            return Decision(None, 0, "plain, to measure it", "plain")
        method, rows = self._plan.rows.get(each.request, (None, 0))
        if method is None:
            return Decision(None, 0, "plain, since no draft is expected to pay", "loss")
        most, reason = min(each.longest, self.candidates[method].longest), self._plan_reason
        if self._since_longer[each.request] >= self._here.longer_every - 1 and rows < most:
            self._since_longer[each.request] = -1
            return Decision(method, rows + 1, f"{reason}, one token longer to measure it", "longer")
        return Decision(method, min(rows, most), reason)

    # -- scoring idle methods --------------------------------------------------------------------------------------------

    @property
    def scores_now(self) -> bool:
        """True if idle methods are scored in this step."""
        is_due = self._step % _pause(len(self._batch)) == 0 and self._shadows.may_be_due(self._step)
        return is_due and not self._exploration.is_empty

    def shadows(self, running: Sequence[Running]) -> list[Shadow]:
        """Idle methods to score in this step, within their share of the time."""
        return self._shadows.due(running, self._plan.rows, self._step, self._here.costs)

    # -- learning ------------------------------------------------------------------------------------------------------

    def observe_target(self, request: int, chances: Sequence[float]) -> None:
        """The target's most likely tokens at further places of a text had these probabilities."""
        self.acceptance.observe_target(request, chances)

    def observe_draft(
        self, request: int, method: str, asked: int, offered: int, accepted: int, *, rejected: bool, shadow: bool = False
    ) -> None:
        """Learn from a draft of so many tokens asked for and offered, or from a shadow: a draft that an idle lookup would
        have made, by which the text gained nothing. `accepted` tokens entered the text; it was `rejected` if the target
        wrote another token in place of the next one."""
        scores = [1.0] * accepted + ([0.0] if rejected and accepted < offered else [])
        if not shadow:
            self._earn(request, offered, accepted)
        self._observe_member(request, MemberDraft(method, asked, offered, scores), 1.0 if shadow else 1.0 + accepted)

    def observe_members(self, request: int, method: str, drafts: Sequence[MemberDraft], accepted: int) -> None:
        """Learn from a draft that the members of a composite made. `accepted` of its tokens entered the text."""
        self._earn(request, sum(draft.offered for draft in drafts), accepted)
        first = [draft for draft in drafts if draft.scores]
        composite = self.candidates[method].composite
        if composite is not None and not composite.together.in_line and len(first) > 1:
            chances = [self.acceptance.outlook(request, draft.member).stands[0] for draft in first]
            self._differences[method].observe(chances, stood=accepted > 0)
        for draft in drafts:
            self._observe_member(request, draft, 1.0 + sum(draft.scores))

    def _earn(self, request: int, offered: int, accepted: int) -> None:
        """A draft with so many tokens brought so many into the text."""
        self._since_longer[request] += offered > 0
        self._exploration.win(accepted * self._worths.get(request, 1.0))

    def _observe_member(self, request: int, draft: MemberDraft, tokens: float) -> None:
        candidate = self.candidates[draft.member]
        tells = candidate.lookup or candidate.ends_drafts or not draft.offered
        self._changed |= self.acceptance.observe(
            request, draft.member, draft.scores, tokens, asked=draft.asked if tells else 0, offered=draft.offered
        )

    def observe_overlaps(self, request: int, method: str, overlaps: Sequence[float]) -> None:
        """Scores of an idle method on committed text: for each token, the chance that a draft of it alone would have stood.
        What deeper positions are worth is learnt from drafts alone."""
        for overlap in overlaps:
            self._changed |= self.acceptance.observe(request, method, [overlap])

    def observe_shadow_seconds(self, method: str, texts: int, seconds: float) -> None:
        """Scoring a method on so many texts took so long."""
        self._shadows.observe_seconds(method, texts, seconds, self._here.costs)

    def observe_own_seconds(self, seconds: float) -> None:
        """Planning, or asking which idle methods to score, took so long."""
        self._exploration.spend_on_planning(seconds)

    def observe_step(self, work: StepWork, times: StepTimes) -> None:
        """A step in which texts decoded and nothing else was done."""
        if self._is_resting and self._step % _OBSERVES_EVERY:
            self._exploration.end_rest(times)
        else:
            work = self._exploration.as_begun(work)
            knowledge = self._knowledge.of(work.texts, work.context)
            knowledge.plain_due |= knowledge.costs.observe(work, times)
            self._exploration.end_step(work, times, knowledge.costs)
        self._shadows.earn(times.total, _pause(len(self._batch)))


def _saving(decision: Decision) -> Decision:
    if decision.method is None:
        return decision
    return Decision(None, 0, "plain, since what trials may cost is used up for now", "saving")


def _pause(num_texts: int) -> int:
    return max(1, num_texts // _TEXTS_A_STEP)

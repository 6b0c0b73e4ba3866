"""Governor: decides before every step which proposer drafts how much, or that none does.

It sees no token and no probability of the step that it decides on. What it learns from are counts of earlier rounds and
times; both come as arguments, so that a proof can script them and a simulator can make them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.govern.acceptance import AcceptanceModel, Experience, Outlook
from outrider.govern.choice import Chooser, Option, Plan, Reading, Text
from outrider.govern.composites import Composite, Differences, forecast
from outrider.govern.costs import CostModel, CostTable, DraftWork, StepTimes, StepWork
from outrider.govern.places import Places, lateness, worths
from outrider.govern.purse import Purse
from outrider.govern.standing import Standings

#: Steps for which a plan holds while the same requests decode and nothing seems to have changed.
HOLDS = 4
#: Planning takes longer where more texts decode, and each of them counts for less. With n times as many texts as this, a
#: plan holds for n times as many steps, and idle methods are scored in every n-th step.
_TEXTS_A_STEP = 4
#: By which factor drafting must be expected to beat plain decoding to begin and to go on, and another plan the present one.
_BEGINS, _GOES_ON, _BEATS_PLAN = 1.05, 1.02, 1.03
#: After so many steps without one, a step decodes plainly so that its time is known; sooner where drafting is expected to
#: be faster by less than this factor.
_PLAIN_EVERY, _PLAIN_SOON, _CLOSE = 200, 24, 1.12
#: The same where the time of a plain step is not known, or not better than by this share of what drafting is to gain.
_PLAIN_FIRST, _SURE = 3, 0.25
#: Every so many drafts at most one is longer by a token, so that it is known what longer ones would bring, and the share of
#: the time that this may take.
_LONGER_EVERY, _LONGER_SHARE = 12, 0.008
#: Share of the time in which idle methods may show what they would be worth. Lookups and models have half of it each where
#: there are both, so that lookups, of which each is cheap, leave something for models that have much to read. It is down
#: to a quarter of this where many texts decode, since what is learnt from one helps all of them.
_SHADOW_SHARE = 0.007
#: Share of what may be saved up for all trials that the scoring of lookups leaves for drafts.
_FOR_DRAFTS = 0.5
#: By which factor one score may take longer than usual and be believed.
_MOST_BELIEVED = 6.0
#: Unspent time of that kind is kept up to so many steps' worth.
_SAVED_STEPS = 16.0
#: Tokens that should be new before a method with a model of its own reads them to be scored.
SHADOW_TOKENS = 12


@dataclass(frozen=True)
class Candidate:
    """A method that may be chosen.

    Attributes:
        name: Tells it from the others.
        longest: Most draft tokens.
        lookup: Whether it needs no model of its own, so that it costs little and has nothing to read first.
        prior: Chance that its draft tokens stand, before anything was seen.
        experience: What it showed in earlier processes.
        composite: How it is made of other candidates; None for a method by itself. What is learnt is learnt of those.
        alone: Whether it may be chosen by itself, and not as a member of others only.
    """

    name: str
    longest: int
    lookup: bool = False
    prior: float = 0.6
    experience: Experience | None = None
    composite: Composite | None = None
    alone: bool = True

    @property
    def members(self) -> tuple[str, ...]:
        """The methods that draft where it is chosen, in the order of their turns."""
        return (self.name,) if self.composite is None else self.composite.together.members


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


@dataclass(frozen=True)
class Shadow:
    """An idle method that is to be scored without a row of the target: a model on text that is committed, a lookup on text
    that is to come.

    Attributes:
        request: On whose text.
        method: Which.
    """

    request: int
    method: str


@dataclass(frozen=True)
class _Idle:
    """A method that might be scored on a text.

    Attributes:
        request: Whose text.
        method: Which.
        waited: Steps since it was last scored there, or since the text began.
        cost: Seconds that it would take.
        lookup: Whether it needs no model of its own.
    """

    request: int
    method: str
    waited: int
    cost: float
    lookup: bool


@dataclass
class _Open:
    """A step that was decided and has not ended yet.

    Attributes:
        work: What it was to do at most.
        plain: Seconds of a plain step of its texts.
        longer: Seconds by which it was expected to be longer.
    """

    work: StepWork
    plain: float
    longer: float = 0.0


class Governor:
    """Decides step by step.

    Args:
        candidates: The methods.
        table: What a calibration found of costs.
        max_rows: Draft rows that a step may hold, all requests together.
        holds: Steps for which a plan holds while nothing seems to have changed.
        read_at_once: Tokens that a method's own model reads in a step at most.

    Attributes:
        chosen: How often each method was chosen at each length; ("none", 0) stands for plain decoding.
        num_plans: That were made.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        table: CostTable,
        max_rows: int = 512,
        holds: int = HOLDS,
        read_at_once: int = 128,
    ) -> None:
        self._holds = holds
        self._read_at_once = read_at_once
        self.candidates = {each.name: each for each in candidates}
        self._lookups = frozenset(each.name for each in candidates if each.lookup)
        self._standings = Standings(CostModel(table, sorted(self._lookups)))
        self._differences = {each.name: Differences() for each in candidates if each.composite is not None}
        self._here = self._standings.of(1, 0)
        known = {each.name: each.experience for each in candidates if each.experience is not None}
        self.acceptance = AcceptanceModel({each.name: each.prior for each in candidates}, known)
        self.chosen: Counter[tuple[str, int]] = Counter()
        self.num_plans = 0
        self._max_rows = max_rows
        self._plan, self._plan_reason = Plan(), ""
        self._outlooks: dict[tuple[int, str], Outlook] = {}  # by which the plan was made
        self._since_longer: Counter[int] = Counter()
        self._batch: tuple[int, ...] = ()
        self._age, self._step, self._changed = 0, 0, True
        self._saved = dict.fromkeys((each.lookup for each in candidates), 0.0)  # of lookups, and of models
        self._purse = Purse(self._here.costs.step_seconds(1, 0))
        self._places = Places()
        self._worths: dict[int, float] = {}
        self._open: _Open | None = None
        self._begun: dict[int, int] = {}
        self._tried: dict[tuple[int, str], int] = {}
        self._shadow_seconds: dict[str, float] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, request: int, tenant: Hashable = None) -> None:
        """A request begins."""
        self.acceptance.begin(request, tenant)
        self._begun[request] = self._step

    def finish(self, request: int, *, at_length: bool = False) -> None:
        """A request has ended; `at_length` where it has all the tokens that it might have."""
        self.acceptance.finish(request)
        self._places.leave(self._step, request, at_length=at_length)
        self._since_longer.pop(request, None)
        self._begun.pop(request, None)
        for key in [key for key in self._tried if key[0] == request]:
            del self._tried[key]

    # -- deciding ------------------------------------------------------------------------------------------------------

    def rests(self, requests: Sequence[int]) -> bool:
        """Whether nothing has to be decided for these requests: all of them go on as plainly as before."""
        return not self._plan.rows and self._batch == tuple(requests) and self._plan_holds()

    def rest(self) -> None:
        """A step in which everybody does what was decided for the one before it."""
        self._step += 1
        self._age += 1
        self.chosen["none", 0] += len(self._batch)
        self._begin_step(StepWork(len(self._batch), len(self._batch), 0))

    def decide(self, running: Sequence[Running]) -> dict[int, Decision]:
        """What each request does in the coming step."""
        self._step += 1
        self._here = self._standings.of(len(running), sum(each.context for each in running))
        self._places.see(self._step, (each.request for each in running))
        free = [each for each in running if each.longest > 0 and each.methods]
        if free and self._must_plan(running):
            self._make_plan(running, free)
            self.num_plans += 1
        measuring = bool(free) and self._is_time_for_plain(len(running) + sum(each.forced for each in running))
        decisions = {each.request: self._decision(each, measuring=measuring) for each in running}
        if not self._begin_step(self._work(running, decisions)):
            self._changed = True  # another plan may cost less
            decisions = {request: _saving(decision) for request, decision in decisions.items()}
        for decision in decisions.values():
            self.chosen[decision.method or "none", decision.num_draft_tokens] += 1
        return decisions

    def _begin_step(self, work: StepWork) -> bool:
        """Pay for a step as if no draft token stood; returns whether it may cost so much. If not, it is plain."""
        if self._open is not None:
            self._purse.end_step(self._open.plain + self._open.longer, self._open.plain)
        costs = self._here.costs
        plain = costs.step_seconds(work.texts, work.context)
        longer = costs.most_longer(work)
        if not self._purse.affords(longer):
            self._open = _Open(replace(work, rows=work.plain_rows, drafts=()), plain)
            return False
        self._open = _Open(work, plain, longer)
        self._purse.spend(longer)
        return True

    def _work(self, running: Sequence[Running], decisions: Mapping[int, Decision]) -> StepWork:
        """What a step does in which all drafts are as long as they may be."""
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for each in running:
            decision = decisions[each.request]
            if decision.method is not None:
                for member, length in self._shares(decision.method, decision.num_draft_tokens):
                    found.setdefault((decision.method, member), []).append((length, self._reads(each, member)))
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

    def _shares(self, method: str, rows: int) -> list[tuple[str, int]]:
        """Who drafts where a candidate has so many rows, and how many tokens."""
        composite = self.candidates[method].composite
        if composite is None:
            return [(method, rows)]
        return [(name, own) for name, own in zip(composite.together.members, composite.shares(rows), strict=True) if own]

    def _reads(self, each: Running, method: str) -> int:
        """Tokens that a method's own model reads in the coming step, where it did not draft in the one before."""
        lag = each.lags.get(method, 0)
        return min(lag, self._read_at_once) if lag > self.candidates[method].longest + 1 else 0

    def _must_plan(self, running: Sequence[Running]) -> bool:
        batch = tuple(each.request for each in running if each.longest > 0)
        self._age += 1
        if batch == self._batch and self._plan_holds():
            return False
        self._batch, self._age, self._changed = batch, 0, False
        if self._is_broke:
            self._plan = Plan()  # no draft could be paid, and no planning
        return not self._is_broke

    def _plan_holds(self) -> bool:
        pause = _pause(len(self._batch))
        holds = self._holds * pause * (1 if self._plan.rows or pause == 1 else 2)  # of idle methods little is learnt
        if self._is_broke and not self._plan.rows:
            return True  # no draft could be paid, and no planning
        return self._age < holds and not (self._changed and self._age >= pause)

    @property
    def _is_broke(self) -> bool:
        return self._purse.left <= 0.0

    def _make_plan(self, running: Sequence[Running], free: Sequence[Running]) -> None:
        here = self._here
        steady = self._step < here.steady_until
        self._outlooks.clear()
        self._worths = self._worths_of(running)
        texts = [Text(each.request, self._options(each, steady=steady), self._worths[each.request]) for each in free]
        texts += [Text(each.request, {}) for each in running if each.longest <= 0 or not each.methods]
        chooser = Chooser(here.costs, texts, sum(each.context for each in running), self._max_rows, self._purse.left)
        plain, best = chooser.plain(), chooser.best()
        doubt = here.costs.uncertainty(len(running) + sum(rows for _, rows in best.rows.values()), len(running))
        least = (_BEGINS if here.was_on is False else _GOES_ON) + doubt * best.used + self._lateness(running, best)
        if best.rate < plain.rate * least:
            best = plain
        present = chooser.again(self._plan)
        if len(present.rows) == len(self._plan.rows) and best.rows and present.rate * _BEATS_PLAN > best.rate > plain.rate:
            best = present if present.rate > plain.rate else plain
        self._plan = best
        here.gain = best.rate / plain.rate
        self._plan_reason = f"{here.gain:.2f}x of plain decoding expected"
        here.longer_every = self._pause_between_longer(len(running))
        if not chooser.limited:  # what may not be tried now says nothing of the text
            here.note_plan(self._step, is_on=2 * len(best.rows) >= len(free))

    def _lateness(self, running: Sequence[Running], plan: Plan) -> float:
        """By which share the batch ends later than its texts do on average, as far as nobody takes their places."""
        bounds = [each.to_write for each in running if each.request in plan.rows and each.to_write is not None]
        if len(bounds) < 2:
            return 0.0
        tokens = 1.0 + (plan.tokens - len(running)) / len(plan.rows)
        late = lateness([self._worths[request] for request in plan.rows], tokens, sum(bounds) / len(bounds))
        return self._places.stay_empty * late

    def _worths_of(self, running: Sequence[Running]) -> dict[int, float]:
        """What a token of each text is worth: the same, as far as others take the places of texts that end."""
        requests, bounds = (
            [each.request for each in running],
            [each.to_write for each in running if each.to_write is not None],
        )
        count, costs, context = len(running), self._here.costs, sum(each.context for each in running)
        if len(bounds) < count or count == 1:
            return dict.fromkeys(requests, 1.0)
        empty = self._places.stay_empty
        found = worths(bounds, lambda texts: costs.step_seconds(texts, context * texts // count))
        return {request: empty * worth + 1.0 - empty for request, worth in zip(requests, found, strict=True)}

    def _pause_between_longer(self, num_texts: int) -> int:
        """Drafts between two that are longer by a token, by what such a token costs beyond what it is expected to bring: it
        may be the next stair."""
        extra = 0.0
        before = num_texts + sum(rows for _, rows in self._plan.rows.values())
        costs = self._here.costs
        row = costs.step_seconds(before + 1, 0) - costs.step_seconds(before, 0)
        for request, (method, rows) in self._plan.rows.items():
            outlook = self._outlooks[request, method]
            level = sum(costs.draft_seconds(name, 1, own) for name, own in self._shares(method, rows + 1))
            level -= sum(costs.draft_seconds(name, 1, own) for name, own in self._shares(method, rows))
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
        if composite is None:
            outlook = self.acceptance.outlook(each.request, name, steady=steady)
            return Option(name, outlook, longest, each.lags.get(name, 0), self._reads(each, name))
        members = composite.together.members
        outlooks = {member: self.acceptance.outlook(each.request, member, steady=steady) for member in members}
        found = forecast(composite, outlooks, self._lookups, longest, self._differences[name].share)
        readings = [Reading(member, each.lags.get(member, 0), self._reads(each, member)) for member in members]
        return Option(name, found.outlook, longest, members=tuple(readings), levels=found.levels)

    def _is_time_for_plain(self, num_rows: int) -> bool:
        """Whether a step should be plain, which then has so many rows."""
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

    def _decision(self, each: Running, *, measuring: bool) -> Decision:
        if each.longest <= 0 or not each.methods:
            return Decision(None, 0, each.why_plain or "nothing could draft", "fixed")
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
        """Whether idle methods are scored in this step."""
        return self._step % _pause(len(self._batch)) == 0 and not self._is_broke

    def shadows(self, running: Sequence[Running]) -> list[Shadow]:
        """Idle methods to score in this step, on texts where they were not scored for longest, within their share of the
        time."""
        idle = self._idle(running)
        lookups = sorted((each for each in idle if each.lookup), key=_longest_ago)
        models = sorted((each for each in idle if not each.lookup), key=_least_for_its_wait)
        found = self._affordable(lookups, self._saved.get(True, 0.0))
        found += self._affordable(models[:1], self._saved.get(False, 0.0))  # it is saved for the one whose turn it is
        for shadow in found:
            self._tried[shadow.request, shadow.method] = self._step
        return found

    def _idle(self, running: Sequence[Running]) -> list[_Idle]:
        """The methods that the plan leaves idle, and that have something to be scored on."""
        found = []
        for each in running:
            chosen = self._plan.rows.get(each.request, (None, 0))[0]
            used = () if chosen is None else self.candidates[chosen].members
            for name in each.methods if each.longest > 0 else ():
                if self.candidates[name].composite is not None:
                    continue  # what it is made of is scored
                lookup, lag = self.candidates[name].lookup, each.lags.get(name, 0)
                last = self._tried.get((each.request, name), self._begun[each.request])
                if name not in used and (last < self._step if lookup else lag >= SHADOW_TOKENS):
                    cost = self._shadow_cost(name, lag)
                    found.append(_Idle(each.request, name, self._step - last, cost, lookup=lookup))
        return found

    def _affordable(self, idle: Sequence[_Idle], saved: float) -> list[Shadow]:
        found = []
        left = self._purse.left
        for each in idle:
            kept = _FOR_DRAFTS * self._purse.most if each.lookup else 0.0  # cheap ones would leave nothing for drafts
            if each.cost <= min(saved, left - kept):
                saved, left = saved - each.cost, left - each.cost
                found.append(Shadow(each.request, each.method))
        return found

    def _shadow_cost(self, method: str, lag: int) -> float:
        if not self.candidates[method].lookup:
            return self._here.costs.catch_up_seconds(method, min(lag, self._read_at_once))
        return self._shadow_seconds.get(method, self._here.costs.draft_seconds(method, 1, 1))

    # -- learning ------------------------------------------------------------------------------------------------------

    def observe_draft(
        self, request: int, method: str, asked: int, offered: int, accepted: int, *, rejected: bool, shadow: bool = False
    ) -> None:
        """What became of a draft, or of one that an idle lookup would have made.

        Args:
            request: Whose.
            method: Who drafted.
            asked: Draft tokens that were asked for.
            offered: That there were.
            accepted: That entered the text.
            rejected: Whether the target wrote another token in place of the next one.
            shadow: Whether it was never made, so that the text gained nothing by it.
        """
        scores = [1.0] * accepted + ([0.0] if rejected and accepted < offered else [])
        if not shadow:
            self._earn(request, offered, accepted)
        self._observe_member(request, MemberDraft(method, asked, offered, scores), 1.0 if shadow else 1.0 + accepted)

    def observe_members(self, request: int, method: str, drafts: Sequence[MemberDraft], accepted: int) -> None:
        """What became of a draft that several members made.

        Args:
            request: Whose.
            method: The composite that was chosen.
            drafts: Of its members.
            accepted: Draft tokens that entered the text.
        """
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
        if self._open is not None:
            worth = self._worths.get(request, 1.0)
            self._purse.spend(-accepted * worth * self._open.plain / self._open.work.texts)

    def _observe_member(self, request: int, draft: MemberDraft, tokens: float) -> None:
        if draft.member in self._lookups or not draft.offered:
            self.acceptance.observe_offer(request, draft.member, draft.asked, draft.offered)
        self._changed |= self.acceptance.observe(request, draft.member, draft.scores, tokens)

    def observe_overlaps(self, request: int, method: str, overlaps: Sequence[float]) -> None:
        """Scores of an idle method on committed text: for each token, the chance that a draft of it alone would have stood.
        What deeper positions are worth is learnt from drafts alone."""
        for overlap in overlaps:
            self._changed |= self.acceptance.observe(request, method, [overlap])

    def observe_shadow_seconds(self, method: str, texts: int, seconds: float) -> None:
        """Scoring a method on so many texts took so long. It is paid from what was saved, as far as it is believed, since a
        machine may pause for any reason."""
        usual = self._shadow_seconds.get(method, 0.0)
        each = min(seconds / texts, _MOST_BELIEVED * max(usual, self._shadow_cost(method, self._read_at_once)))
        self._saved[self.candidates[method].lookup] -= each * texts
        self._purse.spend(each * texts)
        self._shadow_seconds[method] = usual + (0.2 if each < _MOST_BELIEVED * usual else 1.0) * (each - usual)

    def observe_own_seconds(self, seconds: float) -> None:
        """Planning, or asking which idle methods to score, took so long."""
        self._purse.spend(seconds)

    def observe_step(self, work: StepWork, times: StepTimes) -> None:
        """A step in which texts decoded and nothing else was done."""
        if self._open is not None and work.drafts:
            late: Counter[str] = Counter()
            for each in self._open.work.drafts:
                late[each.method] += each.rows
            work = replace(work, drafts=tuple(replace(each, rows=late.pop(each.method, 0)) for each in work.drafts))
        standing = self._standings.of(work.texts, work.context)
        standing.plain_due |= standing.costs.observe(work, times)
        self._settle(work, times, standing.costs)
        share = _SHADOW_SHARE / min(4, _pause(len(self._batch)))
        for lookup, saved in self._saved.items():
            more = share * times.total / len(self._saved)
            self._saved[lookup] = min(saved + more, _SAVED_STEPS * times.total)

    def _settle(self, work: StepWork, times: StepTimes, costs: CostModel) -> None:
        """Pay for a step that has ended what it cost by all that is known of costs now, instead of what was expected."""
        if self._open is None:
            return
        plain = costs.step_seconds(work.texts, work.context)
        self._purse.spend(costs.most_longer(work) - self._open.longer)
        self._purse.end_step(times.total, plain)
        self._open = None


def _saving(decision: Decision) -> Decision:
    if decision.method is None:
        return decision
    return Decision(None, 0, "plain, until a draft may cost as much as it would if none of it stood", "saving")


def _pause(num_texts: int) -> int:
    return max(1, num_texts // _TEXTS_A_STEP)


def _longest_ago(idle: _Idle) -> tuple[int, int]:
    return (-idle.waited, idle.request)


def _least_for_its_wait(idle: _Idle) -> tuple[float, int, str]:
    """Texts that are long since scored come first, and of these the ones of which little is to be read."""
    return (idle.cost / (idle.waited + 1), idle.request, idle.method)

"""A world without models for the governor: scripted costs and acceptances, thousands of steps in seconds.

Whether a draft token stands is a function of text, method and position, so that every policy meets the same luck.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from outrider.govern.costs import CostTable, DraftWork, StepTimes, StepWork
from outrider.govern.decision import Decision, MethodCandidate, Running
from outrider.govern.governor import Governor

#: Chance that a draft token at a position of a text stands where the one before it stands, and chance that a method has
#: anything to say there.
Script = Callable[[int, int], float]

#: Staircases as they were measured: wide bf16 with AVX-512, and a machine where rows soon cost.
FLAT = {1: 1.0, 4: 1.05, 8: 1.08, 16: 1.12, 32: 1.75, 64: 3.3, 128: 6.6, 256: 13.0}
STEEP = {1: 1.0, 2: 1.1, 4: 1.35, 8: 2.0, 16: 3.6, 32: 7.0, 64: 14.0, 128: 28.0, 256: 56.0}


def always(chance: float) -> Script:
    return lambda text, position: chance


ALWAYS = always(1.0)

#: Tokens that an idle model reads in a step at most.
READ_AT_ONCE = 128


@dataclass
class Method:
    """A scripted method.

    Attributes:
        level: Cost of one draft token of each of up to 8 texts; for a lookup, of a whole draft of one text.
        stands: Chance that its token stands.
        exists: Chance that it has anything to say.
        lookup: Whether it has no model of its own.
        fades: By which factor each further token of one draft stands less often than the one before it.
        keeps_up: Whether its own model reads the text as it is written, so that it is never scored on what it has to read.
    """

    level: float
    stands: Script
    exists: Script = ALWAYS
    lookup: bool = False
    fades: float = 1.0
    keeps_up: bool = False


@dataclass
class TextState:
    """A text that is written."""

    index: int
    position: int = 0
    lags: dict[str, int] = field(default_factory=dict)


@dataclass
class World:
    """What steps cost and what becomes of drafts.

    Attributes:
        methods: By name.
        passes: Seconds of a pass by rows.
        noise: Standard deviation of the times, as a share.
        drift: Factor of all times by step.
        seed: Of all luck.
        ends: Tokens of a text by its index, where texts end and others take their places.
        calibrated: What a calibration found of passes, where that is not what they cost.
        costs_at: What passes cost by step, where that changes.
        dearer: By which factor drafts, and rows beyond one for each text, cost more than that for so many texts.
        seconds_a_pass: Of a plain pass of one text; all times are in such passes.
        forced: Tokens that the structure of a text forces at a position of it.
        planning: What a plan costs.
        together: Whether texts begin together, the next ones when all of them have ended, and end with all that they may
            write. Without drafts all of them are there to their common end.
        prompt: Tokens of each text's prompt, which a method's own model reads before its first draft.
        confidence: Probability of the target's most likely token at a position of a text; None where nobody looks.
        read_as_one: Tokens that a method's own model reads in the time of one.
    """

    methods: Mapping[str, Method]
    passes: Mapping[int, float] = field(default_factory=lambda: FLAT)
    noise: float = 0.05
    drift: Callable[[int], float] = lambda step: 1.0
    seed: int = 0
    ends: Callable[[int], int] = lambda text: 10**9
    calibrated: Mapping[int, float] | None = None
    costs_at: Callable[[int], Mapping[int, float]] | None = None
    dearer: Callable[[int], float] = lambda texts: 1.0
    seconds_a_pass: float = 0.05
    forced: Callable[[int, int], int] = lambda text, position: 0
    planning: float = 0.0
    together: bool = False
    prompt: int = 0
    confidence: Script | None = None
    read_as_one: int = 16

    def luck(self, *key: object) -> float:
        digest = blake2b(repr((self.seed, *key)).encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64

    def seconds(self, rows: int, step: int = 0) -> float:
        passes = self.passes if self.costs_at is None else self.costs_at(step)
        sizes = sorted(passes)
        for low, high in pairwise(sizes):
            if rows <= high:
                share = max(0.0, (rows - low) / (high - low))
                return passes[low] + share * (passes[high] - passes[low])
        return passes[sizes[-1]] * rows / sizes[-1]

    def left(self, text: TextState) -> int | None:
        """Tokens that it may still write, where that is known."""
        return self.ends(text.index) - text.position if self.together else None

    def until_all_end(self, texts: Sequence[TextState], step: int) -> float:
        """Time of the plain steps in which these texts come to their ends."""
        left = [self.left(text) or 0 for text in texts]
        return sum(self.seconds(sum(more > passed for more in left), step) + 0.02 for passed in range(max(left)))

    def draft(self, name: str, text: int, position: int, asked: int) -> tuple[int, int]:
        """Tokens that a method offers, and how many of them stand."""
        method = self.methods[name]
        if self.luck("exists", name, text, position) >= method.exists(text, position):
            return 0, 0
        stood, share = 0, 1.0
        while stood < asked and self.luck(name, text, position + stood) < share * method.stands(text, position + stood):
            stood, share = stood + 1, share * method.fades
        return asked, stood

    def propose_seconds(self, name: str, texts: int, levels: int) -> float:
        method = self.methods[name]
        return method.level * (texts if method.lookup else levels * max(1.0, texts / 16))

    def read_seconds(self, name: str, tokens: int) -> float:
        """Time in which a method's own model reads tokens."""
        return self.methods[name].level * max(1.0, tokens / self.read_as_one)

    def table(self) -> CostTable:
        """What a calibration would find."""
        unit = self.seconds_a_pass
        drafts = {
            name: {size: unit * self.read_seconds(name, size) for size in (1, 8, 16, 32)}
            for name, method in self.methods.items()
            if not method.lookup
        }
        passes = {size: unit * seconds for size, seconds in (self.calibrated or self.passes).items()}
        return CostTable(passes, 0.0, drafts)


@dataclass
class Log:
    """What a run came to.

    Attributes:
        seconds: In all.
        tokens: In all.
        on: By step, the share of texts that drafted.
        methods: By step, the method of the first text.
        by_load: Tokens and seconds by the number of texts.
        positions: By step, where the first text stood before it.
        shadow_seconds: Spent on scoring idle methods.
        reasons: That were given.
        clock, written: By step, seconds and tokens up to its end.
        true, plain: By step, seconds that it takes on average, and those that its tokens would take plainly.
    """

    seconds: float = 0.0
    tokens: int = 0
    on: list[float] = field(default_factory=list)
    methods: list[str | None] = field(default_factory=list)
    by_load: dict[int, tuple[int, float]] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    shadow_seconds: float = 0.0
    reasons: set[str] = field(default_factory=set)
    clock: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    true: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    @property
    def pace(self) -> float:
        """Seconds for a token under each load, one token of each load taken together."""
        return sum(seconds / tokens for tokens, seconds in self.by_load.values())

    def step_at(self, position: int) -> int:
        """The first step in which the first text stood at this position or behind it."""
        return next(step for step, where in enumerate(self.positions) if where >= position)

    @property
    def flips(self) -> int:
        """How often drafting went on or off; single steps that measure plain decoding are not counted."""
        return self.flips_from(0)

    def flips_from(self, step: int) -> int:
        """The same from a step on."""
        states = [share >= 0.5 for share in self.on[step:]]
        for place in range(1, len(states) - 1):
            if states[place - 1] == states[place + 1] != states[place]:
                states[place] = states[place - 1]
        return sum(a != b for a, b in pairwise(states))


class CountingGovernor(Governor):
    """A governor that counts its plans, which a world charges for."""

    num_plans = 0

    def _make_plan(self, *arguments: Any) -> None:
        self.num_plans += 1
        super()._make_plan(*arguments)


Policy = CountingGovernor | tuple[str, int] | None
#: By step, how many texts are written.
Load = Callable[[int], int]


def run(
    world: World, policy: Policy, *, steps: int = 0, tokens: int = 0, texts: int = 0, load: Load = lambda step: 1
) -> Log:
    """Write for so many steps, or until each of a fixed number of texts has so many tokens, or until so many texts, one
    after another, have come to their ends."""
    log, present, count, step = Log(), list[TextState](), 0, 0
    rng = random.Random(world.seed)
    fixed = load(0) if tokens else texts
    while step < steps if steps else (count < fixed or present):
        places = 0 if world.together and present else load(step)
        while len(present) < places and (not fixed or count < fixed):
            lags = {name: 0 if method.keeps_up else world.prompt for name, method in world.methods.items()}
            present.append(TextState(count, lags=lags))
            if isinstance(policy, CountingGovernor):
                policy.begin(count)
            count += 1
        alive = present[: load(step)]
        tokens_before, seconds_before = log.tokens, log.seconds
        _step(world, policy, alive, log, step, rng)
        known = log.by_load.get(len(alive), (0, 0.0))
        took = (known[0] + log.tokens - tokens_before, known[1] + log.seconds - seconds_before)
        log.by_load[len(alive)] = took
        for text in [text for text in alive if text.position >= (tokens or world.ends(text.index))]:
            present.remove(text)
            if isinstance(policy, CountingGovernor):
                policy.finish(text.index, at_length=world.together)
        step += 1
    return log


def _running(world: World, texts: Sequence[TextState]) -> list[Running]:
    return [
        Running(
            t.index,
            t.position,
            min(16, (world.left(t) or 17) - 1),
            tuple(world.methods),
            dict(t.lags),
            forced=world.forced(t.index, t.position),
            to_write=world.left(t),
            written=t.position,
        )
        for t in texts
    ]


def _decisions(world: World, policy: Policy, texts: Sequence[TextState]) -> dict[int, Decision]:
    if isinstance(policy, CountingGovernor):
        return policy.decide(_running(world, texts))
    method, length = policy or (None, 0)
    return {text.index: Decision(method, length, "fixed") for text in texts}


def _step(world: World, policy: Policy, texts: list[TextState], log: Log, step: int, rng: random.Random) -> None:
    num_plans = policy.num_plans if isinstance(policy, CountingGovernor) else 0
    decisions = _decisions(world, policy, texts)
    rows, drafted, levels, late, propose = len(texts), dict[str, int](), dict[str, int](), 0, 0.0
    fates: dict[int, tuple[int, int]] = {}
    forced = {text.index: world.forced(text.index, text.position) for text in texts}
    for text in texts:
        decision = decisions[text.index]
        log.reasons.add(decision.reason)
        offered = stood = 0
        if decision.method is not None:
            name, asked = decision.method, decision.num_draft_tokens
            offered, stood = world.draft(name, text.index, text.position + forced[text.index], asked)
            drafted[name] = drafted.get(name, 0) + 1
            levels[name] = max(levels.get(name, 0), asked)
            lag = text.lags.get(name, 0)
            if not world.methods[name].lookup and lag > 17:
                late += min(lag, READ_AT_ONCE)
                propose += world.read_seconds(name, min(lag, READ_AT_ONCE))
        rows += forced[text.index] + offered
        fates[text.index] = (offered, stood)
    factor = world.seconds_a_pass * world.drift(step) * max(0.3, rng.gauss(1.0, world.noise))
    propose += sum(world.propose_seconds(name, drafted[name], levels[name]) for name in drafted)
    one, num_forced, dearer = world.seconds(len(texts), step), sum(forced.values()), world.dearer(len(texts))
    plain = world.seconds(len(texts) + num_forced, step)
    forward = plain + dearer * (world.seconds(rows, step) - plain)
    times = StepTimes(factor * dearer * propose, factor * forward, factor * 0.02)
    unit = world.seconds_a_pass * world.drift(step)
    log.true.append(unit * (dearer * propose + forward + 0.02))
    log.plain.append(unit * (plain + 0.02 + (one + 0.02) * sum(stood for _, stood in fates.values()) / len(texts)))
    context, to_go = sum(text.position for text in texts), world.until_all_end(texts, step) if world.together else 0.0
    drafts = tuple(DraftWork(n, drafted[n], levels[n], late) for n in drafted)
    work = StepWork(rows, len(texts), context, drafts, num_forced)
    log.seconds += times.total
    log.on.append(sum(d.method is not None for d in decisions.values()) / len(texts))
    log.methods.append(decisions[texts[0].index].method)
    log.positions.append(texts[0].position)
    for text in texts:
        (offered, stood), written = fates[text.index], 1 + forced[text.index] + fates[text.index][1]
        text.position += written
        log.tokens += written
        for name in world.methods:
            used = decisions[text.index].method == name
            text.lags[name] = 0 if used or world.methods[name].keeps_up else text.lags.get(name, 0) + written
        if isinstance(policy, CountingGovernor) and decisions[text.index].method is not None:
            decision = decisions[text.index]
            assert decision.method is not None
            rejected = stood < offered
            policy.observe_draft(text.index, decision.method, decision.num_draft_tokens, offered, stood, rejected=rejected)
        if isinstance(policy, CountingGovernor) and world.confidence is not None:
            seen = range(text.position - written, text.position)
            policy.observe_target(text.index, [world.confidence(text.index, position) for position in seen])
    if world.together:
        log.plain[-1] = unit * (to_go - world.until_all_end(texts, step))
    if isinstance(policy, CountingGovernor):
        own = unit * world.planning * (policy.num_plans - num_plans)
        policy.observe_own_seconds(own)
        log.seconds += own
        log.true[-1] += own
        policy.observe_step(work, times)
        _shadow(world, policy, texts, log, factor)
    log.clock.append(log.seconds)
    log.written.append(log.tokens)


def _shadow(world: World, governor: Governor, texts: list[TextState], log: Log, factor: float) -> None:
    by_index = {text.index: text for text in texts}
    for shadow in governor.shadows(_running(world, texts)) if governor.scores_now else ():
        text = by_index[shadow.request]
        method, lag = world.methods[shadow.method], text.lags.get(shadow.method, 0)
        if method.lookup:
            seconds = factor * world.propose_seconds(shadow.method, 1, 1)
            offered, stood = world.draft(shadow.method, text.index, text.position, 16)
            governor.observe_draft(text.index, shadow.method, 16, offered, stood, rejected=stood < offered, shadow=True)
        else:
            read = min(lag, READ_AT_ONCE)
            seconds = factor * world.read_seconds(shadow.method, read)
            first = text.position - lag
            where = range(max(first, text.position - READ_AT_ONCE), first + read)
            hits = [world.luck(shadow.method, text.index, p) < method.stands(text.index, p) for p in where]
            governor.observe_overlaps(text.index, shadow.method, [float(hit) for hit in hits])
            text.lags[shadow.method] = lag - read
        governor.observe_shadow_seconds(shadow.method, 1, seconds)
        log.seconds += seconds
        log.shadow_seconds += seconds
        log.true[-1] += seconds


def governor_of(world: World) -> CountingGovernor:
    """A governor that knows the world's costs as a calibration would."""
    methods = world.methods.items()
    return CountingGovernor([MethodCandidate(n, 16, m.lookup, not m.keeps_up) for n, m in methods], world.table())


def best_fixed(world: World, **how: Any) -> tuple[Policy, float]:
    """The fixed choice of least time for a token in hindsight, and this time."""
    policies: list[Policy] = [None, *((name, length) for name in world.methods for length in (1, 2, 3, 5, 8, 12))]
    times = [(run(world, policy, **how).pace, place) for place, policy in enumerate(policies)]
    seconds, place = min(times)
    return policies[place], seconds

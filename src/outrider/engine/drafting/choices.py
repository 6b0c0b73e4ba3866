"""The methods that the engine chooses from, and the scores of those that do not draft at the moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from time import thread_time

from outrider.draft import Draft
from outrider.engine.drafting.calibration import ExperienceFiles
from outrider.engine.drafting.planning import RowShares
from outrider.engine.drafting.proposers import ProposerSet
from outrider.engine.sequence import Drafter, Sequence
from outrider.errors import InputError, ModelError
from outrider.govern.acceptance import Experience
from outrider.govern.costs import CostTable
from outrider.govern.decision import Composite, Decision, MethodCandidate, Together
from outrider.govern.governor import HOLDS, Governor
from outrider.govern.shadows import Shadow
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.compositions import Composition, Merge, Then, named, parts_of
from outrider.propose.draft_model import CATCH_UP_ROWS
from outrider.propose.settings import Method, SpeculationConfig, same_method
from outrider.verify.noise import NoiseSource

# --- Sets of methods that the engine chooses from, each with its governor and what is known of its members.


#: A governor that has raised so often is not asked any more.
_MOST_FAULTS = 3

#: Sets of methods for which it is remembered what was learnt; those unused for longest are forgotten.
MOST_SETS = 8

#: Where costs are scripted, nothing is known from earlier processes and nothing is kept.
_NOTHING_KEPT = ExperienceFiles({})

#: What a request leaves to be chosen from.
Candidates = tuple[SpeculationConfig, ...]

#: Finds what passes cost, given the proposers of the methods by name.
Calibrate = Callable[[Mapping[str, Proposer]], CostTable]

#: Finds what methods showed in earlier processes, given their settings and their proposers by name.
Remember = Callable[[Mapping[str, SpeculationConfig], Mapping[str, Proposer]], ExperienceFiles]


@dataclass(eq=False)
class ChoiceSet:
    """One set of methods, and who chooses among them."""

    candidates: Candidates  # as requests leave the choice among them
    choices: dict[str, SpeculationConfig]  # the candidates by name
    #: The methods that draft by themselves, by name: choices, and what choices are made of.
    members: dict[str, SpeculationConfig]
    governor: Governor
    experience: ExperienceFiles  # what the members showed in earlier processes
    lengths: dict[tuple[str, int], SpeculationConfig] = field(default_factory=dict)  # the choices at each length
    num_faults: int = 0  # how often a governor of theirs has raised

    @cached_property
    def methods(self) -> dict[str, Method]:
        """Those of the members."""
        return {name: config.method for name, config in self.members.items() if config.method is not None}

    @cached_property
    def models(self) -> frozenset[str]:
        """The members with a model of their own."""
        return frozenset(name for name in self.members if not self.governor.candidates[name].lookup)

    @property
    def is_off(self) -> bool:
        """True if its governor has raised too often to be asked again."""
        return self.num_faults >= _MOST_FAULTS

    def config(self, decision: Decision) -> SpeculationConfig:
        """The settings of a decision to draft."""
        assert decision.method is not None
        key = (decision.method, decision.num_draft_tokens)
        if key not in self.lengths:
            choice = self.choices[decision.method]
            assert choice.method is not None
            length = max(decision.num_draft_tokens, choice.method.least_length())
            self.lengths[key] = choice.replace(num_draft_tokens=length)
        return self.lengths[key]


class ChoiceSets:
    """The sets that are alive. A set is calibrated, and what is known of its methods read, when it begins."""

    def __init__(
        self, proposers: ProposerSet, calibrate: Calibrate, remember: Remember, shares: RowShares, max_rows: int
    ) -> None:
        self.alive: list[ChoiceSet] = []  # the most recently used come last
        self._proposers = proposers
        self._calibrate = calibrate
        self._remember = remember
        self._shares = shares
        self._max_rows = max_rows
        self._scripted: CostTable | None = None
        self._holds = HOLDS

    def script(self, table: CostTable, holds: int) -> None:
        """Take these costs instead of a calibration from now on, and forget what was learnt."""
        self._scripted, self._holds = table, holds
        for found in self.alive:
            found.governor, found.num_faults = self.new_governor(found.choices, found.members, table), 0
            found.experience = _NOTHING_KEPT

    def find(self, candidates: Candidates, in_use: Collection[ChoiceSet]) -> ChoiceSet:
        """The set of these candidates, begun on first use. Sets `in_use`, of requests that are under way, are kept. It
        raises what ProposerSet.prepare does."""
        for place, found in enumerate(self.alive):
            if found.candidates == candidates:
                self.alive.append(self.alive.pop(place))
                return found
        choices, members = _named(candidates)
        proposers = self._built(candidates, members)
        table, experience = self._scripted, _NOTHING_KEPT
        if table is None:
            table, experience = self._calibrate(proposers), self._remember(members, proposers)
        governor = self.new_governor(choices, members, table, experience.read())
        found = ChoiceSet(candidates, choices, members, governor, experience)
        idle = [each for each in self.alive if each not in in_use]
        for each in idle[: max(0, len(self.alive) + 1 - MOST_SETS)]:
            self.alive.remove(each)
        self.alive.append(found)
        return found

    def _built(self, candidates: Candidates, members: Mapping[str, SpeculationConfig]) -> dict[str, Proposer]:
        """The proposers of members; an error of one that is inside another names its place."""
        for place, config in enumerate(candidates):
            try:
                self._proposers.prepare(config)
            except (InputError, ModelError) as error:
                if config.method is None or not config.method.nested:
                    raise
                raise named(f"methods.{place}", error) from None
        return {name: self._proposers.get(c.method) for name, c in members.items() if c.method is not None}

    def new_governor(
        self,
        choices: Mapping[str, SpeculationConfig],
        members: Mapping[str, SpeculationConfig],
        table: CostTable,
        known: Mapping[str, Experience] | None = None,
    ) -> Governor:
        """A governor that has seen nothing yet, but for what members showed in earlier processes."""
        known = known or {}
        candidates = [
            self._member(name, config, config.method, known.get(name), alone=name in choices)
            for name, config in members.items()
            if config.method is not None
        ]
        candidates += [self._composite(name, config, members) for name, config in choices.items() if name not in members]
        return Governor(candidates, table, self._max_rows, self._holds, CATCH_UP_ROWS)

    def _member(
        self, name: str, config: SpeculationConfig, method: Method, experience: Experience | None, *, alone: bool
    ) -> MethodCandidate:
        """A method by itself."""
        lookup = not method.grows_from_probabilities
        return MethodCandidate(
            name,
            config.num_draft_tokens,
            lookup=lookup,
            scored=lookup or self._proposers.get(method).tells_overlaps,
            in_one_pass=method.drafts_in_one_pass,
            ends_drafts=method.ends_drafts,
            experience=experience,
            alone=alone,
        )

    def _composite(self, name: str, config: SpeculationConfig, members: Mapping[str, SpeculationConfig]) -> MethodCandidate:
        """A choice that members make together."""
        together = _together(config, members)
        assert isinstance(together, Together)
        lookup = all(not part.method.grows_from_probabilities for part in parts_of(config) if part.method is not None)
        composite = Composite(together, partial(self._shares.of, config))
        return MethodCandidate(name, config.num_draft_tokens, lookup=lookup, composite=composite)


def _named(candidates: Candidates) -> tuple[dict[str, SpeculationConfig], dict[str, SpeculationConfig]]:
    """The choices, and the methods that draft for them; each with a name of its own."""
    choices: dict[str, SpeculationConfig] = {}
    for config in candidates:
        if config.method is not None:
            choices[_unlike(config.name, choices)] = config
    members = {name: config for name, config in choices.items() if not isinstance(config.method, Composition)}
    for config in choices.values():
        for part in parts_of(config):
            if _name_of(part, members) is None:
                members[_unlike(part.name, {**choices, **members})] = part
    return choices, members


def _unlike(name: str, taken: Collection[str]) -> str:
    further = (f"{name} {number}" for number in count(2))
    return name if name not in taken else next(each for each in further if each not in taken)


def _name_of(config: SpeculationConfig, members: Mapping[str, SpeculationConfig]) -> str | None:
    """The member that drafts as these settings say. How much it may draft makes no other one of it."""
    for name, member in members.items():
        alike = (member.tree, member.draft_sampling) == (config.tree, config.draft_sampling)
        if alike and same_method(member.method, config.method):
            return name
    return None


def _together(config: SpeculationConfig, members: Mapping[str, SpeculationConfig]) -> str | Together:
    """The names of members as they draft together, in the order of their turns."""
    method = config.method
    if isinstance(method, Composition):
        parts = method.in_order() if isinstance(method, Merge) else method.methods
        return Together(tuple(_together(part, members) for part in parts), in_line=isinstance(method, Then))
    name = _name_of(config, members)
    assert name is not None, "every part is a member"
    return name


# --- Scores of idle methods: drafts that nobody verifies are compared with the text that comes.
#
# A model reads what it has yet to read, and what it would have drafted there is compared with what was written.


#: Names whoever draws a shadow in keys, apart from the turns of the step.
_SHADOWS = 1 << 19


@dataclass
class _Pending:
    """A draft that an idle lookup would have made, until the text has come past it."""

    method: str
    draft: Draft
    length: int  # of the text, up to which it was compared
    asked: int  # tokens that were asked for
    seconds: float = 0.0  # measured time of the score
    node: int = -1  # where the text is in it
    accepted: int = 0  # tokens of it that stand

    def follow(self, token_ids: Seq[int]) -> bool:
        """Go along the whole text; returns whether there may be more to come."""
        for token in token_ids[self.length :]:
            child = self.draft.child(self.node, token)
            if child is None:
                return False
            self.node, self.accepted = child, self.accepted + 1
        self.length = len(token_ids)
        return bool(self.draft.children(self.node))


class ShadowScores:
    """Scores idle methods of all texts."""

    def __init__(self) -> None:
        self._pending: dict[int, list[_Pending]] = {}
        self._probs: dict[int, deque[float]] = {}

    def drop(self, seq_id: int) -> None:
        """A text has ended, or is not governed any more."""
        self._pending.pop(seq_id, None)
        self._probs.pop(seq_id, None)

    def clear(self) -> None:
        """Forget all texts."""
        self._pending, self._probs = {}, {}

    def awaits(self, seq: Sequence, method: str | None = None) -> bool:
        """True if there is a draft, by this method or by any, that the text has not come past."""
        found = self._pending.get(seq.seq_id, ())
        return any(each.method == method for each in found) if method else bool(found)

    def note(self, seq: Sequence, probs: Iterable[float]) -> None:
        """The target wrote tokens with these probabilities."""
        self._probs.setdefault(seq.seq_id, deque(maxlen=CATCH_UP_ROWS)).extend(probs)

    def break_off(self, seq: Sequence) -> None:
        """Forget the noted probabilities: the target's next token does not follow on theirs."""
        self._probs.pop(seq.seq_id, None)

    def ask(
        self, seq: Sequence, governor: Governor, drafter: Drafter, shadow: Shadow, noise: NoiseSource
    ) -> list[float] | None:
        """Ask a lookup for a draft, and remember it. Of a model: how often its draft tokens would have stood in the last
        tokens of the text (`Proposer.overlaps`)."""
        if not governor.candidates[shadow.method].lookup:
            return drafter.proposer.overlaps(seq.view, list(self._probs.get(seq.seq_id, ())))
        asked = governor.candidates[shadow.method].longest
        request = ProposeRequest(seq.view, asked, asked, drafter=_SHADOWS + drafter.index)
        (draft,) = drafter.host.ask([drafter], [request], DraftNoise(noise))
        pending = _Pending(shadow.method, draft, len(seq.token_ids), asked)
        self._pending.setdefault(seq.seq_id, []).append(pending)
        return None

    def charge(self, seq: Sequence, method: str, seconds: float) -> bool:
        """A draft took so long, which is paid when it is known what it was worth; False where it has none."""
        pending = [each for each in self._pending.get(seq.seq_id, ()) if each.method == method]
        if pending:
            pending[-1].seconds = seconds
        return bool(pending)

    def settle(self, seq: Sequence, governor: Governor, believed: Callable[[float], float]) -> None:
        """Score the drafts that the text has come past. `believed` are the seconds of a task as the governor is to believe
        them, from those that a clock measured."""
        left = []
        for pending in self._pending.pop(seq.seq_id, ()):
            if pending.follow(seq.token_ids):
                left.append(pending)
                continue
            begun = thread_time()
            governor.observe_draft(
                seq.seq_id,
                pending.method,
                pending.asked,
                len(pending.draft),
                pending.accepted,
                rejected=bool(pending.draft.children(pending.node)),
                shadow=True,
            )
            seconds = pending.seconds + believed(thread_time() - begun)
            governor.observe_shadow_seconds(pending.method, 1, seconds)
        if left:
            self._pending[seq.seq_id] = left

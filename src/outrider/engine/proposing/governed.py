"""Sets of methods that the engine chooses from, each with its governor and what is known of its members."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count

from outrider.engine.proposing.experience import ExperienceFiles
from outrider.engine.proposing.proposers import ProposerSet
from outrider.engine.scheduling.row_shares import RowShares
from outrider.errors import InputError, ModelError
from outrider.govern.acceptance import Experience
from outrider.govern.composites import Composite, Together
from outrider.govern.costs import CostTable
from outrider.govern.decision import Candidate, Decision
from outrider.govern.governor import HOLDS, Governor
from outrider.propose.base import Proposer
from outrider.propose.compositions import Composition, Merge, Then, named, parts_of
from outrider.propose.method import Method, same_method
from outrider.propose.methods.draft_model import CATCH_UP_ROWS
from outrider.propose.speculation import SpeculationConfig

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
class Governed:
    """One set of methods, and who chooses among them.

    Attributes:
        candidates: As requests leave the choice among them.
        choices: The same by name.
        members: The methods that draft by themselves, by name: choices, and what choices are made of.
        governor: Who chooses.
        experience: What the members showed in earlier processes.
        lengths: The choices at each length.
        num_faults: How often a governor of theirs has raised.
    """

    candidates: Candidates
    choices: dict[str, SpeculationConfig]
    members: dict[str, SpeculationConfig]
    governor: Governor
    experience: ExperienceFiles
    lengths: dict[tuple[str, int], SpeculationConfig] = field(default_factory=dict)
    num_faults: int = 0

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
        """Whether its governor has raised too often to be asked again."""
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


class GovernedSets:
    """The sets that are alive.

    Args:
        proposers: Who may draft.
        calibrate: Called once for each set.
        remember: Called once for each set.
        shares: How the members of compositions share rows.
        max_rows: Rows that a pass may hold.

    Attributes:
        alive: The most recently used come last.
    """

    def __init__(
        self, proposers: ProposerSet, calibrate: Calibrate, remember: Remember, shares: RowShares, max_rows: int
    ) -> None:
        self.alive: list[Governed] = []
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

    def find(self, candidates: Candidates, in_use: Collection[Governed]) -> Governed:
        """The set of these candidates, begun on first use.

        Args:
            candidates: As a request leaves the choice among them.
            in_use: The sets of requests that are under way, which are kept.

        Raises:
            InputError, ModelError, ProposerError: A method cannot be used.
        """
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
        found = Governed(candidates, choices, members, governor, experience)
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
        """A governor that has seen nothing yet.

        Args:
            choices: By name.
            members: By name.
            table: What passes cost.
            known: What members showed in earlier processes.
        """
        experience = (known or {}).get
        candidates = [
            Candidate(
                name,
                config.num_draft_tokens,
                lookup=not config.method.grows_from_probabilities,
                in_one_pass=config.method.drafts_in_one_pass,
                experience=experience(name),
                alone=name in choices,
            )
            for name, config in members.items()
            if config.method is not None
        ]
        candidates += [self._composite(name, config, members) for name, config in choices.items() if name not in members]
        return Governor(candidates, table, self._max_rows, self._holds, CATCH_UP_ROWS)

    def _composite(self, name: str, config: SpeculationConfig, members: Mapping[str, SpeculationConfig]) -> Candidate:
        """A choice that members make together."""
        together = _together(config, members)
        assert isinstance(together, Together)
        lookup = all(not part.method.grows_from_probabilities for part in parts_of(config) if part.method is not None)
        composite = Composite(together, partial(self._shares.of, config))
        return Candidate(name, config.num_draft_tokens, lookup=lookup, composite=composite)


def _named(candidates: Candidates) -> tuple[dict[str, SpeculationConfig], dict[str, SpeculationConfig]]:
    """What may be chosen, and the methods that draft for it; each with a name of its own."""
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

"""Sets of methods that the engine chooses from, each with its governor and what is known of its members."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from outrider.engine.proposing.experience import ExperienceFiles
from outrider.engine.proposing.proposers import ProposerSet
from outrider.govern.acceptance import Experience
from outrider.govern.costs import CostTable
from outrider.govern.governor import HOLDS, Candidate, Decision, Governor
from outrider.propose.base import Proposer
from outrider.propose.method import Method
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
        members: By the name of the candidate.
        governor: Who chooses.
        experience: What the members showed in earlier processes.
        lengths: The members at each length.
        num_faults: How often a governor of theirs has raised.
    """

    candidates: Candidates
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
        return frozenset(name for name, each in self.governor.candidates.items() if not each.lookup)

    @property
    def is_off(self) -> bool:
        """Whether its governor has raised too often to be asked again."""
        return self.num_faults >= _MOST_FAULTS

    def config(self, decision: Decision) -> SpeculationConfig:
        """The settings of a decision to draft."""
        assert decision.method is not None
        key = (decision.method, decision.num_draft_tokens)
        if key not in self.lengths:
            member = self.members[decision.method]
            assert member.method is not None
            length = max(decision.num_draft_tokens, member.method.least_length())
            self.lengths[key] = member.replace(num_draft_tokens=length)
        return self.lengths[key]


class GovernedSets:
    """The sets that are alive.

    Args:
        proposers: Who may draft.
        calibrate: Called once for each set.
        remember: Called once for each set.
        max_rows: Rows that a pass may hold.

    Attributes:
        alive: The most recently used come last.
    """

    def __init__(self, proposers: ProposerSet, calibrate: Calibrate, remember: Remember, max_rows: int) -> None:
        self.alive: list[Governed] = []
        self._proposers = proposers
        self._calibrate = calibrate
        self._remember = remember
        self._max_rows = max_rows
        self._scripted: CostTable | None = None
        self._holds = HOLDS

    def script(self, table: CostTable, holds: int) -> None:
        """Take these costs instead of a calibration from now on, and forget what was learnt."""
        self._scripted, self._holds = table, holds
        for found in self.alive:
            found.governor, found.num_faults = self.new_governor(found.members, table), 0
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
        members: dict[str, SpeculationConfig] = {}
        for config in candidates:
            if config.method is not None:
                name = config.name if config.name not in members else f"{config.name} {len(members) + 1}"
                members[name] = config
        proposers = {name: self._proposers.get(c.method) for name, c in members.items() if c.method is not None}
        table, experience = self._scripted, _NOTHING_KEPT
        if table is None:
            table, experience = self._calibrate(proposers), self._remember(members, proposers)
        found = Governed(candidates, members, self.new_governor(members, table, experience.read()), experience)
        idle = [each for each in self.alive if each not in in_use]
        for each in idle[: max(0, len(self.alive) + 1 - MOST_SETS)]:
            self.alive.remove(each)
        self.alive.append(found)
        return found

    def new_governor(
        self, members: Mapping[str, SpeculationConfig], table: CostTable, known: Mapping[str, Experience] | None = None
    ) -> Governor:
        """A governor that has seen nothing yet.

        Args:
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
                experience=experience(name),
            )
            for name, config in members.items()
            if config.method is not None
        ]
        return Governor(candidates, table, self._max_rows, self._holds, CATCH_UP_ROWS)

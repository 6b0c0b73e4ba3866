"""The proposers that are alive beside one target, built on first use and shared by all requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from outrider.engine.proposing.breaker import ProposerBreaker
from outrider.errors import InputError, ModelError
from outrider.model.target import Target
from outrider.propose.base import Proposer
from outrider.propose.compositions import named, parts_of, placed_parts_of
from outrider.propose.method import LoadRunner, Method, ProposerContext, same_method
from outrider.propose.speculation import SpeculationConfig
from outrider.propose.trees.tree import TreeBuilder

#: Proposers that are kept though no sequence uses them.
MAX_IDLE = 4


@dataclass
class _Alive:
    """A proposer, how many sequences use it, what the trees of its drafts have learnt, by shape, and whether it goes when
    nobody uses it any more."""

    method: Method
    proposer: Proposer
    breaker: ProposerBreaker
    num_users: int = 0
    trees: dict[str, TreeBuilder] = field(default_factory=dict)
    leaves: bool = False


class ProposerSet:
    """Hands out one proposer for every distinct method; those longest unused are let go, never one in use.

    Args:
        target: What proposers may use of the target.
        max_num_batched_tokens: Rows a pass may hold.
        load_runner: Loads another model.
        kept: A method whose proposer is never let go.
    """

    def __init__(
        self, target: Target, max_num_batched_tokens: int, load_runner: LoadRunner, kept: Method | None = None
    ) -> None:
        self._context = ProposerContext(target, max_num_batched_tokens, load_runner)
        self._kept = kept
        self._alive: list[_Alive] = []  # least recently used first
        self._off: list[tuple[Method, ProposerBreaker]] = []  # outlives the proposer

    def get(self, method: Method) -> Proposer:
        """The proposer with these settings.

        Raises:
            InputError: A setting is missing or does not fit the target.
            ModelError: Its model cannot be loaded or speaks other tokens.
            ProposerError: It cannot be built.
        """
        return self._find(method).proposer

    def prepare(self, config: SpeculationConfig) -> list[Proposer]:
        """The proposers of settings: one, or those of all members of a composition.

        Raises:
            InputError, ModelError, ProposerError: One cannot be built; the error of a setting or a model names its place.
        """
        found = []
        for place, part in placed_parts_of(config):
            if part.method is None:
                continue
            try:
                found.append(self.get(part.method))
            except (InputError, ModelError) as error:
                if not place:
                    raise
                raise named(place, error) from None
        return found

    def change(self, config: SpeculationConfig, kept: Method | None) -> None:
        """Other settings are the usual ones from now on: proposers of others go as soon as no sequence uses them.

        Args:
            config: The settings, whose proposers are alive.
            kept: The method of these whose proposer is never let go.
        """
        self._kept = kept
        stay = [part.method for each in config.candidates for part in parts_of(each)]
        for found in self._alive:
            found.leaves = not any(same_method(found.method, method) for method in stay)
        self._let_go(self._alive)

    def acquire(self, method: Method) -> Proposer:
        """The same, in use until `release`."""
        found = self._find(method)
        found.num_users += 1
        return found.proposer

    def breaker_of(self, proposer: Proposer) -> ProposerBreaker:
        """How a proposer that is alive fares."""
        return next(found.breaker for found in self._alive if found.proposer is proposer)

    def is_off(self, method: Method) -> bool:
        """Whether the proposer with these settings is switched off for now."""
        return any(breaker.steps_left and same_method(known, method) for known, breaker in self._off)

    def end_step(self) -> list[Method]:
        """The step is over; returns the methods whose proposers are switched off from now on."""
        for _, breaker in self._off:
            if breaker.steps_left:
                breaker.end_step()
        off = [found for found in self._alive if not self.is_off(found.method) and found.breaker.end_step()]
        new = [found for found in off if all(found.breaker is not breaker for _, breaker in self._off)]
        self._off += [(found.method, found.breaker) for found in new]
        return [found.method for found in off]

    @property
    def switched_off(self) -> dict[str, int]:
        """For how many steps more methods are switched off, by name."""
        return {method.name: breaker.steps_left for method, breaker in self._off if breaker.steps_left}

    @property
    def pauses(self) -> Counter[str]:
        """How often methods were switched off, by name."""
        found: Counter[str] = Counter()
        for method, breaker in self._off:
            found[method.name] += breaker.num_pauses
        return found

    def release(self, method: Method) -> None:
        """A sequence no longer uses the proposer with these settings."""
        found = next(found for found in self._alive if same_method(found.method, method))
        found.num_users -= 1
        assert found.num_users >= 0, "released more often than acquired"
        self._let_go(self._alive)

    def trees_of(self, proposer: Proposer) -> dict[str, TreeBuilder]:
        """The builders of trees that adapt to this proposer, by shape; they live as long as it does."""
        return next(found.trees for found in self._alive if found.proposer is proposer)

    @property
    def num_users(self) -> dict[str, int]:
        """How many sequences use the proposers of each method, by its name."""
        found: dict[str, int] = {}
        for alive in self._alive:
            found[alive.method.name] = found.get(alive.method.name, 0) + alive.num_users
        return found

    def forget_trees(self) -> None:
        """Drop what trees have learnt."""
        for found in self._alive:
            found.trees.clear()

    def forget_faults(self) -> None:
        """Drop what is known of faults, so that no method is switched off."""
        self._off.clear()
        for found in self._alive:
            found.breaker = ProposerBreaker()

    def dismiss_all(self) -> None:
        """Let all go, those in use too: their sequences are no more. What is asked for next is built anew."""
        self._alive.clear()

    def __iter__(self) -> Iterator[Proposer]:
        return iter([found.proposer for found in self._alive])

    def _find(self, method: Method) -> _Alive:
        for place, found in enumerate(self._alive):
            if same_method(found.method, method):
                self._alive.append(self._alive.pop(place))
                found.leaves = False
                return found
        breaker = next((breaker for known, breaker in self._off if same_method(known, method)), ProposerBreaker())
        built = _Alive(method, self._context.build(method), breaker)
        self._alive.append(built)
        self._let_go(self._alive[:-1])  # the new one is about to be used
        return built

    def _let_go(self, candidates: list[_Alive]) -> None:
        idle = [found for found in candidates if not found.num_users and not same_method(found.method, self._kept)]
        staying = [found for found in idle if not found.leaves]
        over = staying[: max(0, len(staying) - MAX_IDLE)]
        for found in [*over, *(found for found in idle if found.leaves)]:
            self._alive.remove(found)

"""The proposers that are alive beside one target, and the drafters and tree builders of each sequence."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from outrider.engine.sequence import Drafter, ProposerBreaker, Sequence, SharedProposer
from outrider.errors import InputError, ModelError, OutriderError
from outrider.model.target import Target
from outrider.propose.base import Proposer
from outrider.propose.compositions import named, parts_of, placed_parts_of
from outrider.propose.settings import LoadRunner, Method, ProposerContext, SpeculationConfig, TreeShape, same_method
from outrider.propose.tree import CHAIN, StaticTree, TreeBuilder
from outrider.propose.trees.adaptive import BestFirstTree, JudgedChain, Pace, SequoiaTree

# --- The proposers that are alive beside one target, built on first use and shared by all requests.


#: Proposers that are kept though no sequence uses them.
MAX_IDLE = 4


class ProposerSet:
    """Hands out one proposer for every distinct method; those longest unused are let go, never one in use, nor that of the
    `kept` method."""

    def __init__(
        self, target: Target, max_num_batched_tokens: int, load_runner: LoadRunner, kept: Method | None = None
    ) -> None:
        self._context = ProposerContext(target, max_num_batched_tokens, load_runner)
        self._kept = kept
        self._alive: list[SharedProposer] = []  # least recently used first
        self._off: list[tuple[Method, ProposerBreaker]] = []  # outlives the proposer

    def get(self, method: Method) -> Proposer:
        """The proposer with these settings. It raises an InputError where a setting is missing or does not fit the target,
        a ModelError where its model cannot be loaded or speaks other tokens, and a ProposerError where it cannot be
        built."""
        return self.find(method).proposer

    def prepare(self, config: SpeculationConfig) -> list[Proposer]:
        """The proposers of settings: one, or those of all members of a composition. It raises what `get` does; the error of
        a setting or a model names its place."""
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
        """Other settings, whose proposers are alive, are the usual ones from now on: proposers of others go as soon as no
        sequence uses them, and that of the `kept` method never does."""
        self._kept = kept
        stay = [part.method for each in config.candidates for part in parts_of(each)]
        for found in self._alive:
            found.leaves = not any(same_method(found.method, method) for method in stay)
        self._let_go(self._alive)

    def acquire(self, method: Method) -> SharedProposer:
        """The proposer with these settings and what is known of it, in use until `release`."""
        found = self.find(method)
        found.num_users += 1
        return found

    def is_off(self, method: Method) -> bool:
        """True if the proposer with these settings is switched off for now."""
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
        """Returns how often methods were switched off, by name."""
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

    @property
    def num_users(self) -> dict[str, int]:
        """Returns how many sequences use the proposers of each method, by its name."""
        found: dict[str, int] = {}
        for alive in self._alive:
            found[alive.method.name] = found.get(alive.method.name, 0) + alive.num_users
        return found

    def forget(self) -> None:
        """Drop what trees have learnt, and what is known of faults, so that no method is switched off."""
        self._off.clear()
        for found in self._alive:
            found.breaker = ProposerBreaker()
            found.trees.clear()

    def dismiss_all(self) -> None:
        """Let all go, those in use too: their sequences are no more. What is asked for next is built anew."""
        self._alive.clear()

    def __iter__(self) -> Iterator[Proposer]:
        return iter([found.proposer for found in self._alive])

    def find(self, method: Method) -> SharedProposer:
        """The proposer with these settings and what is known of it, built on first use."""
        for place, found in enumerate(self._alive):
            if same_method(found.method, method):
                self._alive.append(self._alive.pop(place))
                found.leaves = False
                return found
        breaker = next((breaker for known, breaker in self._off if same_method(known, method)), ProposerBreaker())
        built = SharedProposer(self._context.build(method), self._context.vocab_size, method, breaker)
        self._alive.append(built)
        self._let_go(self._alive[:-1])  # the new one is about to be used
        return built

    def _let_go(self, candidates: list[SharedProposer]) -> None:
        idle = [found for found in candidates if not found.num_users and not same_method(found.method, self._kept)]
        staying = [found for found in idle if not found.leaves]
        over = staying[: max(0, len(staying) - MAX_IDLE)]
        for found in [*over, *(found for found in idle if found.leaves)]:
            self._alive.remove(found)


# --- The drafters of each sequence: when they begin, fork and end.


logger = logging.getLogger(__name__)

#: Proposers that one sequence keeps, unless one step asks for more.
MAX_DRAFTERS = 8


class Drafters:
    """Brings sequences and proposers together."""

    def __init__(self, proposers: ProposerSet) -> None:
        self._proposers = proposers

    def of(self, seq: Sequence, method: Method) -> Drafter | None:
        """The proposer with these settings at work for a sequence, begun on first use; None where it cannot be had."""
        if self._proposers.is_off(method):
            return None
        found = seq.drafter(method)
        if found is not None:
            found.last_round = seq.view.round
        if found is not None or any(same_method(method, refused) for refused in seq.refused):
            return found
        try:
            host = self._proposers.acquire(method)
        except OutriderError as error:
            logger.warning("method %s, request %d: %s", method.name, seq.request.request_id, error)
            seq.stats.num_proposer_faults += 1
            seq.refused.append(method)
            return None
        requires, of = host.proposer.requires, (seq.request.request_id, seq.stats)
        found = Drafter(seq.num_drafters, method, host, *of, requires, last_round=seq.view.round)
        seq.num_drafters += 1
        seq.drafters.append(found)
        if requires is not None:
            seq.reads_every_row |= requires.needs_uncached_prompt
            if requires.added_layers is not None:
                seq.added_layers |= {requires.added_layers.number}
        with found.blaming("begin"):
            found.proposer.begin(seq.view)
        self._dismiss_unused(seq)
        return found

    def _dismiss_unused(self, seq: Sequence) -> None:
        """Part with the proposers that a sequence has not used for longest, where a planner has named very many."""
        idle = sorted((d for d in seq.drafters if d.last_round < seq.view.round), key=lambda d: d.last_round)
        for drafter in idle[: max(0, len(seq.drafters) - MAX_DRAFTERS)]:
            self.part(seq, drafter)

    def part(self, seq: Sequence, drafter: Drafter) -> None:
        """A sequence goes on without one of its proposers."""
        seq.drafters.remove(drafter)
        self._end(seq, drafter)

    def _end(self, seq: Sequence, drafter: Drafter) -> None:
        with drafter.blaming("finish"):
            drafter.proposer.finish(seq.view)
        self._proposers.release(drafter.method)

    def switch_off(self, method: Method, sequences: Iterable[Sequence]) -> None:
        """A proposer brings nothing but faults: all sequences go on without it, and it is asked again after a while."""
        logger.warning("method %s is switched off for %d steps", method.name, self._proposers.switched_off[method.name])
        for seq in sequences:
            drafter = seq.drafter(method)
            if drafter is not None:
                self.part(seq, drafter)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The proposers of a sequence go on with a copy of it too."""
        child.reads_every_row, child.refused = parent.reads_every_row, list(parent.refused)
        child.added_layers = parent.added_layers
        child.num_drafters = parent.num_drafters
        for drafter in parent.drafters:
            self._proposers.acquire(drafter.method)
            copy = replace(drafter, request_id=child.request.request_id, stats=child.stats, num_faults=0)
            child.drafters.append(copy)
            with copy.blaming("fork"):
                copy.proposer.fork(parent.view, child.view)

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended."""
        for drafter in seq.drafters:
            self._end(seq, drafter)


# --- Tree builders, one for each proposer and kind of tree, which learn from accepted rows.


#: The builders of drafts that adapt, by what is asked for.
_ADAPTIVE: dict[str, Callable[[Pace], TreeBuilder]] = {
    "best_first": BestFirstTree,
    "sequoia": SequoiaTree,
    "judged": JudgedChain,  # a chain from a proposer that judges places
}


class TreeBuilders:
    """Hands out the builders of trees. What rows cost is measured when the first draft that adapts is asked for."""

    def __init__(self, proposers: ProposerSet, measure: Callable[[], Pace], *, invariant: bool = True) -> None:
        self._proposers = proposers
        self._measure = measure
        self._invariant = invariant  # whether a row's bits do not depend on the other rows of its pass
        self._pace: Pace | None = None

    def of(self, host: SharedProposer, shape: TreeShape, *, comes_again: bool = False) -> TreeBuilder:
        """The builder of a shape for the drafts of a proposer; one that adapts lives as long as the proposer does. Where
        rows depend on their pass, chains end by no clock in a text that must come again."""
        judged = not shape and host.proposer.judges and (self._invariant or not comes_again)
        kind = "judged" if judged else shape
        if not isinstance(kind, str):
            return StaticTree.of_widths(kind) if kind else CHAIN
        if kind not in host.trees:
            host.trees[kind] = _ADAPTIVE[kind](self.pace)
        return host.trees[kind]

    @property
    def pace(self) -> Pace:
        """The worth of time, measured when it is first asked for."""
        if self._pace is None:
            self._pace = self._measure()
        return self._pace

    @property
    def measured(self) -> bool:
        """True if a draft that adapts was ever asked for."""
        return self._pace is not None

    def prepare(self, part: SpeculationConfig) -> None:
        """Measure now what drafts of these settings need to know, rather than in a step of others."""
        method = part.method
        ends = not part.tree and method is not None and method.ends_drafts and self._proposers.get(method).judges
        if ends or isinstance(part.tree, str):
            _ = self.pace

    def use_pace(self, pace: Pace) -> None:
        """Take another pace, and forget what was learnt; between requests only. The proofs need one without a clock."""
        self._pace = pace
        self._proposers.forget()

    def observe_step(self, num_tokens: int, seconds: float, num_levels: int, propose_seconds: float) -> None:
        """A step of sequences that decode has ended; for trees that adapt, once there are any."""
        self.pace.observe_step(num_tokens, seconds)
        if num_levels:
            self.pace.observe_levels(num_levels, propose_seconds)


# --- AcceptanceCheck: says in the log where a trained proposer is hardly ever right, which shows in its speed alone.


#: Places of texts at which a method must have proposed a token before it is judged, again and again.
PLACES = 200
#: Where a smaller share of these has a token that stands, something is wrong. Heads that read a wrong layer have 1%, and
#: those that read the right one have a third at least.
LEAST_SHARE = 0.03


class AcceptanceCheck:
    """Counts by method, and warns of each one once."""

    def __init__(self) -> None:
        self.warned: set[str] = set()  # names of methods
        self._counts: dict[str, tuple[int, int]] = {}

    def observe(self, method: Method, num_places: int, num_stood: int) -> None:
        """A method proposed tokens at so many places of a text, and at so many of them one stands."""
        if not method.if_nothing_stands or method.name in self.warned:
            return
        places, stood = self._counts.get(method.name, (0, 0))
        places, stood = places + num_places, stood + num_stood
        if places >= PLACES:
            if stood < LEAST_SHARE * places:
                self.warned.add(method.name)
                said = "method %s: at %d of %d places a draft token stood, which is near nothing; %s"
                logger.warning(said, method.name, stood, places, method.if_nothing_stands)
            places, stood = 0, 0
        self._counts[method.name] = places, stood

"""Fairness between tenants: the one that has had least of a shared resource goes next. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from outrider.engine.sequence import Sequence

# --- Virtual token counters of tenants, which decide whose turn it is. No torch.


class Tenants:
    """Counts the tokens that were computed for each tenant, and says who has had least.

    A token of a prompt that has to be computed and a token of the output count one each, divided by the tenant's weight.
    """

    def __init__(self) -> None:
        self._turns = Turns()

    @property
    def weights(self) -> dict[Tenant, float]:
        """Weights of tenants whose share is not the usual one; see Turns."""
        return self._turns.weights

    @weights.setter
    def weights(self, weights: dict[Tenant, float]) -> None:
        self._turns.weights = weights

    def had(self, seq: Sequence) -> float:
        """Tokens that the tenant of a sequence has had, divided by its weight."""
        return self._turns.had(seq.request.options.namespace)

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """So many tokens were computed for the tenant of a sequence."""
        self._turns.charge(seq.request.options.namespace, num_tokens)

    def charge_prompt(self, seq: Sequence, stop: int) -> None:
        """The tokens of a sequence are computed up to this position: those of its prompt count, and once."""
        start, stop = max(seq.state.num_computed, seq.num_prompt_charged), min(stop, seq.num_prompt_tokens)
        if stop > start:
            self.charge(seq, stop - start)
            seq.num_prompt_charged = stop

    def welcome(self, seq: Sequence, present: Collection[Tenant]) -> None:
        """A sequence comes, while those tenants have others that wait or run."""
        self._turns.welcome(seq.request.options.namespace, present)

    def richest(self, running: Iterable[Sequence]) -> Sequence | None:
        """The newest sequence of the tenant that has most seats for its weight; among equals the newest of all."""
        running = list(running)
        seats = self._seats(running)
        return max(
            enumerate(running),
            key=lambda found: (self._share(seats, found[1].request.options.namespace), found[0]),
            default=(0, None),
        )[1]

    def who_yields(self, running: Iterable[Sequence], newcomer: Sequence) -> Sequence | None:
        """The sequence that gives its seat to a sequence for which there is none; None where its tenant has its fair share
        already.

        It is the newest sequence of the tenant that has most seats for its weight. This tenant must have had more than that
        of the newcomer, and must still have as many seats as that one then has. So no two tenants take a seat from each
        other in turns.
        """
        running = list(running)
        seats, victim = self._seats(running), self.richest(running)
        if victim is None or self.had(victim) <= self.had(newcomer):
            return None  # nor would it be the newcomer's turn afterwards
        seats[victim.request.options.namespace] -= victim.num_seats
        seats[newcomer.request.options.namespace] += newcomer.num_seats
        left, wanted = (self._share(seats, seq.request.options.namespace) for seq in (victim, newcomer))
        return victim if left >= wanted else None

    def _seats(self, running: Iterable[Sequence]) -> Counter[Tenant]:
        seats: Counter[Tenant] = Counter()
        for seq in running:
            seats[seq.request.options.namespace] += seq.num_seats
        return seats

    def _share(self, seats: Counter[Tenant], tenant: Tenant) -> float:
        return seats[tenant] / self._turns.weight(tenant)


# --- Fair turns: the one that has had least of a shared resource goes next. No torch.


#: Whose a request is: its namespace. Requests without one are one tenant together.
Tenant = str | None


class Turns:
    """Counts what each tenant has had, divided by its weight, so that whoever has had least is next.

    These are virtual counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"). A tenant that comes while
    others are there starts where the one stands that has had least, so that nobody saves up turns while he is away. A
    tenant of weight 2 gets twice as much as one of the usual weight, which is 1.
    """

    def __init__(self) -> None:
        self.weights: dict[Tenant, float] = {}  # of tenants whose share is not the usual one
        self._had: defaultdict[Tenant, float] = defaultdict(float)

    def had(self, tenant: Tenant) -> float:
        """The tokens that a tenant has had, divided by its weight."""
        return self._had[tenant]

    def charge(self, tenant: Tenant, amount: float) -> None:
        """So much was done for a tenant."""
        self._had[tenant] += amount / self.weight(tenant)

    def weight(self, tenant: Tenant) -> float:
        """The share of a tenant."""
        return self.weights.get(tenant, 1.0)

    def welcome(self, tenant: Tenant, present: Collection[Tenant]) -> None:
        """A tenant asks for something, while those tenants wait for something or have it."""
        if tenant in present:
            return
        if not present:
            self._had.clear()  # nobody has waited for anybody
            return
        floor = min(self._had[other] for other in present)
        behind = {other: had for other, had in self._had.items() if had > floor or other in present}
        self._had = defaultdict(float, behind)  # all others would start from the floor too
        self._had[tenant] = max(self._had[tenant], floor)

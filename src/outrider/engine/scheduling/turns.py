"""Fair turns: the one that has had least of a shared resource goes next. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

#: Whose a request is: its namespace. Requests without one are one tenant together.
Tenant = str | None


class Turns:
    """Counts what each tenant has had, divided by its weight, so that whoever has had least is next.

    These are virtual counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"). A tenant that comes while
    others are there starts where the one stands that has had least, so that nobody saves up turns while he is away.

    Attributes:
        weights: Of tenants whose share is not the usual one, which is 1. A tenant of weight 2 gets twice as much.
    """

    def __init__(self) -> None:
        self.weights: dict[Tenant, float] = {}
        self._had: defaultdict[Tenant, float] = defaultdict(float)

    def had(self, tenant: Tenant) -> float:
        """What a tenant has had, divided by its weight."""
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

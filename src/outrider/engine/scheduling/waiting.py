"""The queue of waiting sequences, in the order in which they run. No torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Set
from itertools import count

from outrider.engine.scheduling.tenants import Tenants
from outrider.engine.scheduling.turns import Tenant
from outrider.engine.sequence import Sequence


class WaitingLine:
    """Sequences that wait. The tenant that has had fewest tokens is next; within a tenant the lower priority number goes
    first, then whoever came first. A sequence that has run before keeps its place by when it came.

    Args:
        tenants: Who has had how much.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._lines: dict[Tenant, list[Sequence]] = {}
        self._arrivals = count()

    @property
    def tenants(self) -> Set[Tenant]:
        """Whose sequences wait."""
        return self._lines.keys()

    @property
    def first(self) -> Sequence:
        """Who is next."""
        return min((line[0] for line in self._lines.values()), key=self._turn)

    def add(self, seq: Sequence) -> None:
        """A sequence comes, or comes back."""
        if seq.request.arrival is None:
            seq.request.arrival = next(self._arrivals)
        insort(self._lines.setdefault(seq.request.options.namespace, []), seq, key=_place)

    def remove(self, seq: Sequence) -> None:
        """A sequence waits no longer."""
        line = self._lines[seq.request.options.namespace]
        line.remove(seq)
        if not line:
            del self._lines[seq.request.options.namespace]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._lines.get(seq.request.options.namespace, ())

    def __iter__(self) -> Iterator[Sequence]:
        """Tenant by tenant, in the order of their turns."""
        for line in sorted(self._lines.values(), key=lambda line: self._turn(line[0])):
            yield from line

    def _turn(self, seq: Sequence) -> tuple[float, int]:
        assert seq.request.arrival is not None
        return self._tenants.had(seq), seq.request.arrival


def _place(seq: Sequence) -> tuple[int, int, int]:
    assert seq.request.arrival is not None
    return seq.request.options.priority, seq.request.arrival, seq.index

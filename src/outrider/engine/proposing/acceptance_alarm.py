"""AcceptanceAlarm: says in the log where a trained proposer is hardly ever right, which shows in its speed alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from outrider.propose.method import Method

logger = logging.getLogger(__name__)

#: Places of texts at which a method must have proposed a token before it is judged, again and again.
PLACES = 200
#: Where a smaller share of these has a token that stands, something is wrong. Heads that read a wrong layer have 1%, and
#: those that read the right one have a third at least.
LEAST_SHARE = 0.03


@dataclass
class AcceptanceAlarm:
    """Counts by method, and warns of each one once.

    Attributes:
        warned: The names of the methods that it has warned of.
    """

    warned: set[str] = field(default_factory=set)
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)

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

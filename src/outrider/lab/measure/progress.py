"""Tells how far a long measurement is. Nothing heavy is imported here, since the help of all verbs imports it."""

from __future__ import annotations

from time import perf_counter


class Progress:
    """Counts turns, and says how long those take that are left, if they go on to take as long as they did on average.
    Between two turns the time that is left runs down, and where a turn takes longer than those before it grows again. A
    display shows it by a subclass; this class shows nothing."""

    def __init__(self) -> None:
        self.what, self.done, self.total = "loading", 0, 0
        self._begun = self._last = perf_counter()
        self._first = 0

    def shown(self, *, begun: bool = False) -> None:
        """Called when something has changed; `begun` says that other turns than before are counted."""

    def expect(self, what: str, total: int, done: int = 0) -> None:
        """So many turns of this come next, of which some may be done."""
        self.what, self.done, self.total = what, done, total
        self._begun = self._last = perf_counter()
        self._first = done
        self.shown(begun=True)

    def reach(self, done: int) -> None:
        """So many turns are done."""
        self.done, self._last = done, perf_counter()
        self.shown()

    def advance(self) -> None:
        """A turn is done."""
        self.reach(self.done + 1)

    def change(self, turns: int) -> None:
        """There are so many turns more than was expected, or fewer."""
        self.total += turns
        self.shown()

    def tell(self, what: str, done: int, total: int) -> None:
        """So much of it is done; the first call says where it began."""
        if not self.total:
            self.expect(what, total, done)
        self.what, self.total = what, total
        self.reach(done)

    def left(self) -> float | None:
        """Seconds; None where nothing is known of them."""
        turns, rest = self.done - self._first, self.total - self.done
        if turns <= 0 or rest <= 0:
            return None
        now, mean = perf_counter(), (self._last - self._begun) / turns
        waited = now - self._last
        return mean * rest - waited if waited <= mean else (now - self._begun) / (turns + 1) * (rest - 1)


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

"""Walks every path through the decisions of a program, which are known by the order in which it makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.prove.forking import Distribution, Outcome

#: Rounding in float32 makes branches of a few 1e-8 where exact numbers have none. They are counted, but not followed.
FLOOR = 1e-6


class Branches:
    """The script that is being walked, and those that wait. A script is a list of choices for the first decisions."""

    def __init__(self) -> None:
        self._pending: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        self._script: tuple[int, ...] = ()
        self._taken: list[int] = []
        self.weight = 1.0
        self.dropped = 0.0

    def start(self) -> bool:
        """Take up the next script. Returns False when all have been walked."""
        if not self._pending:
            return False
        self._script, self.weight = self._pending.pop()
        self._taken = []
        return True

    def choose(self, chances: Sequence[float]) -> int:
        """The choice of the script, or else the likeliest one. The other choices are left to later scripts.

        Args:
            chances: The probability of each choice. They sum to 1.
        """
        step = len(self._taken)
        if step < len(self._script):
            choice = self._script[step]
        else:
            order = sorted(range(len(chances)), key=lambda i: -chances[i])
            self.dropped += sum(self.weight * chances[i] for i in order if chances[i] < FLOOR)
            choice, *others = [i for i in order if chances[i] >= FLOOR]
            self._pending += [((*self._taken, i), self.weight * chances[i]) for i in others]
            self.weight *= chances[choice]
        self._taken.append(choice)
        return choice

    def finish(self) -> float:
        """The probability of the path that was just walked."""
        assert len(self._taken) >= len(self._script), "a decision did not come again: the program is not deterministic"
        return self.weight


def walk(run: Callable[[Branches], Outcome], *, max_paths: int = 100_000) -> Distribution:
    """The exact distribution of what a program returns when all its chance comes from the branches it is given.

    Args:
        run: The program. After the same choices it must come to the same decisions.
        max_paths: The number of paths beyond which to give up.

    Raises:
        AssertionError: There are more than `max_paths` paths, or the program is not deterministic.
    """
    branches, probs, num_paths = Branches(), dict[Outcome, float](), 0
    while branches.start():
        outcome = run(branches)
        probs[outcome] = probs.get(outcome, 0.0) + branches.finish()
        num_paths += 1
        assert num_paths <= max_paths, f"more than {max_paths} paths"
    return Distribution(probs, num_paths, branches.dropped)

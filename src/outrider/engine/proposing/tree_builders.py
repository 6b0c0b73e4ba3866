"""Tree builders, one for each proposer and kind of tree, which learn from accepted rows."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engine.proposing.proposers import ProposerSet
from outrider.propose.base import Proposer
from outrider.propose.speculation import TreeShape
from outrider.propose.trees.best_first import BestFirstTree
from outrider.propose.trees.pace import Pace
from outrider.propose.trees.sequoia import SequoiaTree
from outrider.propose.trees.tree import CHAIN, StaticTree, TreeBuilder


class TreeBuilders:
    """Hands out the builders of trees.

    Args:
        proposers: Those whose drafts they shape.
        measure: Measures what rows cost; called when the first tree that adapts is asked for.
    """

    def __init__(self, proposers: ProposerSet, measure: Callable[[], Pace]) -> None:
        self._proposers = proposers
        self._measure = measure
        self._pace: Pace | None = None

    def of(self, proposer: Proposer, shape: TreeShape) -> TreeBuilder:
        """The builder of a shape for the drafts of a proposer."""
        if not isinstance(shape, str):
            return StaticTree.of_widths(shape) if shape else CHAIN
        known = self._proposers.trees_of(proposer)
        if shape not in known:
            known[shape] = (BestFirstTree if shape == "best_first" else SequoiaTree)(self.pace)
        return known[shape]

    @property
    def pace(self) -> Pace:
        """What time is worth, measured when it is first asked for."""
        if self._pace is None:
            self._pace = self._measure()
        return self._pace

    @property
    def measured(self) -> bool:
        """Whether a tree that adapts was ever asked for."""
        return self._pace is not None

    def prepare(self, shape: TreeShape) -> None:
        """Measure now what a shape needs to know, rather than in a step of others."""
        if isinstance(shape, str):
            _ = self.pace

    def use_pace(self, pace: Pace) -> None:
        """Take another pace, and forget what was learnt; between requests only. The proofs need one without a clock."""
        self._pace = pace
        self.forget()

    def forget(self) -> None:
        """Forget what was learnt of acceptance; between requests only."""
        self._proposers.forget_trees()

    def observe_step(self, num_tokens: int, seconds: float, num_levels: int, propose_seconds: float) -> None:
        """A step of sequences that decode has ended; for trees that adapt, once there are any."""
        self.pace.observe_step(num_tokens, seconds)
        if num_levels:
            self.pace.observe_levels(num_levels, propose_seconds)

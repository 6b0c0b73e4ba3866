"""Drafting with some of the target's own layers over the target's own KV; `early_exit` and `layer_skip` differ in which.

There is no second model and no second memory. The KV of the text is the target's, so a draft sees the whole text as the
target does, and after a prefix hit or a preemption there is nothing to catch up with. The rows of a draft are written
behind the text, each where the target's own pass will put it, and that pass writes them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.draft import Draft
from outrider.errors import InvalidParameterError
from outrider.model.target import Target, TargetRows
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.growth import Growth, add_level, level_logits


class SharedLayersProposer(Proposer):
    """Greedy, drawn or coupled chains and trees from some of the target's layers and its head, batched over sequences.

    Args:
        target: The target.
        layers: Which of its layers run, in ascending order.

    Raises:
        UnsupportedModelError: The target's layers cannot be chosen from.
    """

    def __init__(self, target: Target, layers: tuple[int, ...]) -> None:
        target.try_layers(layers)
        self.target = target
        self.layers = layers

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growths = [Growth.of(request, request.budget, request.max_depth) for request in requests]
        while alive := [growth for growth in growths if growth.growing]:
            logits = self.target.run([self._rows(growth) for growth in alive], layers=self.layers).logits
            add_level(alive, level_logits(alive, logits), noise)
        return [growth.draft() for growth in growths]

    def _rows(self, growth: Growth) -> TargetRows:
        """The rows that the next level needs.

        A chain computes what came last and finds the KV of its earlier rows in place. A tree is computed anew as a whole,
        since its rows see only their ancestors.
        """
        request, nodes = growth.request, growth.nodes
        kv, path = request.sequence.kv, request.path
        start = len(request.sequence.token_ids) - 1
        if nodes and not growth.branches:
            return self.target.rows(kv, [nodes[-1].token_id], start + len(path) + len(nodes))
        root = len(path)
        tokens = [request.sequence.token_ids[-1], *path, *(node.token_id for node in nodes)]
        parents = None
        if growth.branches:
            parents = (*range(-1, root), *(root if node.parent < 0 else root + 1 + node.parent for node in nodes))
        return self.target.rows(kv, tokens, start, parents, logits_from=root + 1 + growth.level[0])


def check_enough_layers(field: str, value: object, target: Target) -> None:
    """Raise InvalidParameterError where the target has a single layer, so that no part of it can draft."""
    if target.num_layers < 2:
        problem = "the target has one layer, and no part of it can draft"
        raise InvalidParameterError(field, value, problem, "Use another method.")

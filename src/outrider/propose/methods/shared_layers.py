"""Drafting with some of the target's own layers over the target's own KV.

`early_exit` and `layer_skip` differ in the layers, and `exit` has a head of its own behind them.

There is no second model and no second memory. The KV of the text is the target's, so a draft sees the whole text as the
target does, and after a prefix hit or a preemption there is nothing to catch up with. The rows of a draft are written
behind the text, each where the target's own pass will put it, and that pass writes them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.errors import InvalidParameterError
from outrider.heads.running import RunningHeads
from outrider.model.target import Target, TargetRows
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.bridge import Bridge
from outrider.propose.trees.growth import Growth, add_level, level_logits


class SharedLayersProposer(Proposer):
    """Greedy, drawn or coupled chains and trees from some of the target's layers and a head, batched over sequences.

    Args:
        target: The target.
        layers: Which of its layers run, in ascending order.
        bridge: From the tokens of its head to those that are drafted.
        heads: Whose first head reads what these layers leave; None for the target's own norm and head.
        min_confidence: Nothing is drafted behind a token whose own draft probability is smaller.

    Raises:
        UnsupportedModelError: The target's layers cannot be chosen from.
    """

    def __init__(
        self,
        target: Target,
        layers: tuple[int, ...],
        bridge: Bridge,
        heads: RunningHeads | None = None,
        min_confidence: float = 0.0,
    ) -> None:
        target.try_layers(layers)
        self.target = target
        self.layers = layers
        self._bridge = bridge
        self._heads = heads
        self._min_confidence = min_confidence

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growths = [Growth.of(request, request.budget, request.max_depth, self._min_confidence) for request in requests]
        while alive := [growth for growth in growths if growth.growing]:
            add_level(alive, self._bridge.logits(level_logits(alive, self._logits(alive))), noise)
        return [growth.draft() for growth in growths]

    def _logits(self, growths: Sequence[Growth]) -> Tensor:
        """Logits [num_nodes, vocab_size] of each draft's nodes from the first of its level to its last one."""
        if self._heads is None:
            return self.target.run([self._rows(growth) for growth in growths], layers=self.layers).logits
        out = self.target.run([self._rows(growth, with_logits=False) for growth in growths], layers=self.layers)
        assert out.hidden is not None, "a pass through chosen layers says what they left"
        wanted = [len(growth.nodes) - growth.level[0] for growth in growths]
        hidden = [out.hidden[end - count : end] for count, (_, end) in zip(wanted, out.row_spans, strict=True)]
        return self._heads.logits(torch.cat(hidden), 1)[0]

    def _rows(self, growth: Growth, *, with_logits: bool = True) -> TargetRows:
        """The rows that the next level needs.

        A chain computes what came last and finds the KV of its earlier rows in place. A tree is computed anew as a whole,
        since its rows see only their ancestors.
        """
        request, nodes = growth.request, growth.nodes
        kv, last = request.sequence.kv, request.length - 1
        if nodes and not growth.branches:
            return self.target.rows(kv, [nodes[-1].token_id], last + len(nodes), logits_from=0 if with_logits else 1)
        start = min(kv.end, last)
        root = last - start
        tokens = [*request.text(start), *(node.token_id for node in nodes)]
        parents = None
        if growth.branches:
            parents = (*range(-1, root), *(root if node.parent < 0 else root + 1 + node.parent for node in nodes))
        first = root + 1 + growth.level[0] if with_logits else len(tokens)
        return self.target.rows(kv, tokens, start, parents, logits_from=first)


def check_enough_layers(field: str, value: object, target: Target) -> None:
    """Raise InvalidParameterError where the target has a single layer, so that no part of it can draft."""
    if target.num_layers < 2:
        problem = "the target has one layer, and no part of it can draft"
        raise InvalidParameterError(field, value, problem, "Use another method.")

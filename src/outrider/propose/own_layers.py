"""Drafting with the target's own layers: early exit, layer skip, and an exit with a trained output layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from outrider.draft import Draft
from outrider.errors import InvalidParameterError
from outrider.heads.checkpoint import RunningHeads
from outrider.model.target import Target, TargetRows
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.bridge import Bridge, SameVocabulary
from outrider.propose.row_heads import HeadMethod
from outrider.propose.settings import Method, ProposerContext
from outrider.propose.trees.growth import Growth, add_level, level_logits

# --- Drafting with some of the target's own layers over the target's own KV.
#
# `early_exit` and `layer_skip` differ in the layers, and `exit` has a head of its own behind them.
#
# There is no second model and no second memory. The KV of the text is the target's, so a draft sees the whole text as
# the target does, and after a prefix hit or a preemption there is nothing to catch up with. The rows of a draft are
# written behind the text, each where the target's own pass will put it, and that pass writes them again.


class SharedLayersProposer(Proposer):
    """Greedy, drawn or coupled chains and trees from some of the target's layers, in ascending order, batched over
    sequences. The first of the heads reads what these layers leave; without heads it is the target's own norm and head that
    does."""

    def __init__(
        self,
        target: Target,
        layers: tuple[int, ...],
        bridge: Bridge,
        heads: RunningHeads | None = None,
        min_confidence: float = 0.0,
    ) -> None:
        target.try_layers(layers)
        self.target, self.layers = target, layers
        self._bridge, self._heads, self._min_confidence = bridge, heads, min_confidence

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


# --- Early exit: the target's first layers and its own head draft, the others check (Elhoushi et al. 2024, "LayerSkip").
#
# A token that is easy to guess is often decided after a few layers. Models that were trained with layer dropout and an
# exit loss guess well this way. Others can be used as they are, and guess worse. While such a draft is a chain, the
# target's own pass does not run the first layers again on rows that have passed them already: it goes on behind them
# (see `model/resumed_forward.py`).


#: Share of the layers that draft unless somebody says how many.
_SHARE = 4


class EarlyExit(Method):
    """The first layers of the target and its own head draft, over the target's KV.

    Attributes:
        layers: How many first layers draft, fewer than the target has. None takes a quarter of them, one at least.
    """

    name: ClassVar[str] = "early_exit"

    layers: int | None = Field(None, ge=1, description="Use 1 or more, fewer than the target has, or None.")

    def build(self, context: ProposerContext) -> Proposer:
        layers = tuple(range(self._count(context.target)))
        return SharedLayersProposer(context.target, layers, SameVocabulary(context.vocab_size))

    def _count(self, target: Target) -> int:
        check_enough_layers("layers", self.layers, target)
        if self.layers is None:
            return max(1, target.num_layers // _SHARE)
        if self.layers >= target.num_layers:
            problem = f"the target has {target.num_layers} layers, and some of them must be left to check the draft"
            raise InvalidParameterError("layers", self.layers, problem, f"Use 1 to {target.num_layers - 1}.")
        return self.layers


# --- Layer skip: the target drafts with some of its layers left out (Zhang et al. 2024, "Draft & Verify").
#
# Neighbouring layers in the middle of a deep model change the hidden states little, and a model often writes the same
# without some of them. Which ones depends on the model: the paper searches for them, here they are a setting. What
# remains runs over the target's own KV. Behind a layer that was left out the KV of a draft is not the target's, so the
# target's own pass computes all layers again.


def _as_set(value: object) -> object:
    """In ascending order, each once, so that settings that mean the same are equal."""
    if isinstance(value, list | tuple | set | frozenset) and all(type(layer) is int for layer in value):
        return tuple(sorted(set(value)))
    return value


class LayerSkip(Method):
    """The target without some of its layers drafts, over the target's KV.

    Attributes:
        skip: Layers that are left out, counted from 0. None leaves out every second layer between the first and the last.
    """

    name: ClassVar[str] = "layer_skip"

    skip: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_as_set)] = Field(
        None, min_length=1, description="Use the numbers of some layers, counted from 0, like (3, 5), or None."
    )

    def build(self, context: ProposerContext) -> Proposer:
        skipped = self._skipped(context.target)
        layers = tuple(layer for layer in range(context.target.num_layers) if layer not in skipped)
        return SharedLayersProposer(context.target, layers, SameVocabulary(context.vocab_size))

    def _skipped(self, target: Target) -> tuple[int, ...]:
        check_enough_layers("skip", self.skip, target)
        if self.skip is None:
            return tuple(range(1, max(target.num_layers - 1, 2), 2))
        if self.skip[-1] >= target.num_layers:
            problem = f"the target has {target.num_layers} layers"
            raise InvalidParameterError("skip", self.skip, problem, f"Use 0 to {target.num_layers - 1}.")
        if len(self.skip) == target.num_layers:
            problem = f"these are all {target.num_layers} layers, and none is left to draft"
            raise InvalidParameterError("skip", self.skip, problem, "Leave out fewer.")
        return self.skip


# --- Early exit with a trained output layer that reads what the target's first layers compute.
#
# `early_exit` is the same with the target's own norm and output layer, which few models can be read with so early.


class ExitHead(HeadMethod):
    """The target's first layers draft, with a norm and an output layer that were trained to exit there.

    Attributes:
        model: Local folder of the head, which says behind which layer it exits.
    """

    name: ClassVar[str] = "exit"

    def build(self, context: ProposerContext) -> Proposer:
        heads, bridge = self.open(context), SameVocabulary(context.vocab_size)
        return SharedLayersProposer(context.target, tuple(range(heads.config.layer)), bridge, heads, self.min_confidence)

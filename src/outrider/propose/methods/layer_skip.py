"""Layer skip: the target drafts with some of its layers left out (Zhang et al. 2024, "Draft & Verify").

Neighbouring layers in the middle of a deep model change the hidden states little, and a model often writes the same without
some of them. Which ones depends on the model: the paper searches for them, here they are a setting. What remains runs over
the target's own KV. Behind a layer that was left out the KV of a draft is not the target's, so the target's own pass
computes all layers again.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from outrider.errors import InvalidParameterError
from outrider.model.target import Target
from outrider.propose.base import Proposer
from outrider.propose.bridge import SameVocabulary
from outrider.propose.method import Method, ProposerContext
from outrider.propose.methods.shared_layers import SharedLayersProposer, check_enough_layers


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

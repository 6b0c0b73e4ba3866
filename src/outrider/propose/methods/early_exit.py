"""Early exit: the target's first layers and its own head draft, the others check (Elhoushi et al. 2024, "LayerSkip").

A token that is easy to guess is often decided after a few layers. Models that were trained with layer dropout and an exit
loss guess well this way. Others can be used as they are, and guess worse. While such a draft is a chain, the target's own
pass does not run the first layers again on rows that have passed them already: it goes on behind them (see
`model/resumed_forward.py`).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from outrider.errors import InvalidParameterError
from outrider.model.target import Target
from outrider.propose.base import Proposer
from outrider.propose.bridge import SameVocabulary
from outrider.propose.method import Method, ProposerContext
from outrider.propose.methods.shared_layers import SharedLayersProposer, check_enough_layers

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

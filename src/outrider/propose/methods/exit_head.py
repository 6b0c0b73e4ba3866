"""Early exit with a trained output layer that reads what the target's first layers compute.

`early_exit` is the same with the target's own norm and output layer, which few models can be read with so early.
"""

from __future__ import annotations

from typing import ClassVar

from outrider.propose.base import Proposer
from outrider.propose.bridge import SameVocabulary
from outrider.propose.method import ProposerContext
from outrider.propose.methods.head_method import HeadMethod
from outrider.propose.methods.shared_layers import SharedLayersProposer


class ExitHead(HeadMethod):
    """The target's first layers draft, with a norm and an output layer that were trained to exit there.

    Attributes:
        model: Local folder of the head, which says behind which layer it exits.
    """

    name: ClassVar[str] = "exit"

    def build(self, context: ProposerContext) -> Proposer:
        heads, bridge = self.open(context), SameVocabulary(context.vocab_size)
        return SharedLayersProposer(context.target, tuple(range(heads.config.layer)), bridge, heads, self.min_confidence)

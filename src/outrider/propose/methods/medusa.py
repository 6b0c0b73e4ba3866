"""Medusa: heads on the target's last hidden state guess several tokens ahead at once (Cai et al. 2024).

In the paper a draft is accepted where the target holds it "typical" enough, which changes the output; its heads are used
here with our rules, which do not. A head's guess does not depend on the tokens that other heads guess before it.

A draft of n tokens reads n output layers, since each head of the paper has one of its own. So its time grows with its
length, and `drafts_in_one_pass` stays false.
"""

from __future__ import annotations

from typing import ClassVar

from outrider.propose.base import Proposer
from outrider.propose.bridge import SameVocabulary
from outrider.propose.method import ProposerContext
from outrider.propose.methods.head_method import HeadMethod
from outrider.propose.methods.row_heads import RowHeadsProposer


class Medusa(HeadMethod):
    """Residual heads that were trained for this target guess several tokens ahead, from its own hidden states.

    Attributes:
        model: Local folder of the heads. A draft is no longer than there are heads.
    """

    name: ClassVar[str] = "medusa"
    default_num_draft_tokens: ClassVar[int] = 4

    def build(self, context: ProposerContext) -> Proposer:
        return RowHeadsProposer(self.open(context), SameVocabulary(context.vocab_size), self.min_confidence)

"""Blockwise parallel decoding (Stern et al. 2018).

One hidden layer turns the target's last hidden state into those of tokens further ahead, and the target's own output layer
reads them.

The paper takes as much of a block as the target would have chosen greedily, which is our walk at temperature 0. At other
temperatures our rules keep the output exact, where the paper has nothing to say.
"""

from __future__ import annotations

from typing import ClassVar

from outrider.propose.base import Proposer
from outrider.propose.bridge import SameVocabulary
from outrider.propose.method import ProposerContext
from outrider.propose.methods.head_method import HeadMethod
from outrider.propose.methods.row_heads import RowHeadsProposer


class Blockwise(HeadMethod):
    """A hidden layer that was trained for this target guesses several tokens ahead through the target's output layer.

    Attributes:
        model: Local folder of the heads. A draft is no longer than there are heads.
    """

    name: ClassVar[str] = "blockwise"
    default_num_draft_tokens: ClassVar[int] = 4
    drafts_in_one_pass: ClassVar[bool] = True

    def build(self, context: ProposerContext) -> Proposer:
        return RowHeadsProposer(self.open(context), SameVocabulary(context.vocab_size), self.min_confidence)

"""DFlash: a head drafts a whole block of tokens in one pass, from features of several of the target's layers (2026)."""

from __future__ import annotations

from typing import ClassVar

from outrider.heads.block_head import BlockHead
from outrider.heads.formats.published import PublishedHead
from outrider.model.target import Target
from outrider.propose.base import Proposer
from outrider.propose.bridge import Bridge
from outrider.propose.methods.block_drafts import BlockHeadProposer
from outrider.propose.methods.feature_method import FeatureMethod


class DFlash(FeatureMethod):
    """A published DFlash head drafts a whole block of tokens in one pass, from what several of the target's layers left.

    Attributes:
        model: Local folder of the head, as z-lab or the speculators package publish it; or a GGUF file. A
            draft is shorter than its block.
    """

    name: ClassVar[str] = "dflash"
    default_num_draft_tokens: ClassVar[int] = 15  # a whole block of 16 rows, or of fewer
    drafts_in_one_pass: ClassVar[bool] = True

    def proposer(self, head: PublishedHead, target: Target, bridge: Bridge) -> Proposer:
        return BlockHeadProposer(BlockHead(head, target), target, bridge, self.min_confidence)

"""P-EAGLE: a head of EAGLE-3's kind drafts several tokens in one pass of its layers (2026)."""

from __future__ import annotations

from typing import ClassVar

from outrider.heads.formats.published import PublishedHead
from outrider.heads.parallel_head import ParallelHead
from outrider.model.target import Target
from outrider.propose.base import Proposer
from outrider.propose.bridge import Bridge
from outrider.propose.methods.feature_method import FeatureMethod
from outrider.propose.methods.parallel_drafts import ParallelHeadProposer


class PEagle(FeatureMethod):
    """A published P-EAGLE head drafts several tokens in one pass, from what entered three of the target's layers.

    Attributes:
        model: Local folder of the head, as the speculators package publishes it.
    """

    name: ClassVar[str] = "peagle"
    drafts_in_one_pass: ClassVar[bool] = True

    def proposer(self, head: PublishedHead, target: Target, bridge: Bridge) -> Proposer:
        return ParallelHeadProposer(ParallelHead(head, target), target, bridge, self.min_confidence)

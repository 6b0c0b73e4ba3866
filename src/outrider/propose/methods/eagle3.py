"""EAGLE-3: a head with attention of its own drafts from features of several of the target's layers (Li et al. 2025)."""

from __future__ import annotations

from typing import ClassVar

from outrider.heads.feature_head import FeatureHead
from outrider.heads.formats.published import read_head, read_head_config
from outrider.model.loading.loaded_model import LoadedModel
from outrider.propose.base import Proposer
from outrider.propose.bridge import Bridge, ChosenTokens, SameVocabulary
from outrider.propose.method import ProposerContext
from outrider.propose.methods.feature_drafts import FeatureHeadProposer
from outrider.propose.methods.head_method import FolderMethod


class Eagle3(FolderMethod):
    """A published EAGLE-3 head drafts from what the target's layers felt.

    Attributes:
        model: Local folder of the head, as SafeAILab or the speculators package publish it.
    """

    name: ClassVar[str] = "eagle3"

    def added_token_bytes(self, target: LoadedModel) -> int:
        return read_head_config(self.folder()).kept_per_token * target.dtype.itemsize

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings.

        Raises:
            InvalidParameterError: No folder is named, or there is no such folder.
            ModelLoadError: It holds no head of a known format.
            HeadMismatchError: The head was made for another target.
        """
        head, size = read_head(self.folder()), context.target.vocab_size
        bridge: Bridge = SameVocabulary(size) if head.tokens is None else ChosenTokens(size, head.tokens)
        return FeatureHeadProposer(FeatureHead(head, context.target), context.target, bridge, self.min_confidence)

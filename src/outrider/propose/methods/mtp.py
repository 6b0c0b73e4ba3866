"""MTP: the layers that a checkpoint itself carries to predict several tokens draft (Gloeckle et al. 2024; DeepSeek-V3)."""

from __future__ import annotations

from typing import ClassVar

from outrider.heads.formats.mtp import read_mtp_config
from outrider.heads.mtp_head import MtpHead, mtp_shape
from outrider.model.loading.loaded_model import LoadedModel
from outrider.propose.base import Proposer
from outrider.propose.bridge import SameVocabulary
from outrider.propose.method import ProposerContext
from outrider.propose.methods.feature_drafts import LayerHeadProposer
from outrider.propose.methods.head_method import FolderMethod


class Mtp(FolderMethod):
    """Layers that the target's own checkpoint carries to predict several tokens draft.

    Attributes:
        model: Local folder of another checkpoint of the target that holds these layers; None for the target's own.
    """

    name: ClassVar[str] = "mtp"
    default_num_draft_tokens: ClassVar[int] = 3
    if_nothing_stands: ClassVar[str] = (
        "its norms are probably read wrongly, or the target's weights were changed since these layers were trained "
        "(outrider doctor says more)"
    )

    def added_token_bytes(self, target: LoadedModel) -> int:
        folder = target.folder() if self.model is None else self.model
        config = read_mtp_config(folder, target.model.config.get_text_config(decoder=True))
        return mtp_shape(config).numbers_per_token * target.dtype.itemsize

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings.

        Raises:
            InvalidParameterError: There is no such folder.
            UnsupportedModelError: The checkpoint carries no such layers, or has no folder.
            ModelLoadError: They cannot be read.
        """
        target = context.target
        bridge = SameVocabulary(context.vocab_size)
        return LayerHeadProposer(MtpHead(target, self.model), target, bridge, self.min_confidence)

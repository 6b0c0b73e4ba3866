"""Settings that all methods with published heads share."""

from __future__ import annotations

from typing import ClassVar

from outrider.errors import HeadMismatchError
from outrider.heads.eagle_head import EagleHead
from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.published import PublishedHead, read_head, read_head_config
from outrider.heads.fused_head import open_fused
from outrider.model.loading.loaded_model import LoadedModel
from outrider.model.target import Target
from outrider.propose.base import Proposer
from outrider.propose.bridge import Bridge, ChosenTokens, SameVocabulary
from outrider.propose.method import ProposerContext
from outrider.propose.methods.feature_drafts import LayerHeadProposer
from outrider.propose.methods.fused_drafts import FusedHeadProposer
from outrider.propose.methods.head_method import FolderMethod


class FeatureMethod(FolderMethod):
    """A published head drafts from the target's features."""

    if_nothing_stands: ClassVar[str] = (
        "layers or norms are probably read wrongly, or the head was trained for another model; it has no witness of the "
        "target's hidden states, so that shapes, names and embeddings alone were compared (outrider doctor says more)"
    )

    def added_token_bytes(self, target: LoadedModel) -> int:
        return read_head_config(self.folder()).kept_per_token * target.dtype.itemsize

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings.

        Raises:
            InvalidParameterError: No folder is named, or there is no such folder.
            ModelLoadError: It holds no head of a known format.
            HeadMismatchError: The head is for another method, or was made for another target.
        """
        head, size = read_head(self.folder()), context.vocab_size
        self._check_method(head.config)
        bridge: Bridge = SameVocabulary(size) if head.tokens is None else ChosenTokens(size, head.tokens)
        return self.proposer(head, context.target, bridge)

    def proposer(self, head: PublishedHead, target: Target, bridge: Bridge) -> Proposer:
        """What drafts with a head; for methods that draft otherwise than token by token to override.

        Raises:
            HeadMismatchError: The head was made for another target.
        """
        fused = open_fused(head, target)
        if fused is not None:
            return FusedHeadProposer(fused, target, bridge, self.min_confidence)
        return LayerHeadProposer(EagleHead(head, target), target, bridge, self.min_confidence)

    def _check_method(self, config: FeatureHeadConfig) -> None:
        if config.method != self.name:
            problem = f"its head is for method={config.method!r}, and method={self.name!r} was asked for"
            remedy = f"Use method={config.method!r}."
            raise HeadMismatchError(self.folder(), problem, remedy, "method", config.method, self.name)

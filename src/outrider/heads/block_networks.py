"""Networks of heads that draft several tokens in one pass: rows of mask tokens stand for those that are to be drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.cache.memory import AddedShape
from outrider.heads.features import Eagle3Network, FeatureHeadConfig, HeadLayer, LayerInput, PublishedNetwork


@dataclass(frozen=True)
class BlockReach:
    """Says how far the rows of a block see in a layer: the text before the block and the block itself, within these
    bounds."""

    window: int | None = None  # a row sees places that are less than this away from its own; None for all
    causal: bool = False  # whether a row sees no later row of its block


@dataclass(frozen=True, kw_only=True)
class MaskHeadConfig(FeatureHeadConfig):
    """A head with rows of mask tokens, as it describes itself."""

    mask_token_id: int  # the target's token whose embedding stands for a token that is to be drafted


class BlockLayer(HeadLayer):
    """A decoder layer; what it takes from the text's features has no norm before attention."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, layer.hidden_size)
        self.input_layernorm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)

    def enter(self, left: Tensor) -> LayerInput:
        return LayerInput(self.input_layernorm(left), left)


# --- DFlash: features of several layers are fused, and every layer takes keys and values of the text from them.


@dataclass(frozen=True, kw_only=True)
class BlockHeadConfig(MaskHeadConfig):
    """A head that drafts whole blocks, as it describes itself."""

    block_size: int  # rows of a block: the last token of the text, then a mask token for each token that is drafted
    reaches: tuple[BlockReach, ...]  # how far rows see, by layer

    @property
    def kept(self) -> AddedShape:
        return replace(super().kept, feature_size=0)


class BlockHeadNetwork(PublishedNetwork):
    """The head of DFlash (2026): a block is computed whole, as it was in training, however few of its tokens are wanted."""

    reads_tokens: ClassVar[bool] = False
    ahead: ClassVar[int] = 1  # the row of the token before place 0 drafts nothing
    config: BlockHeadConfig

    def __init__(self, config: BlockHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        hidden, eps = config.hidden_size, config.layer.rms_norm_eps
        self.layers = nn.ModuleList(BlockLayer(config.layer) for _ in config.reaches)
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.norm = nn.RMSNorm(hidden, eps)

    @property
    def stack(self) -> Sequence[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    @property
    def reaches(self) -> Sequence[BlockReach]:
        """Returns how far the rows of a block see, by layer."""
        return self.config.reaches

    @property
    def block_size(self) -> int | None:
        """Rows of a block; None for as many as are wanted."""
        return self.config.block_size

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        fused: Tensor = self.hidden_norm(self.fc(torch.cat(hidden, -1)))
        return fused

    def enter(self, embeddings: Tensor, features: Tensor) -> LayerInput:
        return self.stack[0].enter(embeddings)

    def output_states(self, left: Tensor) -> Tensor:
        normed: Tensor = self.norm(left)
        return normed


# --- P-EAGLE: the layer of EAGLE-3, further layers behind it, and a state that stands for the target's.


class ParallelNetwork(Eagle3Network):
    """The head of P-EAGLE (2026): a token that is to be drafted has the embedding of a mask token, and a trained state in
    place of the target's."""

    ahead: ClassVar[int] = 0
    config: MaskHeadConfig

    def __init__(self, config: MaskHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        self.further = nn.ModuleDict({str(i): BlockLayer(config.layer) for i in range(1, config.layer.num_hidden_layers)})
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, config.num_features * config.target_hidden_size))

    @property
    def stack(self) -> Sequence[HeadLayer]:
        return [self.layer, *(layer for layer in self.further.values() if isinstance(layer, BlockLayer))]

    @property
    def reaches(self) -> Sequence[BlockReach]:
        """Returns how far the rows of a block see, by layer."""
        return [BlockReach(causal=True)] * len(self.stack)

    @property
    def block_size(self) -> int | None:
        """Rows of a block; None for as many as are wanted."""
        return None

    def mask_feature(self, dtype: torch.dtype) -> Tensor:
        """The feature [1, hidden_size] of a token that is to be drafted."""
        return self.fuse(list(self.mask_hidden[0].to(dtype).chunk(self.config.num_features, -1)))

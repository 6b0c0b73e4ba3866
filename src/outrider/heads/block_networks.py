"""The shapes and layers of heads that draft several tokens in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.features import Eagle3Network, FeatureHeadConfig, HeadLayer, PublishedNetwork

# --- BlockHeadConfig: the shape of a head that drafts a whole block of tokens in one pass.


@dataclass(frozen=True)
class BlockReach:
    """What the rows of a block see in a layer: the text before the block and the block itself, as far as this allows.

    Attributes:
        window: A row sees places that are less than this away from its own; None for all.
        causal: Whether a row sees no later row of its block.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockHeadConfig(FeatureHeadConfig):
    """What a published block drafter says of itself.

    Attributes:
        block_size: Rows of a block: the last token of the text, then a mask token for each token that is drafted.
        mask_token_id: The target's token whose embedding stands for a token that is to be drafted.
        reaches: What rows see, by layer.
    """

    block_size: int
    mask_token_id: int
    reaches: tuple[BlockReach, ...]

    @property
    def num_layers(self) -> int:
        """Layers of its own."""
        return len(self.reaches)

    @property
    def kept_per_token(self) -> int:
        return self.num_layers * super().kept_per_token


# --- The layers of block drafters: a fusion, and layers whose rows see the text and each other.


class BlockHeadNetwork(PublishedNetwork):
    """The head of DFlash (2026): features of several layers are fused, and every layer takes keys and values from them.

    Args:
        config: Its shape.
        own_embedding: Whether it brings embeddings.
        own_output: Whether it brings an output layer.
    """

    config: BlockHeadConfig

    def __init__(self, config: BlockHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        hidden, eps = config.hidden_size, config.layer.rms_norm_eps
        self.layers = nn.ModuleList(BlockLayer(config.layer) for _ in range(config.num_layers))
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.norm = nn.RMSNorm(hidden, eps)

    @property
    def own_layers(self) -> list[BlockLayer]:
        """Its layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        fused: Tensor = self.hidden_norm(self.fc(torch.cat(hidden, -1)))
        return fused

    def output_states(self, left: Tensor) -> Tensor:
        normed: Tensor = self.norm(left)
        return normed


class BlockLayer(HeadLayer):
    """A decoder layer; what it takes from the text's features has no norm before attention."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, layer.hidden_size)
        self.input_layernorm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)


# --- ParallelHeadConfig: the shape of a head that drafts several tokens in one pass of all its layers.


@dataclass(frozen=True, kw_only=True)
class ParallelHeadConfig(FeatureHeadConfig):
    """What a published head of P-EAGLE says of itself.

    Attributes:
        num_layers: Layers of its own. The first one reads tokens beside features, and the others read what the one before
            left.
        mask_token_id: The target's token whose embedding stands for a token that is to be drafted.
    """

    num_layers: int
    mask_token_id: int

    @property
    def kept_per_token(self) -> int:
        return self.num_layers * super().kept_per_token


# --- The layers of heads that draft several tokens in one pass: those of EAGLE-3, further layers behind, and a mask state.


class ParallelNetwork(Eagle3Network):
    """The head of P-EAGLE (2026): a token that is to be drafted has the embedding of a mask token, and a trained state in
    place of the target's.

    Args:
        config: Its shape.
        own_embedding: Whether it brings embeddings.
        own_output: Whether it brings an output layer.
    """

    config: ParallelHeadConfig

    def __init__(self, config: ParallelHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        self.further = nn.ModuleDict({str(i): BlockLayer(config.layer) for i in range(1, config.num_layers)})
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, config.num_features * config.target_hidden_size))

    @property
    def further_layers(self) -> list[BlockLayer]:
        """The layers behind the first, in order."""
        return [layer for layer in self.further.values() if isinstance(layer, BlockLayer)]

    def mask_feature(self, dtype: torch.dtype) -> Tensor:
        """The feature [1, hidden_size] of a token that is to be drafted."""
        return self.fuse(list(self.mask_hidden[0].to(dtype).chunk(self.config.num_features, -1)))

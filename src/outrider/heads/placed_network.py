"""PlacedNetwork: the network of a published head, placed beside its target and on our kernels where these multiply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.feature_pairing import check_embedding, check_output, paired_layers
from outrider.heads.published_network import PublishedNetwork
from outrider.heads.running import use_kernels
from outrider.model.lone_layer import RotaryFactors
from outrider.model.runner import upcast_logits
from outrider.model.target import Target

NetworkT = TypeVar("NetworkT", bound=PublishedNetwork)


class PlacedNetwork(Generic[NetworkT]):
    """A network that reads the target's hidden states and borrows what it does not bring.

    Args:
        folder: Of the head, to name.
        config: Its shape.
        network: Its layers; taken over.
        target: The target.
        pack: Lets our kernels compute what they can of the network, and says in which dtype rows are given.

    Attributes:
        network: Its layers.
        aux_layers: Hidden states of the target that it reads, low to high.
        dtype: That its rows are computed in.

    Raises:
        HeadMismatchError: It was made for another target.
    """

    def __init__(
        self,
        folder: str,
        config: FeatureHeadConfig,
        network: NetworkT,
        target: Target,
        pack: Callable[[NetworkT, Target], torch.dtype] = use_kernels,
    ) -> None:
        self.aux_layers = paired_layers(folder, config, target)
        check_embedding(folder, config, network.embed_tokens, target)
        check_output(folder, config, network.lm_head, target)
        self._target = target
        self.network: NetworkT = network.to(target.device, target.dtype)
        self.dtype = pack(self.network, target)
        self._rotary = RotaryFactors(config.layer, target.device)

    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Features [n, hidden_size] in the target's dtype, of its hidden states [n, target_hidden_size] by layer."""
        states = [hidden[layer].to(self.dtype) for layer in self.aux_layers]
        return self.network.fuse(states).to(self._target.dtype)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Embeddings [n, hidden_size] of tokens, its own or the target's."""
        own = self.network.embed_tokens
        if own is None:
            return self._target.embed(token_ids).to(self.dtype)
        rows: Tensor = own(torch.tensor(token_ids, device=self._target.device))
        return rows.to(self.dtype)

    def tables(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, head_dim] of positions."""
        return self._rotary.at(positions, self.dtype)

    def logits(self, left: Tensor) -> Tensor:
        """Logits [n, draft_vocab_size] of what the last layer left, float32 at least."""
        return upcast_logits(self.network.logits(left, self._target.head))

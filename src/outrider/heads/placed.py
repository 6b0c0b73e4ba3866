"""A published head beside its target: checks that it fits, and its network on our kernels where these multiply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from outrider.errors import HeadMismatchError
from outrider.heads.checkpoint import use_kernels, witness_tokens
from outrider.heads.features import FeatureHeadConfig, PublishedNetwork
from outrider.heads.lone import RotaryFactors, is_model_class, model_class
from outrider.model.runner import upcast_logits
from outrider.model.target import Target

# --- PlacedNetwork: the network of a published head, placed beside its target and on our kernels where these multiply.


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


# --- Checks that a published head fits a target.
#
# Such a head has no witness of the target's hidden states. It is compared by shapes, by the classes of the model that
# it names, and by its embeddings where it brings a copy of the target's.


_REMEDY = "Use a head that was made for this target."
#: Least mean cosine between embeddings of the head and the target. A copy, rounded or trained on, has nearly 1; the
#: embeddings of another model have nearly 0.
LEAST_COSINE = 0.5


def paired_layers(folder: str, config: FeatureHeadConfig, target: Target) -> tuple[int, ...]:
    """The layers of the target whose inputs a head reads.

    Raises:
        HeadMismatchError: The target does not have them, or is of another shape than the head needs.
    """
    needed = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
    for field, value in needed.items():
        found = getattr(target, field)
        if found != value:
            problem = f"it was made for a target with {field}={value}, and {target.name!r} has {found}"
            raise HeadMismatchError(folder, problem, _REMEDY, field, value, found)
    _check_architecture(folder, config, target)
    count = target.num_layers
    layers = config.layers_of(count)
    if list(layers) != sorted(set(layers)) or layers[-1] > _last_shown(config, count):
        problem = f"it reads what enters layers {', '.join(map(str, layers))}, and {target.name!r} has {count} layers"
        raise HeadMismatchError(folder, problem, _REMEDY, "num_layers", layers[-1] + 1, count)
    return layers


def check_embedding(folder: str, config: FeatureHeadConfig, own: nn.Embedding | None, target: Target) -> None:
    """Raise HeadMismatchError where a head's embeddings are not the target's, or where it has none and cannot take them."""
    if own is None:
        if config.hidden_size != target.hidden_size:
            problem = f"it brings no embed_tokens.weight, and the target's are {target.hidden_size} wide"
            raise HeadMismatchError(folder, problem, _REMEDY, "hidden_size", config.hidden_size, target.hidden_size)
        return
    if config.trains_embedding or config.hidden_size != target.hidden_size:
        return
    tokens = witness_tokens(target.vocab_size)
    theirs, ours = own(tokens.to(own.weight.device)).double().cpu(), target.embed(tokens).double().cpu()
    cosine = float(torch.cosine_similarity(theirs, ours, dim=-1).mean())
    if not cosine >= LEAST_COSINE:
        problem = f"its embed_tokens.weight is no copy of the embeddings of {target.name!r} (mean cosine {cosine:.2f})"
        raise HeadMismatchError(folder, problem, _REMEDY, "embed_tokens.weight", LEAST_COSINE, cosine)


def check_output(folder: str, config: FeatureHeadConfig, own: nn.Linear | None, target: Target) -> None:
    """Raise HeadMismatchError where a head has no output layer and cannot take the target's."""
    if own is None and config.hidden_size != target.hidden_size:
        problem = f"it brings no lm_head.weight, and the target's reads states that are {target.hidden_size} wide"
        raise HeadMismatchError(folder, problem, _REMEDY, "hidden_size", config.hidden_size, target.hidden_size)


def _last_shown(config: FeatureHeadConfig, count: int) -> int:
    """The last index of hidden states that a head may read: what the last layer leaves is shown behind the final norm only,
    which heads of eagle1 read and others do not mean."""
    return count if config.method == "eagle1" else count - 1


def _check_architecture(folder: str, config: FeatureHeadConfig, target: Target) -> None:
    own = model_class(target.model_type)
    foreign = [name for name in config.architectures if is_model_class(name)]
    if own is not None and foreign and own not in foreign:
        problem = f"it was made for {config.verifier!r}, which is a {foreign[0]}, and {target.name!r} is a {own}"
        raise HeadMismatchError(folder, problem, _REMEDY, "architectures", foreign[0], own)

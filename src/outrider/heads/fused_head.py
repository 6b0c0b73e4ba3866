"""FusedHead: runs the layer of a published EAGLE head in one pass of our kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outrider.cache.memory import AddedShape
from outrider.cache.pool import LayerReach
from outrider.heads.checkpoint import use_kernels
from outrider.heads.eagle import features_before
from outrider.heads.features import Eagle3Network, FeatureHeadNetwork
from outrider.heads.formats.published import PublishedHead
from outrider.heads.lone import RotaryFactors
from outrider.heads.placed import PlacedNetwork
from outrider.kernels.decoder import DecoderKernel, PassRows, rows_without_context
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.model.families import Family
from outrider.model.layer_builder import activation_of, decoder_layer, decoder_shape, norm_of
from outrider.model.matrices import Matrices, whole
from outrider.model.runner import upcast_logits
from outrider.model.target import Target

#: The layers of the two methods: one has no norm before attention, the other has one for embeddings and one for features.
_EAGLE1, _EAGLE3 = Family(attention_norm=None), Family(attention_norm="hidden_norm")
#: The modules that stay as they are: what features go through before the layer.
_PACKED = ("layer", "lm_head", "embed_tokens")
_FIRST_POSITIONS = 4096
#: Hidden states behind the norm of the output layer, as transformers counts those of one layer.
_NORMED = 1


@dataclass(frozen=True)
class Left:
    """What a pass leaves of its rows.

    Attributes:
        logits: [num_logits, draft_vocab_size] of the rows that wanted them, float32 at least.
        features: [num_rows, width] that the tokens behind them read.
    """

    logits: Tensor
    features: Tensor


class FusedHead:
    """A head of one layer over keys and values in blocks.

    No later row sees the first token of a text, which has no features before it.

    Args:
        head: As it was published; its network is taken over.
        target: The target.
        library: The kernels of this processor.

    Attributes:
        shape: What its layer keeps.
        aux_layers: Hidden states of the target that it reads, low to high.
        dtype: That its rows are computed in.
        kernel: Its layer and its output layer.

    Raises:
        HeadMismatchError: It was made for another target.
    """

    kernel: DecoderKernel

    def __init__(self, head: PublishedHead, target: Target, library: KernelLibrary) -> None:
        assert isinstance(head.network, FeatureHeadNetwork), head.config
        self._target, self._library = target, library
        self._placed = PlacedNetwork(head.folder, head.config, head.network, target, self._pack)
        self._network, self.aux_layers, self.dtype = self._placed.network, self._placed.aux_layers, self._placed.dtype
        self._rotary, self._positions = RotaryFactors(head.config.layer, target.device), 0
        layer, width = head.config.layer, head.config.hidden_size
        self.shape = AddedShape(1, layer.num_key_value_heads, layer.head_dim, feature_size=width, draft_blocks=True)

    @torch.inference_mode()
    def read(
        self,
        texts: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        before: Tensor,
        hidden: Mapping[int, Tensor],
        slots: list[int],
    ) -> Tensor:
        """Keep what the layer makes of texts that the target has computed.

        Args:
            texts: The tokens of each.
            positions: Of these tokens.
            before: [num_texts, width] the features of the tokens before them.
            hidden: [n, target_hidden_size] of all tokens in turn, by layer of the target.
            slots: [n] where their keys and values go in the memory in use.

        Returns:
            The features [n, width] of the tokens, in the target's dtype.
        """
        features = self._placed.fuse(hidden)
        tokens = [token for text in texts for token in text]
        rows = rows_without_context(tokens, [place for own in positions for place in own], slots)
        residual, beside = self._enter(rows, features_before(before, features, [len(text) for text in texts]))
        self.kernel.keep(rows, 0, residual, beside)
        return features

    @torch.inference_mode()
    def run(self, rows: PassRows, features: Tensor) -> Left:
        """Compute rows, and write their keys and values to the memory in use.

        Args:
            rows: Tokens, where they stand and what they see.
            features: [num_rows, width] that they read beside their tokens.
        """
        residual, beside = self._enter(rows, features)
        normed = (_NORMED,) if isinstance(self._network, Eagle3Network) else ()
        own = rows if self.kernel.head is not None else replace(rows, logit_rows=[])
        logits, aux, left = self.kernel.forward_part(own, normed, (0,), residual, beside=beside)
        states = aux.get(_NORMED, left)
        if rows.logit_rows and not own.logit_rows:
            logits = self._target.head(states[rows.logit_rows])
        return Left(upcast_logits(logits), states if self._network.config.norm_output else left)

    @torch.inference_mode()
    def recompute(self, token_ids: Sequence[int], hidden: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What is kept of a whole text, for the proofs: see `AddedLayers`."""
        size = len(token_ids), self.shape.num_heads, self.shape.head_dim
        memory = torch.empty(size, dtype=self._target.dtype), torch.empty(size, dtype=self._target.dtype)
        before = torch.zeros(1, self.shape.feature_size, dtype=self._target.dtype)
        with self.kernel.other_memory([memory]):
            self.read([token_ids], [range(len(token_ids))], before, hidden, list(range(len(token_ids))))
        return [memory]

    def _enter(self, rows: PassRows, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the layer adds to [n, width], and what its attention reads before it [n, width], where that is another."""
        self._use_positions(max(rows.positions) + 1)
        embeddings, features = self._placed.embed(rows.tokens), features.to(self._placed.dtype)
        if isinstance(self._network, Eagle3Network):
            return features, embeddings
        return self._network.enter(embeddings, features).residual, None

    def _use_positions(self, needed: int) -> None:
        """Rotary tables grow by doubling, since most texts are far shorter than what a model allows."""
        if needed > self._positions:
            self._positions = max(_FIRST_POSITIONS, 2 * needed)
            cosines, sines = self._rotary.at(range(self._positions), self._placed.dtype)
            half = cosines.shape[-1] // 2  # every number stands for a pair
            self.kernel.use_rotary([[(cosines[:, :half], sines[:, :half])]])

    def _pack(self, network: FeatureHeadNetwork, target: Target) -> torch.dtype:
        """Take the layer and the output layer over to the kernels, and what comes before them as for every head."""
        self.kernel = _kernel(network, target, self._library)
        return use_kernels(nn.ModuleList(m for name, m in network.named_children() if name not in _PACKED), target)


def open_fused(head: PublishedHead, target: Target) -> FusedHead | None:
    """A head in our kernels, as the target is; None where they do not compute the target's passes, or do not know the head.

    Raises:
        HeadMismatchError: It was made for another target.
    """
    library = kernel_library()
    if library is None or not target.fused or not isinstance(head.network, FeatureHeadNetwork):
        return None
    try:
        activation_of(head.config.layer, _EAGLE3)
    except ValueError:
        return None
    return FusedHead(head, target, library)


def _kernel(network: FeatureHeadNetwork, target: Target, library: KernelLibrary) -> DecoderKernel:
    config, matrices = network.config, Matrices(library)
    family = _EAGLE3 if isinstance(network, Eagle3Network) else _EAGLE1
    layer = replace(decoder_layer(network.layer, LayerReach(), 0, config.layer, family, matrices), unseen=1)
    final_norm = None
    if isinstance(network, Eagle3Network):
        beside = norm_of(network.layer.input_layernorm, family)
        layer = replace(layer, beside_norm=beside, normed_residual=config.norm_before_residual)
        final_norm = norm_of(network.norm, family)
    head = None if network.lm_head is None else matrices.take(whole(network.lm_head))
    matrices.empty()
    return DecoderKernel(
        library,
        decoder_shape(config.layer, family, None, [layer]),
        [layer],
        embedding=None,
        positions=None,
        final_norm=final_norm,
        head=head,
        kv_dtype=target.dtype,
    )

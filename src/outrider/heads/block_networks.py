"""Networks of heads that draft several tokens in one pass: rows of mask tokens stand for those that are to be drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from outrider.cache.memory import AddedShape
from outrider.heads.features import (
    Eagle3Network,
    FeatureHeadConfig,
    HeadAttention,
    HeadLayer,
    LayerInput,
    PublishedNetwork,
    rotated,
)
from outrider.heads.networks import TargetHead


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


# --- The layers of Gemma 4: norms on both sides of each part, a norm of values, and scores that are not scaled.


@dataclass(frozen=True)
class GemmaShape:
    """What a head with layers of Gemma 4 has besides the sizes of its layers."""

    values_are_keys: bool  # whether values are what the projection of keys gives
    logit_cap: float | None  # its own logits stay between -logit_cap and logit_cap by a scaled tanh; None for no bound


class GemmaEmbedding(nn.Embedding):
    """Embeddings, times the square root of their width."""

    def forward(self, tokens: Tensor) -> Tensor:
        scale = torch.tensor(self.embedding_dim**0.5, dtype=self.weight.dtype, device=self.weight.device)
        return super().forward(tokens) * scale  # Gemma rounds the scale to the dtype of the weights


class GemmaAttention(HeadAttention):
    """Attention whose values pass a norm without weights, and no rotary positions."""

    def __init__(self, layer: Any, *, values_are_keys: bool) -> None:
        super().__init__(layer, layer.hidden_size)
        self.scaling, self._values_are_keys = 1.0, values_are_keys
        self.v_norm = nn.RMSNorm(layer.head_dim, layer.rms_norm_eps, elementwise_affine=False)
        if values_are_keys:
            del self.v_proj

    def keys_and_values(self, rows: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        keys = self.k_proj(rows).unflatten(-1, (-1, self.head_dim))
        values = keys if self._values_are_keys else self.v_proj(rows).unflatten(-1, (-1, self.head_dim))
        return rotated(self.k_norm(keys), rotary), self.v_norm(values)


class GemmaBlockLayer(BlockLayer):
    """A decoder layer of Gemma 4."""

    layer_scalar: Tensor

    def __init__(self, layer: Any, shape: GemmaShape) -> None:
        super().__init__(layer)
        self.self_attn = GemmaAttention(layer, values_are_keys=shape.values_are_keys)
        self.pre_feedforward_layernorm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        states = residual + self.post_attention_layernorm(self.self_attn.o_proj(attended.flatten(1)))
        inner = self.mlp(self.pre_feedforward_layernorm(states))
        left: Tensor = (states + self.post_feedforward_layernorm(inner)) * self.layer_scalar
        return left


# --- DSpark: a place depends on the tokens that were drafted before it, and its chance to stand is guessed.


class MarkovKind(StrEnum):
    """Says what the bias of a place depends on."""

    VANILLA = "vanilla"  # the token before it
    GATED = "gated"  # the token before it, let through by a gate that also reads the place's own state
    RNN = "rnn"  # all tokens of the block before it


@dataclass(frozen=True)
class MarkovShape:
    """The shape of a `MarkovHead`."""

    kind: MarkovKind
    rank: int  # width between its two matrices


class JudgeInput(StrEnum):
    """Says what a `ConfidenceHead` reads of a place."""

    STATE = "state"
    STATE_AND_TOKEN = "state and token"  # the place's own state, and the token before it


class MarkovStep(NamedTuple):
    """What a `MarkovHead` says of places, given the tokens before them."""

    bias: Tensor  # [n, draft_vocab_size] to be added to the logits of the places
    embeddings: Tensor  # [n, rank] of the tokens before them
    states: Tensor  # [n, rank] from which the next places go on; [n, 0] where nothing is remembered


class MarkovHead(nn.Module):
    """The sequential head of DSpark (Cheng et al. 2026, arXiv 2607.05147): a bias of low rank on the logits of a place, by
    the token before it."""

    def __init__(self, config: BlockHeadConfig, shape: MarkovShape) -> None:
        super().__init__()
        rank, hidden = shape.rank, config.hidden_size
        self.shape = shape
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if shape.kind is MarkovKind.GATED:
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif shape.kind is MarkovKind.RNN:
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def begin(self, like: Tensor) -> Tensor:
        """The state [width] before the first place of a block."""
        return like.new_zeros(self.shape.rank if self.shape.kind is MarkovKind.RNN else 0)

    def forward(self, tokens: Tensor, rows: Tensor, states: Tensor) -> MarkovStep:
        """The step of places that follow tokens [n], whose own states are rows [n, hidden_size]."""
        embeddings = self.markov_w1(tokens).to(rows.dtype)
        inner = embeddings
        if self.shape.kind is MarkovKind.GATED:
            inner = torch.sigmoid(self.gate_proj(torch.cat([rows, embeddings], -1))) * embeddings
        elif self.shape.kind is MarkovKind.RNN:
            gate, candidate, inner = self.joint_proj(torch.cat([states, embeddings, rows], -1)).chunk(3, -1)
            kept = torch.sigmoid(gate)
            states, inner = kept * states + (1.0 - kept) * torch.tanh(candidate), torch.tanh(inner)
        return MarkovStep(self.markov_w2(inner), embeddings, states)


class ConfidenceHead(nn.Module):
    """The confidence head of DSpark: guesses how likely the token of a place stands, before it is drawn."""

    def __init__(self, config: BlockHeadConfig, reads: JudgeInput) -> None:
        super().__init__()
        self._with_token = reads is JudgeInput.STATE_AND_TOKEN
        rank = config.markov.rank if config.markov is not None and self._with_token else 0
        self.proj = nn.Linear(config.hidden_size + rank, 1)

    def forward(self, rows: Tensor, embeddings: Tensor) -> Tensor:
        """Chances [n] of places whose own states are rows [n, hidden_size], behind tokens with embeddings [n, rank]."""
        read = torch.cat([rows, embeddings], -1) if self._with_token else rows
        return torch.sigmoid(self.proj(read)[:, 0].float())


# --- DFlash: features of several layers are fused, and every layer takes keys and values of the text from them.


@dataclass(frozen=True, kw_only=True)
class BlockHeadConfig(MaskHeadConfig):
    """A head that drafts whole blocks, as it describes itself."""

    block_size: int  # rows of a block: the last token of the text, then mask tokens
    reaches: tuple[BlockReach, ...]  # how far rows see, by layer
    from_anchor: bool = False  # whether the row of the last token of the text drafts, too
    markov: MarkovShape | None = None  # how a place depends on the tokens before it; None where it does not
    #: What a place's chance to stand is guessed from; None where it is not guessed.
    judge: JudgeInput | None = None
    gemma: GemmaShape | None = None  # where its layers are those of Gemma 4, and not of Qwen3

    @property
    def num_places(self) -> int:
        """Tokens of a whole block that are drafted."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def kept(self) -> AddedShape:
        return replace(super().kept, feature_size=0)


class BlockHeadNetwork(PublishedNetwork):
    """The head of DFlash (2026): a block is computed whole, as it was in training, however few of its tokens are wanted.

    That of DSpark has two small heads more: `markov_head` and `confidence_head`.
    """

    reads_tokens: ClassVar[bool] = False
    config: BlockHeadConfig

    def __init__(self, config: BlockHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        hidden, eps, gemma = config.hidden_size, config.layer.rms_norm_eps, config.gemma
        self.layers = nn.ModuleList(
            BlockLayer(config.layer) if gemma is None else GemmaBlockLayer(config.layer, gemma) for _ in config.reaches
        )
        if gemma is not None and own_embedding:
            self.embed_tokens = GemmaEmbedding(config.vocab_size, hidden)
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.norm = nn.RMSNorm(hidden, eps)
        self.markov_head = None if config.markov is None else MarkovHead(config, config.markov)
        self.confidence_head = None if config.judge is None else ConfidenceHead(config, config.judge)

    @property
    def stack(self) -> Sequence[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    @property
    def ahead(self) -> int:
        """Rows of a block before that of place 0."""
        return 0 if self.config.from_anchor else 1

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

    def logits(self, left: Tensor, target_head: TargetHead) -> Tensor:
        found, gemma = super().logits(left, target_head), self.config.gemma
        if gemma is None or gemma.logit_cap is None or self.lm_head is None:  # a target caps what it lends by itself
            return found
        return torch.tanh(found / gemma.logit_cap) * gemma.logit_cap


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

"""Heads that read the target's features: their shape and their layers, whatever format they were published in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.heads.lone import activation
from outrider.heads.networks import TargetHead

# --- PublishedNetwork: what the layers of all heads that read the target's features have in common.


class PublishedNetwork(nn.Module):
    """The layers of a published head. Modules carry the names that such heads are published with.

    Attributes:
        config: Its shape.
        embed_tokens: Embeddings of its own; None where the target lends its own.
        lm_head: An output layer of its own; None where the target lends its own.
    """

    def __init__(self, config: FeatureHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if own_output else None

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        """Features [n, hidden_size] of the target's hidden states [n, target_hidden_size], low to high."""
        raise NotImplementedError

    def logits(self, left: Tensor, target_head: TargetHead) -> Tensor:
        """Logits [n, draft_vocab_size], of what the last layer left [n, hidden_size].

        Args:
            left: What the layer left.
            target_head: The target's output layer, for heads without one of their own.
        """
        states = self.output_states(left)
        return target_head(states) if self.lm_head is None else self.lm_head(states)

    def output_states(self, left: Tensor) -> Tensor:
        """What the output layer reads [n, hidden_size], of what the last layer left."""
        raise NotImplementedError


# --- The layers of heads that read the target's features: a fusion, one layer with attention, an output layer.


class LayerInput(NamedTuple):
    """What the layer of a head reads.

    Attributes:
        rows: [n, width] as its attention reads them.
        residual: [n, hidden_size] what its attention adds to.
    """

    rows: Tensor
    residual: Tensor


class FeatureHeadNetwork(PublishedNetwork):
    """The layers of a head that drafts token by token; a subclass for each method.

    Attributes:
        layer: Its layer.
    """

    def __init__(self, config: FeatureHeadConfig, layer: HeadLayer, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        self.layer = layer

    def enter(self, embeddings: Tensor, features: Tensor) -> LayerInput:
        """From embeddings of tokens and the features of the tokens before them, both [n, hidden_size]."""
        raise NotImplementedError

    def next_feature(self, left: Tensor) -> Tensor:
        """What the next token reads [n, hidden_size], of what the layer left."""
        return left


class Eagle1Network(FeatureHeadNetwork):
    """The head of EAGLE (Li et al. 2024): one layer continues what the target's final norm leaves, and its head reads it.

    Args:
        config: Its shape.
        own_embedding: Whether it brings embeddings.
        bias: Whether the projection of [embedding, feature] has a bias.
    """

    def __init__(self, config: FeatureHeadConfig, *, own_embedding: bool, bias: bool) -> None:
        hidden = config.hidden_size
        super().__init__(config, HeadLayer(config.layer, hidden), own_embedding=own_embedding, own_output=False)
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        (feature,) = hidden
        return feature

    def enter(self, embeddings: Tensor, features: Tensor) -> LayerInput:
        rows = self.fc(torch.cat([embeddings, features], -1))
        return LayerInput(rows, rows)  # its layer has no norm before attention

    def output_states(self, left: Tensor) -> Tensor:
        return left


class Eagle3Network(FeatureHeadNetwork):
    """The head of EAGLE-3 (Li et al. 2025): features of several layers are fused, and one layer reads [embedding, feature].

    Args:
        config: Its shape.
        own_embedding: Whether it brings embeddings.
        own_output: Whether it brings an output layer.
    """

    layer: Eagle3Layer

    def __init__(self, config: FeatureHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        hidden, eps = config.hidden_size, config.layer.rms_norm_eps
        super().__init__(config, Eagle3Layer(config.layer), own_embedding=own_embedding, own_output=own_output)
        count, width, norm = config.num_features, config.target_hidden_size, config.feature_norm
        self.input_norm = nn.RMSNorm(count * width, eps) if norm is FeatureNorm.ALL else None
        self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps) for _ in range(count if norm is FeatureNorm.EACH else 0))
        self.fc = nn.Linear(count * width, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps)

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        if self.fc_norm:
            hidden = [norm(states) for norm, states in zip(self.fc_norm, hidden, strict=True)]
        joined = torch.cat(hidden, -1)
        fused: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return fused

    def enter(self, embeddings: Tensor, features: Tensor) -> LayerInput:
        normed = self.layer.hidden_norm(features)
        rows = torch.cat([self.layer.input_layernorm(embeddings), normed], -1)
        return LayerInput(rows, normed if self.config.norm_before_residual else features)

    def next_feature(self, left: Tensor) -> Tensor:
        feature: Tensor = self.norm(left) if self.config.norm_output else left
        return feature

    def output_states(self, left: Tensor) -> Tensor:
        normed: Tensor = self.norm(left)
        return normed


class HeadLayer(nn.Module):
    """A decoder layer behind its first norms, which differ by method.

    Args:
        layer: transformers' configuration of the layer.
        width: Of what its attention reads.
    """

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(layer, width)
        self.post_attention_layernorm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = HeadMLP(layer)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What the layer leaves [n, hidden_size], from what attention found [n, num_heads, head_dim]."""
        states = residual + self.self_attn.o_proj(attended.flatten(1))
        left: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return left


class Eagle3Layer(HeadLayer):
    """The same, whose attention reads [embedding, feature] with a norm for each."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, 2 * layer.hidden_size)
        self.input_layernorm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)


class HeadAttention(nn.Module):
    """Projections of attention, and rotary positions.

    Args:
        layer: transformers' configuration of the layer.
        width: Of what it reads.
    """

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__()
        heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads
        dim, out_bias = layer.head_dim, layer.attention_bias
        bias = getattr(layer, "qkv_bias", out_bias)
        self.head_dim, self.scaling = dim, dim**-0.5
        self.q_proj = nn.Linear(width, heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, layer.hidden_size, bias=out_bias)
        normed = layer.model_type == "qwen3"
        self.q_norm = nn.RMSNorm(dim, layer.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = nn.RMSNorm(dim, layer.rms_norm_eps) if normed else nn.Identity()

    def queries(self, rows: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[n, num_heads, head_dim] of rows [n, width] under cosines and sines [n, head_dim]."""
        return _rotated(self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.head_dim))), rotary)

    def keys_and_values(self, rows: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[n, num_kv_heads, head_dim] each."""
        keys = self.k_norm(self.k_proj(rows).unflatten(-1, (-1, self.head_dim)))
        return _rotated(keys, rotary), self.v_proj(rows).unflatten(-1, (-1, self.head_dim))


class HeadMLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        hidden, inner, bias = layer.hidden_size, layer.intermediate_size, bool(getattr(layer, "mlp_bias", False))
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.activation = activation(layer.hidden_act)

    def forward(self, states: Tensor) -> Tensor:
        """[n, hidden_size] to [n, hidden_size]."""
        out: Tensor = self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))
        return out


def _rotated(rows: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rows [n, heads, head_dim] at their positions: dimension i turns with dimension i + head_dim / 2."""
    cosines, sines = (table[:, None] for table in rotary)
    first, second = rows.chunk(2, -1)
    return rows * cosines + torch.cat([-second, first], -1) * sines


# --- FeatureHeadConfig: the shape of a head that reads the target's features, whatever format it was published in.


class FeatureNorm(StrEnum):
    """How features are normed before they are fused."""

    NONE = "none"
    EACH = "each"  # those of each layer apart
    ALL = "all"  # those of all layers as one row


@dataclass(frozen=True)
class FeatureHeadConfig:
    """What a published head says of itself.

    Attributes:
        method: Whose head it is: "eagle1" reads what the target's final norm leaves, and the others
            what enters several layers.
        layer: transformers' configuration of its layer: sizes, activation, rotary factors.
        target_hidden_size: Width of the target's hidden states.
        vocab_size: Width of the target's logits.
        draft_vocab_size: Width of its own logits.
        aux_layers: Layers of the target whose *inputs* it reads, low to high; None for those that its method names by the
            target's number of layers.
        feature_norm: How these are normed before they are fused.
        norm_before_residual: Whether what its layer adds to is the normed feature, and not the feature itself.
        norm_output: Whether the next token reads what the layer left behind the norm of the output layer, and not before.
        trains_embedding: Whether its own embeddings may be others than the target's.
        verifier: The model that it was made for, as it names it; empty where it names none.
        architectures: That model's classes in transformers.
    """

    method: str
    layer: Any
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...] | None = None
    feature_norm: FeatureNorm = FeatureNorm.NONE
    norm_before_residual: bool = False
    norm_output: bool = False
    trains_embedding: bool = False
    verifier: str = ""
    architectures: tuple[str, ...] = ()

    @property
    def hidden_size(self) -> int:
        """Width of its layer."""
        return int(self.layer.hidden_size)

    @property
    def num_features(self) -> int:
        """Layers of the target that it reads."""
        if self.aux_layers is not None:
            return len(self.aux_layers)
        return 1 if self.method == "eagle1" else 3

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with so many layers, by transformers' index."""
        if self.aux_layers is not None:
            return self.aux_layers
        return (num_layers,) if self.method == "eagle1" else (2, num_layers // 2, num_layers - 3)

    @property
    def kept_per_token(self) -> int:
        """Numbers that it keeps of a token: keys and values."""
        return 2 * int(self.layer.num_key_value_heads) * int(self.layer.head_dim)

"""The layers of heads that read the target's features: a fusion, one layer with attention, an output layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.heads.feature_config import FeatureHeadConfig, FeatureNorm
from outrider.heads.published_network import PublishedNetwork
from outrider.model.lone_layer import activation


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

"""Networks of heads that stand beside a target and read its features, whatever format they were published in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from outrider.cache.memory import AddedShape
from outrider.heads.lone import Look, activation, attend_alone
from outrider.heads.networks import TargetHead
from outrider.model.attention import Scores

# --- A network beside a target is one or more levels, each of which guesses one token further ahead; a level is one or more
# layers.


class Level(Protocol):
    """Layers that guess one token."""

    @property
    def stack(self) -> Sequence[Any]:
        """Its layers, first to last. Each is called with what it reads of rows, which is what `enter` returned, with where
        they stand, and with a `Look`; it returns what it leaves [n, hidden_size]. `keys_and_values` of the first two is
        what it keeps of rows, [n, num_kv_heads, dim] each. Every layer but the first has an `enter` of its own, of what the
        layer before left."""

    def enter(self, embeddings: Tensor, features: Tensor) -> Any:
        """Returns what its first layer reads, from embeddings of tokens and the features of the tokens before them, both
        [n, hidden_size]."""


class BesideNetwork(nn.Module):
    """The layers of a head that stands beside a target; a subclass for each method."""

    #: Whether its first layer reads tokens of the text beside features, and not the features of these tokens alone.
    reads_tokens: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding | None = None  # None where the target lends its own
        self.lm_head: nn.Linear | None = None  # likewise

    @property
    def levels(self) -> Sequence[Level]:
        """Its levels; the last one guesses all tokens that are left."""
        raise NotImplementedError

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        """Features [n, hidden_size] of the target's hidden states [n, target_hidden_size], low to high."""
        (feature,) = hidden
        return feature

    def next_feature(self, left: Tensor) -> Tensor:
        """Features [n, hidden_size] that the next token reads, of what a level left."""
        return left

    def output_states(self, left: Tensor) -> Tensor:
        """States [n, hidden_size] that the output layer reads, of what a level left."""
        return left

    def logits(self, left: Tensor, target_head: TargetHead) -> Tensor:
        """Logits [n, draft_vocab_size], of what a level left [n, hidden_size]. The target's output layer serves heads
        without one of their own."""
        states = self.output_states(left)
        return target_head(states) if self.lm_head is None else self.lm_head(states)


class PublishedNetwork(BesideNetwork):
    """The layers of a published head, which are one level. Modules carry the names that such heads are published with."""

    def __init__(self, config: FeatureHeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if own_output else None

    @classmethod
    def of(cls, config: FeatureHeadConfig, names: Collection[str]) -> PublishedNetwork:
        """The layers of a head that brings tensors of these names, without their weights."""
        own_output = config.draft_vocab_size < config.vocab_size or "lm_head.weight" in names
        return cls(config, own_embedding="embed_tokens.weight" in names, own_output=own_output)

    @property
    def levels(self) -> Sequence[Level]:
        return [self]

    @property
    def stack(self) -> Sequence[HeadLayer]:
        """Its layers, first to last."""
        raise NotImplementedError

    def enter(self, embeddings: Tensor, features: Tensor) -> LayerInput:
        """Returns what its first layer reads: see `Level`."""
        raise NotImplementedError


class LayerInput(NamedTuple):
    """Rows as the layer of a head reads them."""

    rows: Tensor  # [n, width] as its attention reads them
    residual: Tensor  # [n, hidden_size] what its attention adds to


# --- Heads that draft token by token with one layer.


class FeatureHeadNetwork(PublishedNetwork):
    """The layer of a head that drafts token by token, and what stands around it."""

    def __init__(self, config: FeatureHeadConfig, layer: HeadLayer, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        self.layer = layer

    @property
    def stack(self) -> Sequence[HeadLayer]:
        return [self.layer]


class Eagle1Network(FeatureHeadNetwork):
    """The head of EAGLE (Li et al. 2024): one layer continues what the target's final norm leaves, and its head reads
    it."""

    def __init__(self, config: FeatureHeadConfig, *, own_embedding: bool, bias: bool) -> None:
        hidden = config.hidden_size
        super().__init__(config, HeadLayer(config.layer, hidden), own_embedding=own_embedding, own_output=False)
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)

    @classmethod
    def of(cls, config: FeatureHeadConfig, names: Collection[str]) -> PublishedNetwork:
        return cls(config, own_embedding="embed_tokens.weight" in names, bias="fc.bias" in names)

    def enter(self, embeddings: Tensor, features: Tensor) -> LayerInput:
        rows = self.fc(torch.cat([embeddings, features], -1))
        return LayerInput(rows, rows)  # its layer has no norm before attention


class Eagle3Network(FeatureHeadNetwork):
    """The head of EAGLE-3 (Li et al. 2025): features of several layers are fused, and one layer reads [embedding,
    feature]."""

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


# --- The layers of published heads.


class HeadLayer(nn.Module):
    """A decoder layer behind its first norms, which differ by method. `width` is that of what its attention reads."""

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(layer, width)
        self.post_attention_layernorm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = HeadMLP(layer)

    def enter(self, left: Tensor) -> LayerInput:
        """Returns what it reads of what the layer before it left."""
        raise NotImplementedError

    def forward(self, given: LayerInput, tables: tuple[Tensor, Tensor], look: Look) -> Tensor:
        """Returns what it leaves of rows [n, hidden_size], under cosines and sines [n, head_dim]: see `Level`."""
        attention = self.self_attn
        seen = look(*attention.keys_and_values(given.rows, tables))
        found = attend_alone(attention.queries(given.rows, tables), seen, Scores(attention.scaling))
        return self.leave(given.residual, found)

    def keys_and_values(self, given: LayerInput, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values that it keeps of rows, [n, num_kv_heads, head_dim] each."""
        return self.self_attn.keys_and_values(given.rows, tables)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Returns what it leaves [n, hidden_size], from what attention found [n, num_heads, head_dim]."""
        states = residual + self.self_attn.o_proj(attended.flatten(1))
        left: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return left


class Eagle3Layer(HeadLayer):
    """A layer whose attention reads [embedding, feature] with a norm for each."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, 2 * layer.hidden_size)
        self.input_layernorm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(layer.hidden_size, layer.rms_norm_eps)


class HeadAttention(nn.Module):
    """Projections of attention, and rotary positions. `width` is that of what it reads."""

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
        return rotated(self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.head_dim))), rotary)

    def keys_and_values(self, rows: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[n, num_kv_heads, head_dim] each."""
        keys = self.k_norm(self.k_proj(rows).unflatten(-1, (-1, self.head_dim)))
        return rotated(keys, rotary), self.v_proj(rows).unflatten(-1, (-1, self.head_dim))


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


def rotated(rows: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Returns rows [n, heads, head_dim] at their positions: dimension i turns with dimension i + head_dim / 2."""
    cosines, sines = (table[:, None] for table in rotary)
    first, second = rows.chunk(2, -1)
    return rows * cosines + torch.cat([-second, first], -1) * sines


# --- FeatureHeadConfig: the shape of a head that reads the target's features, whatever format it was published in.


class FeatureNorm(StrEnum):
    """Says how features are normed before they are fused."""

    NONE = "none"
    EACH = "each"  # those of each layer apart
    ALL = "all"  # those of all layers as one row


@dataclass(frozen=True)
class FeatureHeadConfig:
    """A published head, as it describes itself."""

    method: str  # "eagle1" reads what the target's final norm leaves, and the others what enters several layers
    layer: Any  # transformers' configuration of its layers: sizes, activation, rotary factors
    target_hidden_size: int
    vocab_size: int  # width of the target's logits
    draft_vocab_size: int  # width of its own logits
    #: Layers of the target whose *inputs* it reads, low to high; None for those that its method names by their number.
    aux_layers: tuple[int, ...] | None = None
    feature_norm: FeatureNorm = FeatureNorm.NONE
    norm_before_residual: bool = False  # whether its layer adds to the normed feature, and not to the feature itself
    norm_output: bool = False  # whether the next token reads what is left behind the norm of the output layer
    trains_embedding: bool = False  # whether its own embeddings may be others than the target's
    verifier: str = ""  # the model that it was made for, as it names it
    architectures: tuple[str, ...] = ()  # that model's classes in transformers

    @property
    def hidden_size(self) -> int:
        """Width of its layers."""
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
    def kept(self) -> AddedShape:
        """Shape of what its layers keep of a text: keys and values, and the feature of the last token."""
        layer = self.layer
        return AddedShape(layer.num_hidden_layers, layer.num_key_value_heads, layer.head_dim, self.hidden_size)

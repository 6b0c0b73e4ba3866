"""Family: the description of a model family for the fused decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.kernels.layout import NormKind
from outrider.model.fused.mixers import DescribeMixer


@dataclass(frozen=True)
class FamilyExperts:
    """How the feed-forward of experts of a family is described. Layers without experts have an ordinary one.

    Attributes:
        module: The module that holds the weights of all experts.
        router: The module that holds the weights of the router.
        num_chosen: The attribute of the configuration that says how many experts a row has.
        normalised: Whether the weights of a row's experts add up to 1, or the attribute that says so.
        bounded: The attributes of `module` with the slope and the limit of a gate that is bounded, or None.
        block: The part of a layer that holds both modules, where it is not the feed-forward's own.
        beside: The module of an ordinary feed-forward beside the experts, from the layer on with dots, or None.
        beside_gate: The projection to the number whose sigmoid scales what stands beside, from the layer on, or None.
    """

    module: str = "experts"
    router: str = "gate"
    num_chosen: str = "num_experts_per_tok"
    normalised: bool | str = True
    bounded: tuple[str, str] | None = None
    block: str | None = None
    beside: str | None = None
    beside_gate: str | None = None


@dataclass(frozen=True)
class FamilySource:
    """How attention to a source is described, in decoders behind an encoder. Its projections have the names of the others.

    Attributes:
        attention: The part of a layer.
        norm: The norm before it.
    """

    attention: str
    norm: str


@dataclass(frozen=True)
class Family:
    """What a decoder of this family is made of, and under which names transformers keeps it.

    The defaults describe Llama. Where a value depends on the checkpoint, the description names the attribute of its
    configuration. Names of parts of a layer may have dots.

    Attributes:
        final_norm: The norm behind the last layer.
        positions: The table of learned position embeddings, or None.
        first_position: The row of this table that belongs to the first token.
        attention, mlp: The two parts of a layer. An empty name is the layer itself.
        qkv: The projections to queries, keys and values, or one that holds all of them.
        interleaved_qkv: Whether this one holds query, key and value of one head after another.
        out: The projection behind attention.
        matrices: The projections of the feed-forward in their order. In a gated one of two, the first holds gate and up.
        gated: Whether the activation is multiplied with a second projection, or the attribute that says so.
        plain_matrices: The projections of the feed-forward where the checkpoint's is not gated.
        activation: The attribute that names the activation, which is SiLU where there is none.
        mixer: The part of a layer with a running state that stands in the place of attention, and what describes it; None
            where all layers attend.
        gated_heads: Whether what a head attends to is multiplied by gates, which its query is projected with.
        experts: How its feed-forward of experts is described, or None where it has none.
        norm: What the norms of a layer and the final one do.
        norm_offset: What is added to the weights of the norms.
        attention_norm, attention_post_norm: The norms before and after attention, or None.
        mlp_norm, mlp_post_norm: The norms before and after the feed-forward, or None.
        head_norms: The norms of queries and keys, where the model has them.
        whole_norms: Whether these take all heads together, and not each alone.
        parallel: Whether the feed-forward stands beside attention, or the attribute that says so.
        interleaved: Whether rotary embeddings turn pairs of neighbours, and not of numbers that lie half a head apart.
        interleaved_tables: Whether the rotary module's tables are in that order, too.
        halved_tables: Whether these tables have each number once.
        sinks: The attribute of an attention module with a score for each head that has no value, or None.
        rotary_where: The attribute of an attention module that is true where positions enter. None where they always do.
        input_scale: The attribute that holds a factor of what the first layer reads.
        residual_scale: The attribute that holds a factor of what both parts add.
        score_cap: The attribute that holds the bound that attention scores come near to.
        logit_scale, logit_divisor: The attribute that holds a factor or a divisor of logits.
        logit_cap: The attribute that holds the bound that logits come near to.
        scaled_outputs: The attribute that says whether logits are divided by the root of the hidden size, or None.
        source: How attention to a source is described, or None where there is no encoder.
        only: What the configuration must say for this description to hold.
    """

    final_norm: str = "norm"
    positions: str | None = None
    first_position: int = 0
    attention: str = "self_attn"
    mlp: str = "mlp"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    interleaved_qkv: bool = False
    out: str = "o_proj"
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool | str = True
    plain_matrices: tuple[str, ...] = ()
    activation: str = "hidden_act"
    mixer: tuple[str, DescribeMixer] | None = None
    gated_heads: bool = False
    experts: FamilyExperts | None = None
    norm: NormKind = NormKind.RMS
    norm_offset: float = 0.0
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    whole_norms: bool = False
    parallel: bool | str = False
    interleaved: bool = False
    interleaved_tables: bool = False
    halved_tables: bool = False
    sinks: str | None = None
    rotary_where: str | None = None
    input_scale: str | None = None
    residual_scale: str | None = None
    score_cap: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None
    logit_cap: str | None = None
    only: Mapping[str, Any] = field(default_factory=dict)
    scaled_outputs: str | None = None
    source: FamilySource | None = None

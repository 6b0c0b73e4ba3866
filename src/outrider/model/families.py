"""The model families whose whole pass the kernels compute, each as a description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.layout import MixerKind, NormKind
from outrider.kernels.mixers import MOST_TAPS, Mixer
from outrider.model.matrices import WeightSlice, whole

# --- Layers with a running state for the fused decoder, from the modules of transformers.


@dataclass(frozen=True)
class DescribedMixer:
    """A layer with a running state."""

    into: list[WeightSlice]  # the parts of the projection into it, in the order of `Mixer`
    out: Any  # the projection behind it
    mixer: Mixer  # what stands between the two


def parted_delta(module: Any) -> DescribedMixer:
    """A gated delta rule with a projection for each thing that it needs."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return _delta(module, [whole(getattr(module, name)) for name in names])


def joined_delta(module: Any) -> DescribedMixer:
    """A gated delta rule whose two projections go from key head to key head."""
    heads, shared = module.num_k_heads, module.num_v_heads // module.num_k_heads
    key, values = module.head_k_dim, shared * module.head_v_dim
    sizes = (key, key, values, values)
    parts = [_of_each_head(module.in_proj_qkvz, heads, sizes, which) for which in range(4)]
    parts += [_of_each_head(module.in_proj_ba, heads, (shared, shared), which) for which in range(2)]
    return _delta(module, [part for some in parts for part in some])


def scan(module: Any) -> DescribedMixer:
    """The scan of Mamba-2."""
    _check_silu(module)
    inner, state = module.intermediate_size, module.n_groups * module.ssm_state_size
    values, keys, queries = inner, inner + state, inner + 2 * state  # where they end among the channels
    channels = [(keys, queries), (values, keys), (0, values)]
    ends = [(inner + begin, inner + end) for begin, end in channels]
    ends += [(0, inner), (inner + queries, inner + queries + module.num_heads)]
    taps, bias = _taps(module.conv1d)
    order = torch.cat([torch.arange(begin, end) for begin, end in channels])
    mixer = Mixer(
        kind=MixerKind.SCAN,
        taps=taps[:, order],
        tap_bias=None if bias is None else bias[order],
        num_heads=module.num_heads,
        num_key_heads=module.n_groups,
        key_dim=module.ssm_state_size,
        value_dim=module.head_dim,
        rates=_rates(module),
        step_bias=module.dt_bias,
        step_limits=tuple(module.time_step_limit),
        skip=module.D,
        norm_weight=module.norm.weight,
        norm_size=getattr(module.norm, "group_size", inner),
        gates_first=True,
        epsilon=module.norm.variance_epsilon,
    )
    return DescribedMixer([WeightSlice(module.in_proj, begin, end) for begin, end in ends], module.out_proj, mixer)


def short_convolution(module: Any) -> DescribedMixer:
    """A convolution between gates of what enters it and gates of what leaves it."""
    taps, bias = _taps(module.conv)
    size = taps.shape[1]
    thirds = [WeightSlice(module.in_proj, third * size, (third + 1) * size) for third in (2, 0, 1)]
    return DescribedMixer(thirds, module.out_proj, Mixer(MixerKind.CONVOLUTION, taps, bias))


#: Makes a description from a module.
DescribeMixer = Callable[[Any], DescribedMixer]


def _delta(module: Any, into: list[WeightSlice]) -> DescribedMixer:
    _check_silu(module)
    taps, bias = _taps(module.conv1d)
    mixer = Mixer(
        kind=MixerKind.DELTA,
        taps=taps,
        tap_bias=bias,
        num_heads=module.num_v_heads,
        num_key_heads=module.num_k_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        rates=_rates(module),
        step_bias=module.dt_bias,
        norm_weight=module.norm.weight.repeat(module.num_v_heads),
        norm_size=module.head_v_dim,
        epsilon=module.norm.variance_epsilon,
    )
    return DescribedMixer(into, module.out_proj, mixer)


def _of_each_head(module: Any, num_heads: int, sizes: tuple[int, ...], which: int) -> list[WeightSlice]:
    """One of the parts of these sizes that a projection holds for each head."""
    begins = [head * sum(sizes) + sum(sizes[:which]) for head in range(num_heads)]
    return [WeightSlice(module, begin, begin + sizes[which]) for begin in begins]


def _taps(convolution: Any) -> tuple[Tensor, Tensor | None]:
    """[width, num_channels], and [num_channels] or None."""
    taps = convolution.weight.detach().squeeze(1).t()
    if len(taps) > MOST_TAPS:
        raise ValueError(f"the kernels do not know convolutions over {len(taps)} inputs")
    return taps, None if convolution.bias is None else convolution.bias.detach()


def _rates(module: Any) -> Tensor:
    logs: Tensor = module.A_log.detach()
    return -logs.to(torch.promote_types(logs.dtype, torch.float32)).exp()


def _check_silu(module: Any) -> None:
    if module.activation not in ("silu", "swish"):
        raise ValueError(f"the kernels do not know the activation {module.activation} behind a convolution")


# --- Family: the description of a model family for the fused decoder.


@dataclass(frozen=True)
class FamilyExperts:
    """Says how the feed-forward of experts of a family is described. Layers without experts have an ordinary one."""

    module: str = "experts"  # the module that holds the weights of all experts
    router: str = "gate"  # the module that holds the weights of the router
    num_chosen: str = "num_experts_per_tok"  # the attribute of the configuration that says how many experts a row has
    normalised: bool | str = True  # whether the weights of a row's experts add up to 1, or the attribute that says so
    # The attributes of `module` with the slope and the limit of a gate that is bounded, or None.
    bounded: tuple[str, str] | None = None
    block: str | None = None  # the part of a layer that holds both modules, where it is not the feed-forward's own
    # The module of an ordinary feed-forward beside the experts, from the layer on with dots, or None.
    beside: str | None = None
    # The projection to the number whose sigmoid scales what stands beside, from the layer on, or None.
    beside_gate: str | None = None


@dataclass(frozen=True)
class FamilySource:
    """Says how attention to a source is described, in decoders behind an encoder. Its projections have the names of the
    others."""

    attention: str  # the part of a layer
    norm: str  # the norm before it


@dataclass(frozen=True)
class Family:
    """Holds what a decoder of this family is made of, and under which names transformers keeps it.

    The defaults describe Llama. Where a value depends on the checkpoint, the description names the attribute of its
    configuration. Names of parts of a layer may have dots.
    """

    final_norm: str = "norm"  # the norm behind the last layer
    positions: str | None = None  # the table of learned position embeddings, or None
    first_position: int = 0  # the row of this table that belongs to the first token
    attention: str = "self_attn"  # the two parts of a layer. An empty name is the layer itself.
    mlp: str = "mlp"  # the two parts of a layer. An empty name is the layer itself.
    # The projections to queries, keys and values, or one that holds all of them.
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    interleaved_qkv: bool = False  # whether this one holds query, key and value of one head after another
    out: str = "o_proj"  # the projection behind attention
    # The projections of the feed-forward in their order. In a gated one of two, the first holds gate and up.
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool | str = True  # whether the activation is multiplied with a second projection, or the attribute that says so
    plain_matrices: tuple[str, ...] = ()  # the projections of the feed-forward where the checkpoint's is not gated
    activation: str = "hidden_act"  # the attribute that names the activation, which is SiLU where there is none
    # The part of a layer with a running state that stands in the place of attention, and what describes it; None where all
    # layers attend.
    mixer: tuple[str, DescribeMixer] | None = None
    gated_heads: bool = False  # whether what a head attends to is multiplied by gates, which its query is projected with
    experts: FamilyExperts | None = None  # how its feed-forward of experts is described, or None where it has none
    norm: NormKind = NormKind.RMS  # what the norms of a layer and the final one do
    norm_offset: float = 0.0  # what is added to the weights of the norms
    attention_norm: str | None = "input_layernorm"  # the norms before and after attention, or None
    attention_post_norm: str | None = None  # the norms before and after attention, or None
    mlp_norm: str | None = "post_attention_layernorm"  # the norms before and after the feed-forward, or None
    mlp_post_norm: str | None = None  # the norms before and after the feed-forward, or None
    head_norms: tuple[str, str] = ("q_norm", "k_norm")  # the norms of queries and keys, where the model has them
    whole_norms: bool = False  # whether these take all heads together, and not each alone
    parallel: bool | str = False  # whether the feed-forward stands beside attention, or the attribute that says so
    # Whether rotary embeddings turn pairs of neighbours, and not of numbers that lie half a head apart.
    interleaved: bool = False
    interleaved_tables: bool = False  # whether the rotary module's tables are in that order, too
    halved_tables: bool = False  # whether these tables have each number once
    sinks: str | None = None  # the attribute of an attention module with a score for each head that has no value, or None
    # The attribute of an attention module that is true where positions enter. None where they always do.
    rotary_where: str | None = None
    input_scale: str | None = None  # the attribute that holds a factor of what the first layer reads
    residual_scale: str | None = None  # the attribute that holds a factor of what both parts add
    score_cap: str | None = None  # the attribute that holds the bound that attention scores come near to
    logit_scale: str | None = None  # the attribute that holds a factor or a divisor of logits
    logit_divisor: str | None = None  # the attribute that holds a factor or a divisor of logits
    logit_cap: str | None = None  # the attribute that holds the bound that logits come near to
    only: Mapping[str, Any] = field(default_factory=dict)  # what the configuration must say for this description to hold
    # The attribute that says whether logits are divided by the root of the hidden size, or None.
    scaled_outputs: str | None = None
    source: FamilySource | None = None  # how attention to a source is described, or None where there is no encoder


# --- The families whose forward pass is the kernels' own.
#
# A description makes a model type a candidate. Whether the model at hand is what the description says is found as for
# every backend: its pass is compared with the stock model's.


_LLAMA = Family()
_JOINED = ("gate_up_proj", "down_proj")
_PHI3 = Family(qkv=("qkv_proj",), matrices=_JOINED)
_GEMMA = Family(norm_offset=1.0)
_GEMMA2 = replace(
    _GEMMA,
    activation="hidden_activation",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
)
_OLMO2 = Family(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
    whole_norms=True,
)
_GPT2 = Family(
    final_norm="ln_f",
    positions="wpe",
    attention="attn",
    qkv=("c_attn",),
    out="c_proj",
    matrices=("c_fc", "c_proj"),
    gated=False,
    activation="activation_function",
    norm=NormKind.LAYER,
    attention_norm="ln_1",
    mlp_norm="ln_2",
)
_GPT_NEOX = Family(
    final_norm="final_layer_norm",
    attention="attention",
    qkv=("query_key_value",),
    interleaved_qkv=True,
    out="dense",
    matrices=("dense_h_to_4h", "dense_4h_to_h"),
    gated=False,
    norm=NormKind.LAYER,
    parallel="use_parallel_residual",
)
_PHI = Family(
    final_norm="final_layernorm",
    out="dense",
    matrices=("fc1", "fc2"),
    gated=False,
    norm=NormKind.LAYER,
    mlp_norm=None,
    head_norms=("q_layernorm", "k_layernorm"),
    parallel=True,
)
_STARCODER2 = Family(matrices=("c_fc", "c_proj"), gated=False, norm=NormKind.LAYER)
_STABLELM = Family(norm=NormKind.LAYER, head_norms=("q_layernorm", "k_layernorm"), parallel="use_parallel_residual")
_COHERE = Family(
    norm=NormKind.LAYER,
    mlp_norm=None,
    parallel=True,
    interleaved=True,
    interleaved_tables=True,
    logit_scale="logit_scale",
)
_GRANITE = Family(input_scale="embedding_multiplier", residual_scale="residual_multiplier", logit_divisor="logits_scaling")
_GLM = Family(matrices=_JOINED, interleaved=True)
_GLM4 = replace(_GLM, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
_OLMO = Family(norm=NormKind.LAYER, only={"clip_qkv": None})
_OPT = Family(
    final_norm="final_layer_norm",
    positions="embed_positions",
    first_position=2,
    mlp="",
    out="out_proj",
    matrices=("fc1", "fc2"),
    gated=False,
    activation="activation_function",
    norm=NormKind.LAYER,
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    only={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
)
_GPT_OSS = Family(
    experts=FamilyExperts(router="router", bounded=("alpha", "limit")),
    sinks="sinks",
    halved_tables=True,
)
_MIXTRAL = Family(experts=FamilyExperts())
_QWEN3_MOE = Family(experts=FamilyExperts(normalised="norm_topk_prob"))
_OLMOE = replace(_QWEN3_MOE, whole_norms=True, only={"clip_qkv": None})
_QWEN3_5 = Family(norm_offset=1.0, gated_heads=True, mixer=("linear_attn", parted_delta))
_SHARED = FamilyExperts(beside="mlp.shared_expert", beside_gate="mlp.shared_expert_gate")
_LFM2 = Family(
    final_norm="embedding_norm",
    mlp="feed_forward",
    mixer=("conv", short_convolution),
    out="out_proj",
    matrices=("w1", "w3", "w2"),
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    head_norms=("q_layernorm", "k_layernorm"),
)
_GRANITE_HYBRID = replace(
    _GRANITE,
    mlp="shared_mlp",
    mixer=("mamba", scan),
    matrices=("input_linear", "output_linear"),
    experts=FamilyExperts(router="router", block="block_sparse_moe", beside="shared_mlp"),
)
_T5 = Family(
    final_norm="final_layer_norm",
    attention="layer.0.SelfAttention",
    mlp="layer.2.DenseReluDense",
    qkv=("q", "k", "v"),
    out="o",
    matrices=("wi_0", "wi_1", "wo"),
    gated="is_gated_act",
    plain_matrices=("wi", "wo"),
    activation="dense_act_fn",
    attention_norm="layer.0.layer_norm",
    mlp_norm="layer.2.layer_norm",
    source=FamilySource(attention="layer.1.EncDecAttention", norm="layer.1.layer_norm"),
)

#: By the model type of their configuration.
FAMILIES: dict[str, Family] = {
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, rotary_where="sliding_window"),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, score_cap=None),  # its configuration has one, and its attention does not read it
    "glm": _GLM,
    "glm4": _GLM4,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "gpt_oss": _GPT_OSS,
    "granite": _GRANITE,
    "granitemoehybrid": _GRANITE_HYBRID,
    "lfm2": _LFM2,
    "llama": _LLAMA,
    "longt5": replace(_T5, scaled_outputs="scale_decoder_outputs"),
    "mistral": _LLAMA,
    "mixtral": _MIXTRAL,
    "mt5": _T5,
    "olmo": _OLMO,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _OLMOE,
    "opt": _OPT,
    "phi": _PHI,
    "phi3": _PHI3,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_5_moe_text": replace(_QWEN3_5, experts=_SHARED),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": replace(
        _QWEN3_5, mixer=("linear_attn", joined_delta), experts=replace(_SHARED, normalised="norm_topk_prob")
    ),
    "smollm3": replace(_LLAMA, rotary_where="use_rope"),
    "stablelm": _STABLELM,
    "starcoder2": _STARCODER2,
    "t5": replace(_T5, scaled_outputs="scale_decoder_outputs"),
    "umt5": replace(_T5, scaled_outputs="tie_word_embeddings"),
}

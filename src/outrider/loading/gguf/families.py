"""What the values of a GGUF file become in transformers' configuration, family by family, beside what all have."""

from __future__ import annotations

from typing import Any

from outrider.loading.gguf.rotary import partial_rotary
from outrider.loading.gguf.values import Values


def llama(values: Values) -> dict[str, Any]:
    biases = values.has("blk.0.attn_q.bias")
    if biases != values.has("blk.0.attn_output.bias"):
        raise values.refuse("biases of some projections of its attention alone")
    return {"attention_bias": biases, "mlp_bias": values.has("blk.0.ffn_up.bias")}


def without_window(values: Values) -> dict[str, Any]:
    """transformers would take a window of 4,096 tokens where nothing is said."""
    return {"sliding_window": None}


def phi_3(values: Values) -> dict[str, Any]:
    found: dict[str, Any] = {"sliding_window": None}  # a window of 0 is none
    if values.get("attention.sliding_window"):
        found["sliding_window"] = values.count("attention.sliding_window")
    if values.get("rope.scaling.original_context_length") is not None:
        found["original_max_position_embeddings"] = values.count("rope.scaling.original_context_length")
    return found


def qwen_3_experts(values: Values) -> dict[str, Any]:
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": values.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def qwen_2_experts(values: Values) -> dict[str, Any]:
    """Experts whose weights are not made to add up to 1, and one that every token has."""
    shared = values.count("expert_shared_feed_forward_length")
    return qwen_3_experts(values) | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def olmo_experts(values: Values) -> dict[str, Any]:
    counts = {"num_experts": values.count("expert_count"), "num_experts_per_tok": values.count("expert_used_count")}
    return counts | {"norm_topk_prob": False}


def minimax_experts(values: Values) -> dict[str, Any]:
    """Experts by sigmoid, chosen with a bias."""
    if values.get(GATING) not in (None, SIGMOID):
        raise values.refuse(f"{GATING}={values.get(GATING)!r}")
    return {
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
    }


def exaone_4(values: Values) -> dict[str, Any]:
    """Layers with a window rotate, and others do not where there are both."""
    if not values.get("attention.sliding_window"):
        return {"sliding_window": None, "layer_types": ["full_attention"] * values.num_layers}
    kinds, layers = values.get("attention.sliding_window_pattern"), values.num_layers
    windows = [(layer + 1) % 4 != 0 for layer in range(layers)] if kinds is None else kinds
    if not isinstance(windows, list) or len(windows) < layers:
        raise values.refuse(f"attention.sliding_window_pattern={kinds!r}")
    return {
        "sliding_window": values.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windows[:layers]],
    }


def exaone_experts(values: Values) -> dict[str, Any]:
    """Windows as in EXAONE 4, and experts as in DeepSeek-V3."""
    found = routed(values)
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    return exaone_4(values) | {names.get(name, name): value for name, value in found.items()}


def mimo(values: Values) -> dict[str, Any]:
    """Layers with a window have twice as many heads of keys, and attention sinks. Some layers have experts."""
    layers, width = values.num_layers, values.count("attention.key_length")
    windows, heads = values.get("attention.sliding_window_pattern"), values.each_layer(KEY_HEADS)
    if not isinstance(windows, list) or len(windows) < layers:
        raise values.refuse(f"attention.sliding_window_pattern={windows!r}")
    full = {count for count, window in zip(heads, windows, strict=False) if not window}
    narrow = {count for count, window in zip(heads, windows, strict=False) if window}
    few = max(full or {count // 2 for count in narrow})
    if full - {few} or narrow - {2 * few}:
        raise values.refuse(f"{KEY_HEADS}={heads}")
    part = {"rope_type": "default", "partial_rotary_factor": partial_rotary(values, width)}
    found = routed(values)
    return {name: found[name] for name in _OF_ROUTERS} | {
        "num_key_value_heads": few,
        "v_head_dim": values.count("attention.value_length", width),
        "attention_value_scale": values.number(VALUE_SCALE, 1.0),
        "norm_topk_prob": True,
        "sliding_window": values.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows[:layers]],
        "mlp_layer_types": [
            "sparse" if values.has(f"blk.{layer}.ffn_gate_inp.weight") else "dense" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": part | {"rope_theta": values.number("rope.freq_base", 10_000.0)},
            "sliding_attention": part | {"rope_theta": values.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def nemotron_h(values: Values) -> dict[str, Any]:
    """Layers that are one thing each, known by their tensors. Files name no least step, and llama.cpp has none."""
    heads, inner, layers = values.count("ssm.time_step_rank"), values.count("ssm.inner_size"), range(values.num_layers)
    if inner % heads:
        raise values.refuse(f"a scan of {inner} numbers in {heads} heads")
    marks = {"mamba": "ssm_in", "attention": "attn_q", "moe": "ffn_gate_inp"}
    kinds = [
        next((kind for kind, mark in marks.items() if values.has(f"blk.{layer}.{mark}.weight")), "mlp") for layer in layers
    ]
    first = {kind: kinds.index(kind) if kind in kinds else 0 for kind in (*marks, "mlp")}
    return {
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": values.count("ssm.group_count"),
        "ssm_state_size": values.count("ssm.state_size"),
        "conv_kernel": values.count("ssm.conv_kernel"),
        "time_step_min": 1e-9,  # of which transformers takes the logarithm
        "use_conv_bias": values.has(f"blk.{first['mamba']}.ssm_conv1d.bias"),
        "mamba_proj_bias": values.has(f"blk.{first['mamba']}.ssm_in.bias"),
        "attention_bias": values.has(f"blk.{first['attention']}.attn_q.bias"),
        "mlp_bias": values.has(f"blk.{first['mlp']}.ffn_up.bias"),
    }


def nemotron_h_experts(values: Values) -> dict[str, Any]:
    """Experts as in DeepSeek-V3, which may read and give fewer numbers than a token has."""
    found = routed(values)
    return nemotron_h(values) | {
        **{name: found[name] for name in (*_OF_ROUTERS, "n_shared_experts", "norm_topk_prob")},
        "moe_shared_expert_intermediate_size": values.count("expert_shared_feed_forward_length"),
        "moe_latent_size": values.natural("moe_latent_size") or None,
    }


def mamba_2(values: Values) -> dict[str, Any]:
    """Scans alone."""
    names = {
        "mamba_n_heads": "num_heads",
        "mamba_d_head": "head_dim",
        "mamba_expand": "expand",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
    }
    return {names[name]: value for name, value in scan(values).items()} | {
        "use_conv_bias": values.has("blk.0.ssm_conv1d.bias"),
        "use_bias": values.has("blk.0.ssm_in.bias"),
    }


def llama_4(values: Values) -> dict[str, Any]:
    """Layers see a chunk of tokens, but every fourth one, which rotates nothing, all. Files do not say it, nor that queries
    and keys are normed, but where there are 128 experts."""
    experts = values.count("expert_count")
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": values.count("expert_used_count"),
        "intermediate_size": values.count("expert_feed_forward_length"),
        "intermediate_size_mlp": values.count("feed_forward_length"),
        "interleave_moe_layer_step": values.count("interleave_moe_layer_step"),
        "use_qk_norm": experts != 128,
        "attention_bias": values.has("blk.0.attn_q.bias"),
    }


def falcon(values: Values) -> dict[str, Any]:
    """A scan of Mamba-2 beside attention. What multiplies numbers in folders is in the weights of files."""
    found = scan(values)
    return {
        **found,
        "mamba_d_ssm": values.count("ssm.inner_size"),
        "mamba_rms_norm": values.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": values.has("blk.0.ssm_conv1d.bias"),
    }


def seed(values: Values) -> dict[str, Any]:
    return with_biases(values) | {
        "attention_out_bias": values.has("blk.0.attn_output.bias"),
        "mlp_bias": values.has("blk.0.ffn_up.bias"),
    }


def ernie(values: Values) -> dict[str, Any]:
    return {"use_bias": values.has("blk.0.attn_q.bias")}


def gpt_oss(values: Values) -> dict[str, Any]:
    return {
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "intermediate_size": values.count("expert_feed_forward_length"),
        "sliding_window": values.count("attention.sliding_window"),
    }


def delta(values: Values) -> dict[str, Any]:
    """The layers of a gated delta rule, and which of all layers attend instead."""
    keys, heads, inner = (values.count(f"ssm.{name}") for name in ("group_count", "time_step_rank", "inner_size"))
    if heads % keys or inner % heads:
        raise values.refuse(f"a gated delta rule with {heads} heads of values of {inner} numbers, and {keys} of keys")
    every, layers = values.count("full_attention_interval", 4), values.num_layers
    linear = values.get("attention.recurrent_layers") or [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(linear, list) or len(linear) < layers:
        raise values.refuse(f"attention.recurrent_layers={linear!r}")
    return {
        "linear_conv_kernel_dim": values.count("ssm.conv_kernel"),
        "linear_key_head_dim": values.count("ssm.state_size"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear[:layers]],
    }


def delta_and_experts(values: Values) -> dict[str, Any]:
    """Experts whose weights add up to 1, and one that every token has."""
    shared = values.count("expert_shared_feed_forward_length")
    return delta(values) | qwen_3_experts(values) | {"shared_expert_intermediate_size": shared}


def has_gates(values: Values) -> bool:
    """Tells whether the feed-forward of T5 has gates."""
    return values.has("dec.blk.0.ffn_gate.weight")


def t_5(values: Values) -> dict[str, Any]:
    """An encoder, and a decoder that may have another depth. Biases of distances set no end to a text. Files do not say
    what the activation is, nor the distance from which on all have one bias: T5 has one of each."""
    return {
        "max_position_embeddings": None,
        "d_ff": values.count("feed_forward_length"),
        "num_decoder_layers": values.check_layers(values.count("decoder_block_count", values.num_layers)),
        "relative_attention_num_buckets": values.count("attention.relative_buckets_count"),
        "feed_forward_proj": "gated-gelu" if has_gates(values) else "relu",
        "decoder_start_token_id": values.token("decoder_start_token_id"),
    }


def with_biases(values: Values) -> dict[str, Any]:
    """Queries, keys and values may have biases."""
    return {"attention_bias": values.has("blk.0.attn_q.bias")}


#: The functions that make scores of experts, by their numbers in files.
SOFTMAX, SIGMOID = 1, 2


def routed(values: Values, gating: int = SIGMOID) -> dict[str, Any]:
    """Experts that a router with a bias chooses, as in DeepSeek-V3, some layers without them, and shared ones."""
    if values.get(GATING) not in (None, gating):
        raise values.refuse(f"{GATING}={values.get(GATING)!r}")
    return {
        "n_routed_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": values.count("expert_feed_forward_length"),
        "n_shared_experts": values.natural("expert_shared_count"),
        "first_k_dense_replace": values.natural("leading_dense_block_count"),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(values.get("expert_weights_norm")),
        "n_group": values.natural("expert_group_count") or 1,
        "topk_group": values.natural("expert_group_used_count") or 1,
    }


GATING, KEY_HEADS = "expert_gating_func", "attention.head_count_kv"
#: What values are multiplied by before they are attended to.
VALUE_SCALE = "attention.value_scale"
_OF_ROUTERS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)


def latent(values: Values) -> dict[str, Any]:
    """Attention to compressed keys and values. Older files say the width of heads where newer ones say that of latents."""
    heads, rotated = values.count("attention.head_count"), values.count("rope.dimension_count")
    width = values.count("attention.key_length_mla", values.get("attention.key_length"))
    if width <= rotated:
        raise values.refuse(f"keys of {width} numbers, of which {rotated} are rotated")
    return {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "q_lora_rank": values.count("attention.q_lora_rank") if values.get("attention.q_lora_rank") else None,
        "kv_lora_rank": values.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": values.count("attention.value_length_mla", values.get("attention.value_length")),
    }


def dots(values: Values) -> dict[str, Any]:
    """Experts as in DeepSeek-V3."""
    return routed(values) | with_biases(values) | {"sliding_window": None}


def deepseek_3(values: Values) -> dict[str, Any]:
    return routed(values) | latent(values)


def deepseek_2(values: Values) -> dict[str, Any]:
    """Experts by softmax, whose weights are not made to add up to 1."""
    if values.get("expert_weights_norm") or values.natural("expert_group_count") > 1:
        raise values.refuse("weights of experts that add up to 1, or groups of them, by softmax")
    return routed(values, SOFTMAX) | latent(values)


def granite(values: Values) -> dict[str, Any]:
    """Numbers that Granite multiplies with, or divides by."""
    width = values.count("embedding_length") // values.count("attention.head_count")
    return with_biases(values) | {
        "attention_multiplier": values.number("attention.scale", width**-0.5),
        "embedding_multiplier": values.number("embedding_scale", 1.0),
        "residual_multiplier": values.number("residual_scale", 1.0),
        "logits_scaling": values.number("logit_scale", 1.0),
    }


def granite_experts(values: Values) -> dict[str, Any]:
    counts = {"num_local_experts": values.count("expert_count"), "num_experts_per_tok": values.count("expert_used_count")}
    return granite(values) | counts


def scan(values: Values) -> dict[str, Any]:
    """The shape of a scan of Mamba-2."""
    heads, inner, hidden = (values.count(name) for name in ("ssm.time_step_rank", "ssm.inner_size", "embedding_length"))
    if inner % heads or inner % hidden:
        raise values.refuse(f"a scan of {inner} numbers in {heads} heads, for {hidden} of a token")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_n_groups": values.count("ssm.group_count"),
        "mamba_d_state": values.count("ssm.state_size"),
        "mamba_d_conv": values.count("ssm.conv_kernel"),
    }


def granite_hybrid(values: Values) -> dict[str, Any]:
    """Layers without keys are scans of Mamba-2."""
    kinds = ["attention" if keys else "mamba" for keys in values.each_layer(KEY_HEADS)]
    first = kinds.index("mamba") if "mamba" in kinds else 0
    return (
        granite(values)
        | scan(values)
        | {
            "layer_types": kinds,
            "mamba_conv_bias": values.has(f"blk.{first}.ssm_conv1d.bias"),
            "shared_intermediate_size": values.count(
                "expert_shared_feed_forward_length", values.get("feed_forward_length")
            ),
            "num_local_experts": values.natural("expert_count"),
            "num_experts_per_tok": values.natural("expert_used_count"),
            "position_embedding_type": "rope" if values.get("rope.scaling.finetuned") else None,
        }
    )


def ernie_experts(values: Values) -> dict[str, Any]:
    """Experts by softmax, chosen with a bias, in some layers behind some without any."""
    return {
        "moe_num_experts": values.count("expert_count"),
        "moe_k": values.count("expert_used_count"),
        "moe_intermediate_size": values.count("expert_feed_forward_length"),
        "moe_num_shared_experts": values.natural("expert_shared_count"),
        "moe_layer_start_index": values.natural("leading_dense_block_count"),
        "moe_layer_interval": values.count("interleave_moe_layer_step", 1),
        "moe_layer_end_index": values.num_layers - 1,
    }


def hunyuan_experts(values: Values) -> dict[str, Any]:
    """Experts by softmax, and one for every token that is as wide."""
    if values.natural("expert_shared_count") > 1:
        raise values.refuse(f"expert_shared_count={values.get('expert_shared_count')!r}")
    return with_biases(values) | {
        "num_experts": values.count("expert_count"),
        "moe_topk": values.count("expert_used_count"),
        "intermediate_size": values.count("expert_feed_forward_length"),
    }


def cohere_2(values: Values) -> dict[str, Any]:
    """Every fourth layer sees all tokens, and rotates nothing."""
    layers = range(1, values.num_layers + 1)
    return with_biases(values) | {
        "logit_scale": values.number("logit_scale"),
        "sliding_window": values.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if layer % 4 else "full_attention" for layer in layers],
    }


def stablelm(values: Values) -> dict[str, Any]:
    """Returns where a layer has one norm, its feed-forward stands beside attention."""
    return {
        "use_qkv_bias": values.has("blk.0.attn_q.bias"),
        "use_parallel_residual": not values.has("blk.0.ffn_norm.weight"),
        "qk_layernorm": values.has("blk.0.attn_q_norm.weight"),
    }


def convolutions(values: Values) -> dict[str, Any]:
    """Layers without keys are short convolutions."""
    return {
        "conv_L_cache": values.count("shortconv.l_cache"),
        "layer_types": ["full_attention" if heads else "conv" for heads in values.each_layer(KEY_HEADS)],
        "block_auto_adjust_ff_dim": False,
    }


def convolutions_and_experts(values: Values) -> dict[str, Any]:
    if values.get(GATING) not in (None, SIGMOID):
        raise values.refuse(f"{GATING}={values.get(GATING)!r}")
    dense = values.natural("leading_dense_block_count")
    return convolutions(values) | {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": values.count("expert_feed_forward_length"),
        "num_dense_layers": dense,
        "use_expert_bias": values.has(f"blk.{dense}.exp_probs_b.bias"),
        "norm_topk_prob": True,
    }


def glm_4_experts(values: Values) -> dict[str, Any]:
    return routed(values) | with_biases(values) | {"use_qk_norm": values.has("blk.0.attn_q_norm.weight")}

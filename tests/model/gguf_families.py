"""How llama.cpp's converter writes families that nothing is converted to here: names by the gguf package, and its rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.lab.convert.gguf_families import (
    AS_IT_IS,
    FAMILIES,
    LATENT,
    PLUS_ONE,
    RATE,
    ROUTED,
    Change,
    Describe,
    FileFamily,
    Part,
    Parts,
    Rows,
    describe_delta,
    describe_latent,
    describe_nothing,
    describe_sigmoid,
    half,
    latent_parts,
    rotated,
    squeezed,
    whole,
)
from tests.model import checkpoints


def save(family: str, path: Path, **changes: Any) -> str:
    """A checkpoint whose routers have biases, which new models have not."""
    from transformers import AutoModelForCausalLM

    if family.startswith(("gemma3n", "gemma4")) and "vocab_size" in changes:
        changes["vocab_size_per_layer_input"] = changes["vocab_size"]
    source = checkpoints.save(family.partition(":")[0], path, seed=1, **changes)
    model = AutoModelForCausalLM.from_pretrained(source)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith(("e_score_correction_bias", "expert_bias"))]
    for bias in biases:
        bias.copy_(0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(2)))
    if biases:
        model.save_pretrained(source)
    return source


#: What no family that is converted has.
OTHERS: Parts = {
    "block_sparse_moe.experts.gate_up_proj": [
        (f"block_sparse_moe.experts.{name}", half(which), AS_IT_IS) for which, name in enumerate(("w1", "w3"))
    ],
    "block_sparse_moe.experts.down_proj": [("block_sparse_moe.experts.w2", whole, AS_IT_IS)],
    "block_sparse_moe.router": [("block_sparse_moe.router.layer", whole, AS_IT_IS)],
    "feed_forward.experts.gate_up_proj": [
        (f"feed_forward.experts.{name}_proj", half(which), AS_IT_IS) for which, name in enumerate(("gate", "up"))
    ],
    "feed_forward.expert_bias": [("feed_forward.expert_bias", whole, AS_IT_IS)],
    "conv.conv": [("conv.conv", lambda taps: taps[:, 0], AS_IT_IS)],
    "mlp.gate.moe_statics.e_score_correction_bias": [
        ("mlp.moe_statics.e_score_correction", lambda bias: bias[0], AS_IT_IS)
    ],
    "mlp.e_score_correction_bias": [("block_sparse_moe.e_score_correction", whole, AS_IT_IS)],
}
_NORMS = {"norm_eps": "layer_norm_rms_eps", "layer_norm_eps": "layer_norm_eps", "norm_epsilon": "layer_norm_eps"}


def written(
    architecture: str,
    values: dict[str, str | None] | None = None,
    described: Describe = describe_nothing,
    parts: Callable[[Any], Parts] = lambda config: {},
    **more: Any,
) -> FileFamily:
    """A family that nothing is converted to."""
    return FileFamily(architecture, _NORMS | (values or {}), described, lambda config: {**OTHERS, **parts(config)}, **more)


# --- The gated delta rule.


def _delta_by_keys(config: Any) -> Parts:
    """Queries, keys and values of all heads, and their gates, of a projection that has them one key after another."""
    key = config.linear_key_head_dim
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim

    def each(begin: int, end: int) -> Rows:
        def found(rows: np.ndarray) -> np.ndarray:
            return rows.reshape(config.linear_num_key_heads, -1, rows.shape[1])[:, begin:end].reshape(-1, rows.shape[1])

        return found

    ends = (each(0, key), each(key, 2 * key), each(2 * key, 2 * key + values))
    found: dict[str, list[Part]] = {
        "in_proj_qkvz": [
            ("in_proj_qkv", lambda rows: np.concatenate([part(rows) for part in ends]), AS_IT_IS),
            ("in_proj_z", each(2 * key + values, 2 * (key + values)), AS_IT_IS),
        ],
        "A_log": [("A_log", whole, RATE)],
        "dt_bias": [("dt_proj", whole, AS_IT_IS)],
        "conv1d": [("conv1d", squeezed, AS_IT_IS)],
        "norm": [("norm", whole, AS_IT_IS)],
    }
    return {
        f"linear_attn.{name}": [(f"linear_attn.{part[0]}", *part[1:]) for part in parts] for name, parts in found.items()
    }


def _describe_minimax(writer: Any, config: Any) -> None:
    describe_sigmoid(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _describe_softmax(writer: Any, config: Any) -> None:
    import gguf

    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def _describe_convolutions(writer: Any, config: Any) -> None:
    kinds = config.layer_types
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        describe_sigmoid(writer, config)


def _describe_stablelm(writer: Any, config: Any) -> None:
    writer.add_parallel_residual(config.use_parallel_residual)


_MULTIPLIERS = {
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_SCAN = {
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "mamba_d_conv": "ssm_conv_kernel",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "ssm_group_count",
    "mamba_n_heads": "ssm_time_step_rank",
}


def _describe_scan(writer: Any, config: Any) -> None:
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * one for one in attends])
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_rope_scaling_finetuned(False)


def _scans(place: str, groups: int) -> Parts:
    def column(values: np.ndarray) -> np.ndarray:
        return values[:, None]

    return {
        f"{place}.A_log": [(f"{place}.A_log", column, RATE)],
        f"{place}.D": [(f"{place}.D", column, AS_IT_IS)],
        f"{place}.dt_bias": [(f"{place}.dt_proj", whole, AS_IT_IS)],
        f"{place}.conv1d": [(f"{place}.conv1d", squeezed, AS_IT_IS)],
        f"{place}.norm": [(f"{place}.norm", lambda norm: norm.reshape(groups, -1), AS_IT_IS)],
        "pre_ff_layernorm": [("pre_ff_layernorm.weight", whole, AS_IT_IS)],
    }


def _scans_alone(config: Any) -> Parts:
    return _scans("mixer", config.n_groups)


def _scan_parts(config: Any) -> Parts:
    mlp = "mlp.shared_experts" if config.num_local_experts else "mlp"
    shared = [(f"{mlp}.{name}_proj", half(which, 0), AS_IT_IS) for which, name in enumerate(("gate", "up"))]
    return (
        rotated(config)
        | _scans("mamba", config.mamba_n_groups)
        | {
            "shared_mlp.input_linear": shared,
            "shared_mlp.output_linear": [(f"{mlp}.down_proj", whole, AS_IT_IS)],
        }
    )


def _describe_gemma_4(writer: Any, config: Any) -> None:
    kinds, shared = config.layer_types, config.num_kv_shared_layers
    wide, narrow = (config.per_layer_config[kinds.index(f"{kind}_attention")] for kind in ("full", "sliding"))
    writer.add_key_length(wide.head_dim)
    writer.add_value_length(wide.head_dim)
    writer.add_key_length_swa(narrow.head_dim)
    writer.add_value_length_swa(narrow.head_dim)
    writer.add_head_count_kv([config.per_layer_config[layer].num_key_value_heads for layer in range(len(kinds))])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    size, own = config.intermediate_size, len(kinds) - shared if config.use_double_wide_mlp else len(kinds)
    writer.add_feed_forward_length([size if layer < own else 2 * size for layer in range(len(kinds))])
    writer.add_rope_dimension_count(wide.head_dim)
    writer.add_rope_dimension_count_swa(narrow.head_dim)
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_float32("gemma4.rope.freq_base_swa", sliding["rope_theta"])
    turning = int(wide.head_dim * full["partial_rotary_factor"] / 2)
    factors = [1.0] * turning + [1e30] * (wide.head_dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _gemma_4_parts(config: Any) -> Parts:
    """What scales the router and what experts give has the names of these, with an ending of its own."""
    return {
        "router.scale": [("router.proj", whole, AS_IT_IS)],
        "router.per_expert_scale": [("experts.down_proj", whole, AS_IT_IS)],
    }


def _describe_gemma_3n(writer: Any, config: Any) -> None:
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    parts = torch.tensor(config.activation_sparsity_pattern)
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0.0, 1.0).icdf(parts).tolist())


def _gemma_3n_parts(config: Any) -> Parts:
    """Matrices of one name become one tensor."""
    names = ("model.altup_projections", "model.altup_unembed_projections")
    return {f"{name}.{place}": [(name, whole, AS_IT_IS)] for name in names for place in range(config.altup_num_inputs - 1)}


def _describe_windows(writer: Any, config: Any) -> None:
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _describe_exaone_experts(writer: Any, config: Any) -> None:
    import gguf

    _describe_windows(writer, config)
    describe_sigmoid(writer, config)
    writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.num_shared_experts)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _describe_mimo(writer: Any, config: Any) -> None:
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * (2 if window else 1) for window in windows])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(windows)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.v_head_dim)
    writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_rope_dimension_count(int(config.head_dim * full["partial_rotary_factor"]))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_float32("mimo2.rope.freq_base_swa", sliding["rope_theta"])


def _describe_nemotron_h(writer: Any, config: Any) -> None:
    kinds = config.layers_block_type
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    sizes = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    writer.add_feed_forward_length([sizes.get(kind, 0) for kind in kinds])
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_rope_dimension_count(config.head_dim)


def _nemotron_h_expert_parts(config: Any) -> Parts:
    """Experts are renamed when they become one tensor."""
    names = {f"mixer.experts.{name}_proj": f"mlp.experts.{name}_proj" for name in ("up", "down")}
    names["mixer.gate.e_score_correction_bias"] = "mlp.gate.e_score_correction"
    return _scans_alone(config) | {ours: [(theirs, whole, AS_IT_IS)] for ours, theirs in names.items()}


def _describe_mamba_2(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_inner_size(config.num_heads * config.head_dim)


def _llama_4_parts(config: Any) -> Parts:
    """Experts the other way round."""

    def turned(experts: np.ndarray) -> np.ndarray:
        return experts.swapaxes(1, 2)

    def part(which: int) -> Rows:
        return lambda experts: np.split(turned(experts), 2, axis=1)[which]

    place = "feed_forward.experts"
    return {
        f"{place}.gate_up_proj": [(f"{place}.{name}_proj", part(one), AS_IT_IS) for one, name in enumerate(("gate", "up"))],
        f"{place}.down_proj": [(f"{place}.down_proj", turned, AS_IT_IS)],
    }


def _falcon_parts(config: Any) -> Parts:
    """What multiplies numbers, in the weights."""
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    z, x, b, c, dt = config.ssm_multipliers
    each = np.repeat([z, x, b, c, dt], [inner, inner, state, state, config.mamba_n_heads])[:, None]

    def times(factor: Any) -> Change:
        many = np.float32(factor)
        return Change(lambda rows: rows * many, lambda rows: rows / many)

    factors: dict[str, Any] = {
        "self_attn.q_proj": config.attention_in_multiplier,
        "self_attn.k_proj": config.attention_in_multiplier * config.key_multiplier,
        "self_attn.v_proj": config.attention_in_multiplier,
        "self_attn.o_proj": config.attention_out_multiplier,
        "feed_forward.gate_proj": config.mlp_multipliers[0],
        "feed_forward.down_proj": config.mlp_multipliers[1],
        "mamba.in_proj": config.ssm_in_multiplier * each,
        "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "model.embed_tokens": config.embedding_multiplier,
    }
    scans = _scans("mamba", config.mamba_n_groups)
    return scans | {name: [(name, whole, times(factor))] for name, factor in factors.items()}


def _describe_ernie(writer: Any, config: Any) -> None:
    writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)


def _describe_hunyuan(writer: Any, config: Any) -> None:
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)


_ERNIE = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_num_shared_experts": "expert_shared_count",
}
_SCAN_ALONE = {
    "layer_norm_epsilon": "layer_norm_eps", "conv_kernel": "ssm_conv_kernel", "ssm_state_size": "ssm_state_size",
    "n_groups": "ssm_group_count", "mamba_num_heads": "ssm_time_step_rank",
    **dict.fromkeys(("num_key_value_heads", "intermediate_size", "num_experts_per_tok", "moe_intermediate_size")),
    **dict.fromkeys(("num_experts", "num_local_experts")),
}  # fmt: skip
#: Of Nemotron-H with experts, of which the others say nothing.
_SCAN_AND_EXPERTS = {
    **_SCAN_ALONE, **ROUTED, "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": "moe_latent_size", "num_experts_per_tok": "expert_used_count", "n_group": "expert_group_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
_ONLY_SCAN = {
    "layer_norm_epsilon": "layer_norm_rms_eps", "conv_kernel": "ssm_conv_kernel", "state_size": "ssm_state_size",
    "n_groups": "ssm_group_count", "num_heads": "ssm_time_step_rank",
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps")),
}  # fmt: skip
_LLAMA_4 = {
    "intermediate_size": "expert_feed_forward_length", "intermediate_size_mlp": "feed_forward_length",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}  # fmt: skip
_EXAONE = {**ROUTED, "num_shared_experts": "expert_shared_count"}
_WINDOWS = {"logit_scale": "logit_scale", "sliding_window": "sliding_window"}
_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_OF_LAYERS = {
    "num_key_value_heads": None, "intermediate_size": None, "final_logit_softcapping": "final_logit_softcapping",
    "top_k_experts": "expert_used_count",
}  # fmt: skip
_ALTERNATING = {
    name: name for name in ("altup_num_inputs", "altup_active_idx", "sliding_window", "final_logit_softcapping")
} | {"hidden_size_per_layer_input": "embedding_length_per_layer_input", "num_kv_shared_layers": "shared_kv_layers"}
#: By the model type of their configuration.
WRITTEN: dict[str, FileFamily] = {
    **FAMILIES,
    "qwen3_next": written("qwen3next", _SHARED, describe_delta, _delta_by_keys, norms=PLUS_ONE),
    "qwen2_moe": written("qwen2moe", _SHARED),
    "olmoe": written("olmoe"),
    "minimax_m2": written("minimax-m2", {}, _describe_minimax),
    "dots1": written("dots1", ROUTED, describe_sigmoid),
    "exaone4": written("exaone4", {}, _describe_windows),
    "exaone_moe": written("exaone-moe", _EXAONE, _describe_exaone_experts),
    "nemotron_h": written("nemotron_h", _SCAN_ALONE, _describe_nemotron_h, _scans_alone, heads=describe_nothing),
    "nemotron_h:experts": written(
        "nemotron_h_moe", _SCAN_AND_EXPERTS, _describe_nemotron_h, _nemotron_h_expert_parts, heads=describe_nothing
    ),
    "mamba2": written("mamba2", _ONLY_SCAN, _describe_mamba_2, _scans_alone, heads=describe_nothing),
    "llama4_text": written("llama4", _LLAMA_4, parts=_llama_4_parts),
    "mimo_v2_flash": written("mimo2", ROUTED | {"num_key_value_heads": None}, heads=_describe_mimo),
    "falcon_h1": written("falcon-h1", _SCAN | {"mamba_d_ssm": "ssm_inner_size"}, parts=_falcon_parts),
    "seed_oss": written("seed_oss"),
    "ernie4_5": written("ernie4_5"),
    "hunyuan_v1_dense": written("hunyuan-dense"),
    "arcee": written("arcee", parts=rotated),
    "nemotron": written("nemotron", {"norm_eps": "layer_norm_eps"}, norms=PLUS_ONE),
    "glm4": written("glm4"),
    "olmo2": written("olmo2"),
    "smollm3": written("smollm3", parts=rotated),
    "granite": written("granite", _MULTIPLIERS, parts=rotated),
    "granitemoe": written("granitemoe", _MULTIPLIERS, parts=rotated),
    "granitemoehybrid": written("granitehybrid", _MULTIPLIERS | _SCAN, _describe_scan, _scan_parts),
    "ernie4_5_moe": written("ernie4_5-moe", _ERNIE, _describe_ernie),
    "hunyuan_v1_moe": written("hunyuan-moe", {"moe_topk": "expert_used_count"}, _describe_hunyuan),
    "cohere2": written("cohere2", _WINDOWS),
    "starcoder2": written("starcoder2"),
    "phi": written("phi2"),
    "stablelm": written("stablelm", {}, _describe_stablelm),
    "lfm2": written("lfm2", {}, _describe_convolutions),
    "lfm2_moe": written("lfm2moe", {"num_dense_layers": "leading_dense_block_count"}, _describe_convolutions),
    "gemma": written("gemma", norms=PLUS_ONE),
    "gemma3n_text": written("gemma3n", _ALTERNATING, _describe_gemma_3n, _gemma_3n_parts),
    "gemma4_text": written("gemma4", _OF_LAYERS, _describe_gemma_4, _gemma_4_parts, heads=describe_nothing),
    "deepseek_v2": written(
        "deepseek2",
        ROUTED | LATENT | {"num_key_value_heads": None},
        _describe_softmax,
        latent_parts,
        heads=describe_latent,
    ),
}


def family_of(config: Any) -> FileFamily:
    """The family of a checkpoint. Files with experts may have an architecture of their own."""
    kind = str(config.model_type)
    experts = kind == "nemotron_h" and "moe" in config.layers_block_type
    return WRITTEN[f"{kind}:experts" if experts else kind]


#: Three heads of values for each of four of keys, so that no order of heads is its own inverse, and in blocks of 256
#: columns that hold several heads.
_HEADS: dict[str, Any] = {
    "layers": 4, "linear_num_value_heads": 12, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
_SMALL_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
_LATENTS: dict[str, Any] = {
    "q_lora_rank": 64, "kv_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 128,
    "head_dim": 32, "qk_head_dim": 96, "moe_intermediate_size": 256,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40, "mscale": 0.707,
    "mscale_all_dim": 0.707,
}  # fmt: skip
_SCANS: dict[str, Any] = {
    "layers": 4, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "shared_intermediate_size": 256,
    "attention_multiplier": 0.1, "position_embedding_type": None,
}  # fmt: skip
_ALTERNATED: dict[str, Any] = {
    "layers": 4, "intermediate_size": [256] * 4, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
}  # fmt: skip
#: What a checkpoint of a family needs for a file, by the names of checkpoints and what sets it apart. llama.cpp has kernels
#: for some sizes alone.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _HEADS,
    "qwen3_5_moe_text": _HEADS | _SMALL_EXPERTS,
    "qwen3_next": _HEADS | _SMALL_EXPERTS,
    "qwen2_moe": _SMALL_EXPERTS | {"norm_topk_prob": False},
    "olmoe": {"intermediate_size": 256, "num_key_value_heads": 4},
    "minimax_m2": {},
    "dots1": {"moe_intermediate_size": 256, "routed_scaling_factor": 1.5, "num_key_value_heads": 4},
    "exaone4": {"layers": 4, "sliding_window": None, "layer_types": ["full_attention"] * 4},
    "exaone4:windows": {"layers": 4},
    "exaone_moe": {"layers": 4, "moe_intermediate_size": 256, "norm_topk_prob": True},
    # Powers of 2, which change no bits whether they multiply weights or what is computed with them.
    "falcon_h1": {
        "layers": None,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_d_ssm": 512,
        "attention_in_multiplier": 0.5,
        "attention_out_multiplier": 2.0,
        "key_multiplier": 0.25,
        "mlp_multipliers": [0.5, 4.0],
        "ssm_in_multiplier": 2.0,
        "ssm_multipliers": [0.5, 0.25, 2.0, 0.5, 0.5],
        "ssm_out_multiplier": 0.5,
        "lm_head_multiplier": 0.25,
        "embedding_multiplier": 4.0,
    },
    "falcon_h1:norm": {
        "layers": None,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_d_ssm": 512,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "nemotron_h": {
        "layers": None,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 32,
        "num_key_value_heads": 2,
        "time_step_min": 1e-9,
    },
    "nemotron_h:experts": {
        "layers": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 32,
        "num_key_value_heads": 2,
        "time_step_min": 1e-9,
        "n_routed_experts": 4,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "moe_latent_size": 128,
        "routed_scaling_factor": 1.5,
    },
    "mamba2": {"layers": None, "num_heads": 8, "head_dim": 64, "state_size": 32},
    "llama4_text": {"layers": 4, "attention_chunk_size": 8192, "intermediate_size_mlp": 512},
    "mimo_v2_flash": {
        "layers": None,
        "moe_intermediate_size": 256,
        "v_head_dim": 32,
        "num_key_value_heads": 1,
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full", 5e6), ("sliding", 1e4))
        },
    },
    "seed_oss": {"attention_bias": True},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "arcee": {},
    "nemotron": {},
    "glm4": {"attention_bias": True},
    "olmo2": {},
    "smollm3": {"layers": 4, "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": False},
    "granite": {},
    "granitemoe": {
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "embedding_multiplier": 3.0,
    },
    "granitemoehybrid": _SCANS,
    "granitemoehybrid:dense": _SCANS | {"num_local_experts": 0, "num_experts_per_tok": 0},
    "ernie4_5_moe": {"moe_intermediate_size": 256, "intermediate_size": 512},
    "hunyuan_v1_moe": {},
    "cohere2": {"layers": 4},
    "starcoder2": {"sliding_window": None},
    "phi": {"qk_layernorm": False},
    "stablelm": {"qk_layernorm": False, "use_qkv_bias": True},
    "stablelm_beside": {"qk_layernorm": False},
    "lfm2": {"layers": 4, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layers": 4, "moe_intermediate_size": 256},
    "gemma": {},
    "gemma3n_text": _ALTERNATED,
    "gemma3n_text:shared": _ALTERNATED | {"num_kv_shared_layers": 2},
    "gemma4_text": {
        "layers": 4,
        "hidden_size_per_layer_input": 32,
        "final_logit_softcapping": 5.0,
        "use_double_wide_mlp": True,
    },
    "gemma4_text:experts": {
        "layers": 4,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 256,
        "attention_k_eq_v": True,
    },
    "deepseek_v3": _LATENTS | {"n_group": 2, "topk_group": 1, "rope_parameters": _YARN},
    "deepseek_v2": _LATENTS | {"norm_topk_prob": False},
    "glm4_moe": {"moe_intermediate_size": 256, "routed_scaling_factor": 1.5},
}

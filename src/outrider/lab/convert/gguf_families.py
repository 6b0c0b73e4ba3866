"""The families of models that llama.cpp's converter writes, by the model type of their configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from outrider.lab.convert.gguf_family import (
    AS_IT_IS,
    PLUS_ONE,
    FileFamily,
    Parts,
    Rows,
    describe_nothing,
    describe_rope,
    describe_sigmoid,
    rope_of,
    rotated,
    whole,
)
from outrider.lab.convert.gguf_recurrent import (
    convolutions_unread,
    delta_by_keys,
    delta_by_turns,
    describe_convolutions,
    describe_delta,
    describe_mamba_2,
    describe_nemotron_h,
    describe_qwen35,
    describe_scan,
    falcon_parts,
    falcon_unread,
    nemotron_h_expert_parts,
    scan_parts,
    scans_alone,
)

# --- Windows, temperatures and multipliers of attention.


def _describe_temperature(writer: Any, config: Any) -> None:
    """Ministral's temperature of attention."""
    rope = rope_of(config)
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"] if rope.get("mscale") else 0.0)
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _describe_window(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)


def _describe_gemma(writer: Any, config: Any) -> None:
    _describe_window(writer, config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            getattr(writer, f"add_{name}")(getattr(config, name))


def _describe_stablelm(writer: Any, config: Any) -> None:
    writer.add_parallel_residual(config.use_parallel_residual)


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
    normal: Any = torch.distributions.Normal(0.0, 1.0)
    writer.add_activation_sparsity_scale(normal.icdf(torch.tensor(config.activation_sparsity_pattern)).tolist())


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
    """Layers that predict several tokens, behind those of the model, look back over a window."""
    behind = writer.kv_data[0]["mimo2.block_count"].value - config.num_hidden_layers
    windows = [kind == "sliding_attention" for kind in config.layer_types] + [True] * behind
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


# --- Experts.


def _describe_gpt_oss(writer: Any, config: Any) -> None:
    _describe_window(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _gpt_oss_parts(config: Any) -> Parts:
    """Experts whose projections lie the other way round in transformers, gates and values in turn."""

    def turned(experts: np.ndarray) -> np.ndarray:
        return experts.swapaxes(1, 2)

    def in_turn(which: int, rows: Rows) -> Rows:
        return lambda experts: rows(experts)[:, which::2]

    names = list(enumerate(("gate_proj", "up_proj")))
    return {
        "mlp.experts.gate_up_proj": [(f"mlp.experts.{name}", in_turn(one, turned), AS_IT_IS) for one, name in names],
        "mlp.experts.gate_up_proj_bias": [(f"mlp.experts.{name}", in_turn(one, whole), AS_IT_IS) for one, name in names],
        "mlp.experts.down_proj": [("mlp.experts.down_proj", turned, AS_IT_IS)],
    }


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


def _describe_minimax(writer: Any, config: Any) -> None:
    describe_sigmoid(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _describe_softmax(writer: Any, config: Any) -> None:
    import gguf

    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def _describe_ernie(writer: Any, config: Any) -> None:
    writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)


def _describe_hunyuan(writer: Any, config: Any) -> None:
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)


# --- Routers with a bias, and latent keys and values, as in DeepSeek-V3 and GLM-4.5.


_ROUTED = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
_LATENT = {"q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank"}
_GROUPS = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}


def _describe_latent(writer: Any, config: Any) -> None:
    """Write the widths of latent keys and values, which are one head of keys in files."""
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    describe_rope(writer, config, config.qk_rope_head_dim)
    if rope_of(config)["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope_of(config)["mscale_all_dim"])


def _latent_parts(config: Any) -> Parts:
    """Keys of all heads the other way round, and values."""

    def rows(which: slice) -> Rows:
        heads, latent = config.num_attention_heads, config.kv_lora_rank
        return lambda both: both.reshape(heads, -1, latent)[:, which]

    keys, values = rows(slice(config.qk_nope_head_dim)), rows(slice(config.qk_nope_head_dim, None))
    return {
        "self_attn.kv_b_proj": [
            ("self_attn.k_b_proj", lambda both: keys(both).swapaxes(1, 2), AS_IT_IS),
            ("self_attn.v_b_proj", values, AS_IT_IS),
        ]
    }


# --- The families.


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
_FALCON = {**_SCAN, "mamba_d_ssm": "ssm_inner_size"}
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
    **_SCAN_ALONE, **_ROUTED, "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
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
_EXAONE = {**_ROUTED, "num_shared_experts": "expert_shared_count"}
_WINDOWS = {"logit_scale": "logit_scale", "sliding_window": "sliding_window"}
_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_OF_LAYERS = {
    "num_key_value_heads": None, "intermediate_size": None, "final_logit_softcapping": "final_logit_softcapping",
    "top_k_experts": "expert_used_count",
}  # fmt: skip
_ALTERNATING = {
    name: name for name in ("altup_num_inputs", "altup_active_idx", "sliding_window", "final_logit_softcapping")
} | {"hidden_size_per_layer_input": "embedding_length_per_layer_input", "num_kv_shared_layers": "shared_kv_layers"}
_COMPRESSED: dict[str, Any] = {"heads": _describe_latent, "parts": _latent_parts}
_KEYS, _WIDTH = {"num_key_value_heads": None}, {"intermediate_size": None}
_PREDICTS: dict[str, Any] = {"predicted_norm": "nextn.shared_head_norm"}
#: By the model type of their configuration.
FAMILIES: dict[str, FileFamily] = {
    "llama": FileFamily("llama", parts=rotated),
    "mistral": FileFamily("llama", parts=rotated),
    "ministral3": FileFamily("mistral3", described=_describe_temperature, parts=rotated),
    "qwen2": FileFamily("qwen2"),
    "qwen3": FileFamily("qwen3"),
    "qwen3_moe": FileFamily("qwen3moe"),
    "phi3": FileFamily("phi3", described=_describe_window),
    "gpt_oss": FileFamily("gpt-oss", described=_describe_gpt_oss, parts=_gpt_oss_parts),
    "gemma2": FileFamily("gemma2", described=_describe_gemma, norms=PLUS_ONE),
    "gemma3_text": FileFamily("gemma3", described=_describe_gemma, norms=PLUS_ONE),
    "qwen3_5_text": FileFamily("qwen35", {}, describe_qwen35, delta_by_turns, PLUS_ONE, **_PREDICTS),
    "qwen3_5_moe_text": FileFamily("qwen35moe", _SHARED, describe_qwen35, delta_by_turns, PLUS_ONE, **_PREDICTS),
    "deepseek_v3": FileFamily(
        "deepseek2", {**_ROUTED, **_LATENT, **_GROUPS, **_KEYS}, describe_sigmoid, **_COMPRESSED, **_PREDICTS
    ),
    "glm4_moe": FileFamily("glm4moe", _ROUTED, describe_sigmoid, **_PREDICTS),
    "qwen3_next": FileFamily("qwen3next", _SHARED, describe_delta, delta_by_keys, PLUS_ONE, **_PREDICTS),
    "qwen2_moe": FileFamily("qwen2moe", _SHARED),
    "olmoe": FileFamily("olmoe"),
    "minimax_m2": FileFamily("minimax-m2", {}, _describe_minimax),
    "dots1": FileFamily("dots1", _ROUTED, describe_sigmoid),
    "exaone4": FileFamily("exaone4", {}, _describe_windows),
    "exaone_moe": FileFamily("exaone-moe", _EXAONE, _describe_exaone_experts),
    "nemotron_h": FileFamily("nemotron_h", _SCAN_ALONE, describe_nemotron_h, scans_alone, heads=describe_nothing),
    "mamba2": FileFamily("mamba2", _ONLY_SCAN, describe_mamba_2, scans_alone, heads=describe_nothing),
    "llama4_text": FileFamily("llama4", _LLAMA_4, parts=_llama_4_parts),
    "mimo_v2_flash": FileFamily("mimo2", {**_ROUTED, **_KEYS}, heads=_describe_mimo, predicted_norm="layer_output_norm"),
    "falcon_h1": FileFamily("falcon-h1", _FALCON, parts=falcon_parts, unread=falcon_unread),
    "seed_oss": FileFamily("seed_oss"),
    "ernie4_5": FileFamily("ernie4_5"),
    "hunyuan_v1_dense": FileFamily("hunyuan-dense"),
    "arcee": FileFamily("arcee", parts=rotated),
    "nemotron": FileFamily("nemotron", {"norm_eps": "layer_norm_eps"}, norms=PLUS_ONE),
    "glm4": FileFamily("glm4"),
    "olmo2": FileFamily("olmo2"),
    "smollm3": FileFamily("smollm3", parts=rotated),
    "granite": FileFamily("granite", _MULTIPLIERS, parts=rotated),
    "granitemoe": FileFamily("granitemoe", _MULTIPLIERS, parts=rotated),
    "granitemoehybrid": FileFamily("granitehybrid", _MULTIPLIERS | _SCAN, describe_scan, scan_parts),
    "ernie4_5_moe": FileFamily("ernie4_5-moe", _ERNIE, _describe_ernie),
    "hunyuan_v1_moe": FileFamily("hunyuan-moe", {"moe_topk": "expert_used_count"}, _describe_hunyuan),
    "cohere2": FileFamily("cohere2", _WINDOWS),
    "starcoder2": FileFamily("starcoder2"),
    "phi": FileFamily("phi2"),
    "stablelm": FileFamily("stablelm", {}, _describe_stablelm),
    "lfm2": FileFamily("lfm2", _WIDTH, describe_convolutions, unread=convolutions_unread),
    "lfm2_moe": FileFamily("lfm2moe", {**_WIDTH, "num_dense_layers": "leading_dense_block_count"}, describe_convolutions),
    "gemma": FileFamily("gemma", norms=PLUS_ONE),
    "gemma3n_text": FileFamily("gemma3n", _ALTERNATING, _describe_gemma_3n, _gemma_3n_parts),
    "gemma4_text": FileFamily("gemma4", _OF_LAYERS, _describe_gemma_4, _gemma_4_parts, heads=describe_nothing),
    "deepseek_v2": FileFamily("deepseek2", {**_ROUTED, **_LATENT, **_KEYS}, _describe_softmax, **_COMPRESSED),
}
#: Of Nemotron-H with experts, whose files have an architecture of their own.
_NEMOTRON_H_MOE = FileFamily(
    "nemotron_h_moe",
    _SCAN_AND_EXPERTS,
    describe_nemotron_h,
    nemotron_h_expert_parts,
    heads=describe_nothing,
)


def family_of(config: Any) -> FileFamily | None:
    """The family of a model. None where none is known."""
    if config.model_type == "nemotron_h" and "moe" in config.layers_block_type:
        return _NEMOTRON_H_MOE
    return FAMILIES.get(config.model_type)

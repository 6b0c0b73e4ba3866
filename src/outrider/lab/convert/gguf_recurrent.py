"""Layers with a running state in files of llama.cpp: gated delta rules, scans of Mamba-2, and short convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.lab.convert.gguf_family import (
    AS_IT_IS,
    RATE,
    Change,
    Part,
    Parts,
    Rows,
    describe_sigmoid,
    half,
    rope_of,
    rotated,
    whole,
)

# --- The gated delta rule of Qwen3.5, and of Qwen3-Next.


def describe_delta(writer: Any, config: Any) -> None:
    """Write the shape of a gated delta rule, and which layers have it."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(attention_interval(config))


def attention_interval(config: Any) -> int:
    """Every how many layers one attends, if that is how they are ordered; 0 for another order."""
    kinds = config.layer_types
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    wanted = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(len(kinds))]
    return every if kinds == wanted else 0


def describe_qwen35(writer: Any, config: Any) -> None:
    describe_delta(writer, config)
    writer.add_rope_dimension_sections([*rope_of(config).get("mrope_section", (11, 11, 10)), 0])


def squeezed(taps: np.ndarray) -> np.ndarray:
    """The taps of a convolution [channels, taps], or its bias."""
    return taps[:, 0] if taps.ndim == 3 else taps


def delta_by_turns(config: Any) -> Parts:
    """The first heads of values of all keys, then the second ones."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    before = 2 * keys * config.linear_key_head_dim

    def turned(rows: np.ndarray, size: int = size) -> np.ndarray:
        return rows.reshape(keys, -1, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    def behind(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([rows[:before], turned(rows[before:])])

    def single(rows: np.ndarray) -> np.ndarray:
        return turned(rows, 1)

    found: dict[str, Part] = {
        "in_proj_qkv": ("in_proj_qkv", behind, AS_IT_IS),
        "in_proj_z": ("in_proj_z", turned, AS_IT_IS),
        "in_proj_a": ("in_proj_a", single, AS_IT_IS),
        "in_proj_b": ("in_proj_b", single, AS_IT_IS),
        "A_log": ("A_log", single, RATE),
        "dt_bias": ("dt_proj", single, AS_IT_IS),
        "conv1d": ("conv1d", lambda taps: behind(squeezed(taps)), AS_IT_IS),
        "norm": ("norm", whole, AS_IT_IS),
        "out_proj": ("out_proj", lambda rows: turned(rows.T).T, AS_IT_IS),
    }
    return {f"linear_attn.{name}": [(f"linear_attn.{part[0]}", *part[1:])] for name, part in found.items()}


def delta_by_keys(config: Any) -> Parts:
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


# --- The scan of Mamba-2, alone and beside attention, and short convolutions.


def describe_convolutions(writer: Any, config: Any) -> None:
    kinds = config.layer_types
    writer.add_feed_forward_length(_adjusted_width(config))
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        describe_sigmoid(writer, config)


def _adjusted_width(config: Any) -> int:
    """The width of a feed-forward, as transformers makes it."""
    width, times = int(config.intermediate_size), getattr(config, "block_ffn_dim_multiplier", None)
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return width
    width = int(2 * width / 3)
    return width if times is None else -(-int(times * width) // config.block_multiple_of) * int(config.block_multiple_of)


def convolutions_unread(config: Any) -> tuple[str, ...]:
    """Files have the width of feed-forwards once it is adjusted."""
    return ("intermediate_size", *(name for name in type(config).__dataclass_fields__ if name.startswith("block_")))


def describe_scan(writer: Any, config: Any) -> None:
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


def scans_alone(config: Any) -> Parts:
    return _scans("mixer", config.n_groups)


def scan_parts(config: Any) -> Parts:
    mlp = "mlp.shared_experts" if config.num_local_experts else "mlp"
    shared = [(f"{mlp}.{name}_proj", half(which, 0), AS_IT_IS) for which, name in enumerate(("gate", "up"))]
    return {
        **rotated(config),
        **_scans("mamba", config.mamba_n_groups),
        "shared_mlp.input_linear": shared,
        "shared_mlp.output_linear": [(f"{mlp}.down_proj", whole, AS_IT_IS)],
    }


def describe_nemotron_h(writer: Any, config: Any) -> None:
    kinds = config.layers_block_type
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    sizes = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    writer.add_feed_forward_length([sizes.get(kind, 0) for kind in kinds])
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_rope_dimension_count(config.head_dim)


def nemotron_h_expert_parts(config: Any) -> Parts:
    """Experts are renamed when they become one tensor."""
    names = {f"mixer.experts.{name}_proj": f"mlp.experts.{name}_proj" for name in ("up", "down")}
    names["mixer.gate.e_score_correction_bias"] = "mlp.gate.e_score_correction"
    return {**scans_alone(config), **{ours: [(theirs, whole, AS_IT_IS)] for ours, theirs in names.items()}}


def describe_mamba_2(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_inner_size(config.num_heads * config.head_dim)


def falcon_parts(config: Any) -> Parts:
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
    return {**scans, **{name: [(name, whole, times(factor))] for name, factor in factors.items()}}


def falcon_unread(config: Any) -> tuple[str, ...]:
    """What multiplies numbers is in the weights, and no gate stands before a norm that is not there."""
    multipliers = tuple(name for name in type(config).__dataclass_fields__ if "multiplier" in name)
    return multipliers if config.mamba_rms_norm else (*multipliers, "mamba_norm_before_gate")

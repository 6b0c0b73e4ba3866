"""What the values of a GGUF file of Gemma become in transformers' configuration, beside what all families have."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from outrider.loading.gguf.families import KEY_HEADS
from outrider.loading.gguf.rotary import rope_parameters, rotated_part
from outrider.loading.gguf.values import Values

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def gemma(values: Values, largest: int) -> dict[str, Any]:
    """Returns what Gemma 2 and 3 share. Scores are scaled by the width of heads, but in the largest model, which has
    `largest` layers, by the hidden size for each head; files do not say it."""
    heads, hidden = values.count("attention.head_count"), values.count("embedding_length")
    scale = values.count("attention.key_length", hidden // heads)
    return {
        "query_pre_attn_scalar": hidden // heads if values.count("block_count") == largest else scale,
        "sliding_window": values.count("attention.sliding_window"),
    }


def gemma_2(values: Values) -> dict[str, Any]:
    return gemma(values, 46) | {name: values.number(name) for name in CAPS}


def gemma_3(values: Values) -> dict[str, Any]:
    if values.get("attention.sliding_window_pattern") not in (None, 6):
        raise values.refuse(f"attention.sliding_window_pattern={values.get('attention.sliding_window_pattern')!r}")
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10_000.0)}
    caps = {name: values.number(name) if values.get(name) else None for name in CAPS}
    return (
        gemma(values, 62)
        | caps
        | {
            "rope_parameters": {"full_attention": rope_parameters(values, 1_000_000.0), "sliding_attention": local},
        }
    )


def gemma_4(values: Values) -> dict[str, Any]:
    """Layers with a window have smaller heads, and rotate all of them; the others rotate what the factors of their
    frequencies leave. The last layers may read keys and values of others, and tokens may have embeddings for each layer."""
    layers, windows = values.num_layers, values.get("attention.sliding_window_pattern")
    if not isinstance(windows, list) or len(windows) < layers:
        raise values.refuse(f"attention.sliding_window_pattern={windows!r}")
    windows = windows[:layers]
    width, forwards = values.count("attention.key_length"), values.each_layer("feed_forward_length")
    heads = {bool(window): count for window, count in zip(windows, values.each_layer(KEY_HEADS), strict=True)}
    full = windows.index(False) if False in windows else 0
    rotated, theta = rotated_part(values, width // 2), values.number("rope.freq_base", 1_000_000.0)
    narrow = values.count("attention.key_length_swa", width)
    if values.count("rope.dimension_count_swa", narrow) != narrow:
        raise values.refuse("rotary positions of a part of each head of layers with a window")
    return {
        "head_dim": narrow,
        "global_head_dim": width,
        "num_key_value_heads": heads.get(True, max(heads.values())),
        "num_global_key_value_heads": heads.get(False),
        "attention_k_eq_v": not values.has(f"blk.{full}.attn_v.weight"),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": values.count("attention.sliding_window"),
        "num_kv_shared_layers": values.natural("attention.shared_kv_layers"),
        "intermediate_size": min(forwards),
        "use_double_wide_mlp": len(set(forwards)) > 1,
        "hidden_size_per_layer_input": values.natural("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": values.rows_of("per_layer_token_embd.weight", 0),
        "final_logit_softcapping": values.number(CAPS[1], 30.0),  # as llama.cpp where nothing is said
        "enable_moe_block": values.natural("expert_count") > 0,
        "num_experts": values.natural("expert_count") or None,
        "top_k_experts": values.natural("expert_used_count") or None,
        "moe_intermediate_size": values.natural("expert_feed_forward_length") or None,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def gemma_3n(values: Values) -> dict[str, Any]:
    """Layers with a window rotate otherwise, and the last ones may read keys and values of others. Files say how many
    standard deviations a gate of some layers has to exceed, and configurations of which part of all gates that is true."""
    windows, layers = values.get("attention.sliding_window_pattern"), values.num_layers
    kinds = [(layer + 1) % 5 != 0 for layer in range(layers)] if windows is None else windows
    deviations = values.get("activation_sparsity_scale")
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise values.refuse(f"attention.sliding_window_pattern={windows!r}")
    if not isinstance(deviations, list) or any(not isinstance(one, float) for one in deviations):
        raise values.refuse(f"activation_sparsity_scale={deviations!r}")
    theta = {"full": values.number("rope.freq_base", 1_000_000.0), "sliding": values.number("rope.freq_base_swa", 10_000.0)}
    return {
        "intermediate_size": values.each_layer("feed_forward_length"),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in kinds[:layers]],
        "sliding_window": values.count("attention.sliding_window"),
        "num_kv_shared_layers": values.natural("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": values.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": values.rows_of("per_layer_token_embd.weight", 1),
        "altup_num_inputs": values.count("altup.num_inputs"),
        "altup_active_idx": values.natural("altup.active_idx"),
        "laurel_rank": values.rows_of("blk.0.laurel_l.weight", 1),
        "activation_sparsity_pattern": [round(NormalDist().cdf(one), 5) for one in deviations[:layers]],
        "final_logit_softcapping": values.number(CAPS[1], 30.0),  # as llama.cpp where nothing is said
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": base} for kind, base in theta.items()
        },
    }

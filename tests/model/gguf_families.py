"""Checkpoints of the families whose files llama.cpp writes in its own order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.model import checkpoints

#: What groups of experts are called in a file.
GROUPS = {"expert_group_count": 2, "expert_group_used_count": 1}


def as_ling(source: Path, path: Path) -> str:
    """A file of GLM-4.5 as one of Ling 2.0: queries, keys and values are one tensor, and some names are others."""
    import gguf

    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "bailingmoe2")
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            kinds = (field.types[0], field.types[-1] if len(field.types) > 1 else None)
            writer.add_key_value(field.name.replace("glm4moe.", "bailingmoe2."), field.contents(), *kinds)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    renamed = {
        ".attn_q.": ".attn_qkv.",
        ".post_attention_norm.": ".ffn_norm.",
        ".nextn.shared_head_norm.": ".layer_output_norm.",
    }
    for name, tensor in tensors.items():
        if ".attn_k." in name or ".attn_v." in name:
            continue
        parts = [tensors[name.replace(".attn_q.", f".attn_{part}.")].data for part in "qkv" if ".attn_q." in name]
        own = next((name.replace(theirs, ours) for theirs, ours in renamed.items() if theirs in name), name)
        writer.add_tensor(own, np.concatenate(parts) if parts else tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


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
    "lfm2:adjusted": {"layers": 4, "intermediate_size": 600, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.1},
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

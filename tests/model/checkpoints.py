"""Small random checkpoints of every family, written by transformers, with weights wide enough that a wrong mask matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.model.families import FAMILIES as DESCRIBED_TYPES

VOCAB_SIZE = 61
WINDOW = 6

_NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    **_NO_ENDS,
}
#: Queries grow at every eighth position.
TEMPERED: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 20.0, "original_max_position_embeddings": 8, "mscale": 1.0,
    "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.4,
}  # fmt: skip


def _config(family: str) -> Any:
    import transformers as t

    if family == "llama":
        return t.LlamaConfig(**_SHAPE)
    if family == "mistral":
        return t.MistralConfig(**_SHAPE, sliding_window=WINDOW)
    if family == "ministral3":
        return t.Ministral3Config(**_SHAPE, head_dim=8, rope_parameters=TEMPERED)
    if family == "qwen3":
        return t.Qwen3Config(**_SHAPE, head_dim=8)
    if family == "gemma2":
        return t.Gemma2Config(
            **_SHAPE, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=5.0
        )
    if family == "gpt2":
        return t.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=4, n_head=4, n_positions=160, **_NO_ENDS)
    name, values = {**_MORE, **_OUTSIDE, **_RUNNING, **_IN_FILES}[family]
    return getattr(t, name)(**{**_SHAPE, **values})


#: Layers of both kinds, as the larger models of these families mix them.
_MIXED = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
#: Texts longer than this use the long factors of the "longrope" checkpoint.
LONG_AFTER = 28
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.5, 6.0, 9.0],
    "original_max_position_embeddings": LONG_AFTER,
    "factor": 160 / LONG_AFTER,
}
_PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED, "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,  # not read by its attention
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "longrope": ("Phi3Config", {"original_max_position_embeddings": LONG_AFTER, "rope_parameters": _LONGROPE}),
    "gpt_neox": ("GPTNeoXConfig", {"rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.5}}),
    "gpt_neox_behind": ("GPTNeoXConfig", {"use_parallel_residual": False, "hidden_act": "gelu_fast"}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "olmo": ("OlmoConfig", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW}),
    "phi": ("PhiConfig", {"qk_layernorm": True}),
    "stablelm": ("StableLmConfig", {"qk_layernorm": True}),
    "stablelm_beside": ("StableLmConfig", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "cohere": ("CohereConfig", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", {"sliding_window": WINDOW, "layer_types": _MIXED}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.4, "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "glm": ("GlmConfig", {"head_dim": 8}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 1, 0, 1]}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("FalconConfig", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "olmo2": ("Olmo2Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "sliding_window": WINDOW}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True,
            "mlp_only_layers": [2],
        },
    ),
    "qwen3_moe_shares": (
        "Qwen3MoeConfig",
        {"num_experts": 40, "num_experts_per_tok": 8, "moe_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssConfig", {**_EXPERTS, "head_dim": 8, "sliding_window": WINDOW}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
            "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
        },
    ),
}  # fmt: skip

#: Families without a description for the kernels, with parts that others lack: routers and experts of several forms, gates,
#: several activations, bounded logits, complex rotary factors.
_OUTSIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("ArceeConfig", {}),
    "apertus": ("ApertusConfig", {}),
    "vaultgemma": ("VaultGemmaConfig", {"head_dim": 8, "sliding_window": WINDOW, "final_logit_softcapping": 5.0}),
    "granitemoe": ("GraniteMoeConfig", _EXPERTS),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            "head_dim": 8, "sliding_window": WINDOW, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1,
            "moe_intermediate_size": 24, "global_attn_every_n_layers": 2, "num_shared_experts": 1,
        },
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {
            "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
        },
    ),
}  # fmt: skip
OUTSIDE = ("deepseek_v3", *_OUTSIDE)

_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"], "head_dim": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_SCAN: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_groups": 2}
#: Families with layers that keep a running state.
_RUNNING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", _DELTA),
    "olmo_hybrid": ("OlmoHybridConfig", {**_DELTA, "linear_num_key_heads": 4}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
            "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_SCAN, **_EXPERTS, "mamba_expand": 2, "shared_intermediate_size": 48,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
        },
    ),
    "bamba": ("BambaConfig", {**_SCAN, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1Config", {**_SCAN, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "head_dim": 8, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 4,
            "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
        },
    ),
    "mamba2": ("Mamba2Config", {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8}),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 8}),
    "jamba": (
        "JambaConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        {
            **_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "num_dense_layers": 1,
        },
    ),
    "lfm3": ("Lfm3Config", {}),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "layer_group_size": 2, "head_dim": 8,
        },
    ),
}  # fmt: skip
RUNNING = tuple(_RUNNING)

_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
}  # fmt: skip
#: Families of GGUF files. Most of those with experts are published with layers which predict several tokens.
_IN_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": (
        "Glm4MoeConfig", {**_ROUTED, "head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
            "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1, "head_dim": 8,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3n_text": (
        "Gemma3nTextConfig",
        {
            "head_dim": 8, "sliding_window": WINDOW, "num_kv_shared_layers": 0, "laurel_rank": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE, "activation_sparsity_pattern": [0.95] * 4,
        },
    ),
    # The last two layers read keys and values of the first two, and look as far.
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    # As published: no layer reads another's keys and values, and layers without a window have one head for both.
    "gemma4_unified_text": (
        "Gemma4UnifiedTextConfig",
        {
            "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "minimax_m2": ("MiniMaxM2Config", {**_EXPERTS, "head_dim": 8, "intermediate_size": 16, "rotary_dim": 4}),
    "dots1": ("Dots1Config", {**_ROUTED, "head_dim": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    "exaone4": ("Exaone4Config", {"head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 4}),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            "head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 4, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_shared_experts": 1, "routed_scaling_factor": 1.5,
        },
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 8}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 8, "tie_word_embeddings": False}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {"head_dim": 8}),
    "nemotron": ("NemotronConfig", {"head_dim": 8}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig", {**_ROUTED, "head_dim": 8, "v_head_dim": 6, "sliding_window": WINDOW},
    ),
}  # fmt: skip

FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gpt2", *_MORE, "gemma4_text")
#: Whose layers all, or some, look back over a window only.
WINDOWED = ("mistral", "gemma2", "qwen2", "gemma3", "phi3", "starcoder2", "mixtral", "gpt_oss")


def is_described(family: str) -> bool:
    """Whether the kernels know this family."""
    return model_type(family) in DESCRIBED_TYPES


def model_type(family: str) -> str:
    """The model type of these checkpoints."""
    return str(_config(family).model_type)


def save(family: str, folder: Path, *, seed: int = 0, layers: int | None = None, **changes: Any) -> str:
    """Write a checkpoint of `family`, with other values for fields of its configuration; returns its path."""
    from transformers import AutoModelForCausalLM

    config = _config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    model = AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
        for parameter in model.parameters():  # norms and biases that differ from nothing
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    model.save_pretrained(folder)
    return str(folder)


@torch.inference_mode()
def greedy_by_transformers(path: str, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    """What the stock model writes, computing everything anew for every token."""
    from transformers import AutoModelForCausalLM

    from outrider.loading import hf_modules

    attention = "eager" if "gemma2" in path or "gpt_oss" in path else None  # sdpa drops soft-capping and sinks
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation=attention).eval()
    hf_modules.use_plain_experts(model)
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return tuple(text[len(prompt) :])

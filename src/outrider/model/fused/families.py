"""The families whose forward pass is the kernels' own.

A description makes a model type a candidate. Whether the model at hand is what the description says is found as for every
backend: its pass is compared with the stock model's.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.layout import NormKind
from outrider.model.fused.family import Family, FamilyExperts, FamilySource
from outrider.model.fused.mixers import joined_delta, parted_delta, scan, short_convolution

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

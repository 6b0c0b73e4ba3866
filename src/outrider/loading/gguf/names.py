"""The names of tensors in GGUF files, and those of transformers for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: The names of tensors of a layer, as llama.cpp and as transformers have them.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: What is called otherwise where norms stand behind the parts of a layer, too.
WITH_POST_NORMS = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: What is called otherwise where some projections are one.
FUSED = {**LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
#: The projections of all experts of a layer, as parts of the tensors that transformers has (`experts.py`).
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.gate_up_proj[0]",
    "ffn_up_exps": "mlp.experts.gate_up_proj[1]",
    "ffn_down_exps": "mlp.experts.down_proj[0]",
}
#: With a router and experts in place of an ordinary feed-forward.
WITH_EXPERTS = {
    **{name: stock for name, stock in LAYER.items() if not stock.startswith("mlp.")},
    **EXPERTS,
    "ffn_gate_inp": "mlp.gate",
}
#: Of gpt-oss, whose layers all have experts, and attention sinks.
WITH_SINKS = {
    **{name: LAYER[name] for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")},
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "attn_sinks": "self_attn.sinks",
    **EXPERTS,
}
#: An expert beside them that every token has.
WITH_SHARED_EXPERT = {
    **WITH_EXPERTS,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
#: Of a gated delta rule in place of attention, and the norm behind either.
DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
#: Of GLM-4, whose norms behind attention and feed-forward have names of their own.
WITH_NORMS_BEHIND = {
    **LAYER,
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
#: Experts of the form of DeepSeek: behind some layers without any, with a bias of the router and shared ones.
WITH_ROUTED_EXPERTS = {
    **LAYER,
    **EXPERTS,
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
#: Of Ling 2.0, whose queries, keys and values are one tensor in files.
LING: dict[str, str | tuple[str, ...]] = {
    **WITH_ROUTED_EXPERTS,
    "attn_qkv": tuple(f"self_attn.{name}_proj" for name in "qkv"),
}
#: Of MiMo-V2, some of whose layers have attention sinks.
MIMO = {**WITH_ROUTED_EXPERTS, "attn_sinks": "self_attn.sinks"}
#: Of attention to what was compressed. What unfolds keys and values is one tensor in older files, and two in newer ones.
WITH_LATENTS = {
    **WITH_ROUTED_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b.weight": "self_attn.kv_b_proj.weight[0]",
    "attn_v_b.weight": "self_attn.kv_b_proj.weight[1]",
}
#: Of OLMo 2, which has norms behind the parts of a layer alone.
WITH_POST_NORMS_ALONE = {
    **{name: stock for name, stock in LAYER.items() if name not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Of StarCoder 2 and Phi-2, whose feed-forward has no gates.
WITHOUT_GATES = {
    **{name: stock for name, stock in LAYER.items() if not name.startswith("ffn_")},
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
PHI_2 = {
    **WITHOUT_GATES,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "output_norm": "model.final_layernorm",
}
#: Of the experts of Granite.
WITH_SPARSE_EXPERTS = {
    **{name: stock.replace("mlp.", "block_sparse_moe.") for name, stock in WITH_EXPERTS.items()},
    "ffn_gate_inp": "block_sparse_moe.router",
}
#: Of the experts of ERNIE 4.5 and of Hunyuan.
ERNIE = {**WITH_ROUTED_EXPERTS, "exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
HUNYUAN_WITHOUT_EXPERTS = {**LAYER, **_HUNYUAN}
HUNYUAN = {
    **WITH_EXPERTS,
    **_HUNYUAN,
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{name}_shexp": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
}
#: Of MiniMax-M2, whose router has its bias beside it.
MINIMAX = {**WITH_EXPERTS, "exp_probs_b.bias": "mlp.e_score_correction_bias"}
#: Where the norm before the feed-forward is named as one behind attention.
WITH_NORM_BEHIND_ATTENTION = {**LAYER, "post_attention_norm": "post_attention_layernorm"}
#: Of Gemma 4, whose tokens have an embedding for each layer, and some of whose models have experts beside a feed-forward.
GEMMA_4 = {
    **WITH_POST_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    **{name: stock.removeprefix("mlp.") for name, stock in EXPERTS.items()},
    "ffn_down_exps.scale": "router.per_expert_scale",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_PLACES = (0, 1, 2)
#: Of Gemma 3n, which computes several texts of hidden states at a time, and has their projections as one tensor in files.
GEMMA_3N: dict[str, str | tuple[str, ...]] = {
    **WITH_POST_NORMS,
    **{name: GEMMA_4[name] for name in ("inp_gate", "proj", "post_norm")},
    **{name: stock for name, stock in GEMMA_4.items() if name.startswith("per_layer_")},
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_proj": tuple(f"model.altup_projections.{place}" for place in _PLACES),
    "altup_unembd_proj": tuple(f"model.altup_unembed_projections.{place}" for place in _PLACES),
}
#: Of the scan of Mamba-2.
SCAN = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}
#: Of Falcon-H1, whose layers attend and scan side by side. The name of one norm has no ending.
FALCON = {
    **{name: stock.replace("mlp.", "feed_forward.") for name, stock in LAYER.items()},
    **SCAN,
    "ffn_norm": "pre_ff_layernorm.weight",
    "output_norm": "model.final_layernorm",
}
_SCAN_ALONE = {"attn_norm": "norm", **{name: stock.replace("mamba.", "mixer.") for name, stock in SCAN.items()}}
#: Of Mamba-2, whose layers are scans alone.
MAMBA_2 = {**_SCAN_ALONE, "blk": "backbone.layers", "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
#: Of Nemotron-H, each of whose layers is one thing: a scan, attention, a feed-forward, or experts without gates.
NEMOTRON_H = {
    **_SCAN_ALONE,
    **{name: LAYER[name].replace("self_attn.", "mixer.") for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.up_proj[0]",
    "ffn_down_exps": "mixer.experts.down_proj[0]",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
}
#: Of Llama 4, with experts in some layers.
LLAMA_4 = {
    **{name: stock.replace("mlp.", "feed_forward.") for name, stock in {**LAYER, **EXPERTS}.items()},
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{name}_shexp": f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
#: Of Granite 4, whose feed-forward of all tokens stands beside experts, or alone.
WITH_SCANS = {
    **WITH_SPARSE_EXPERTS,
    **SCAN,
    **{f"ffn_gate{kind}.weight": "shared_mlp.input_linear.weight[0]" for kind in ("", "_shexp")},
    **{f"ffn_up{kind}.weight": "shared_mlp.input_linear.weight[1]" for kind in ("", "_shexp")},
    **{f"ffn_down{kind}": "shared_mlp.output_linear" for kind in ("", "_shexp")},
}
#: Of LFM2, with short convolutions, and with experts in some layers.
CONVOLUTIONS = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **{name: stock.replace("mlp.", "feed_forward.") for name, stock in EXPERTS.items()},
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
}


def _of_t5(part: str, layer: int, module: str, inner: Mapping[str, str]) -> dict[str, str]:
    """A part of a layer of T5, with its norm."""
    return {f"{part}_norm": f"layer.{layer}.layer_norm"} | {
        f"{part}_{name}": f"layer.{layer}.{module}.{stock}" for name, stock in inner.items()
    }


def t5(forward: Mapping[str, str]) -> dict[str, str]:
    """Of T5, whose decoder attends to what its encoder has read, for the names of the matrices of its feed-forward."""
    attention = {name: name for name in "qkvo"}
    itself = _of_t5("attn", 0, "SelfAttention", {**attention, "rel_b": "relative_attention_bias"})
    encoder = itself | _of_t5("ffn", 1, "DenseReluDense", forward)
    decoder = itself | _of_t5("ffn", 2, "DenseReluDense", forward) | _of_t5("cross_attn", 1, "EncDecAttention", attention)
    outside = {"blk": "{}.block", "output_norm": "{}.final_layer_norm"}
    return {"token_embd": "shared"} | {
        f"{stack[:3]}.{name}": stock.format(stack)
        for stack, layer in (("encoder", encoder), ("decoder", decoder))
        for name, stock in {**layer, **outside}.items()
    }


T5 = t5({"up": "wi", "down": "wo"})
GATED_T5 = t5({"gate": "wi_0", "up": "wi_1", "down": "wo"})
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: Gates and values of experts that are one tensor in some files.
_FUSED_EXPERTS = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
#: How the names end of what transformers has as a parameter of another module, without ".weight".
_BARE = (".sinks", "layer_scalar", "correct_output_scale", "]")
#: The names of tensors of a layer, as llama.cpp and as transformers have them, and those outside of layers that differ.
#: A tensor of a file may be several ones of transformers. A name with its ending stands for one with its own. "blk" stands
#: for all layers, where transformers does not call them `model.layers`. In a model with an encoder, names of its encoder
#: begin with "enc.", and those of its decoder with "dec.".
LayerNames = Mapping[str, str | tuple[str, ...]]
_IN_A_LAYER = re.compile(r"(enc\.|dec\.|)blk\.(\d+)\.(.*)", re.DOTALL)


def stock_names(layer: LayerNames, name: str) -> list[str]:
    """transformers' names for what a tensor of a file holds; none where it is not known."""
    place, _, kind = name.rpartition(".")
    if (own := layer.get(place, _MODEL.get(place))) is not None:
        return [f"{one}.{kind}" for one in _each(own)]
    number, part = layer_part(name)
    if number is None:
        return []
    stack = part[:4] if part.startswith(("enc.", "dec.")) else ""
    prefix = f"{layer.get(f'{stack}blk', 'model.layers')}.{number}."
    if part in layer:
        return [f"{prefix}{stock}" for stock in _each(layer[part])]
    part = part.rpartition(".")[0]
    found = [stock for own in _FUSED_EXPERTS.get(part, (part,)) for stock in _each(layer.get(own, ()))]
    return [_with_kind(prefix, stock, kind) for stock in found]


def layer_part(name: str) -> tuple[int | None, str]:
    """The number of the layer that a tensor of a file belongs to, and its name there; None where it is of no layer."""
    found = _IN_A_LAYER.fullmatch(name)
    return (None, name) if found is None else (int(found[2]), found[1] + found[3])


def _each(stock: str | tuple[str, ...]) -> tuple[str, ...]:
    return (stock,) if isinstance(stock, str) else stock


def _with_kind(prefix: str, stock: str, kind: str) -> str:
    if not stock.endswith(_BARE):
        return f"{prefix}{stock}.{kind}"
    return prefix + (stock if kind == "weight" else stock.replace("[", f"_{kind}["))

"""The names of tensors in GGUF files, and those of transformers for them."""

from __future__ import annotations

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
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: What transformers has as a parameter of another module, without ".weight".
_BARE = ("self_attn.sinks", *EXPERTS.values())


def stock_name(layer: dict[str, str], name: str) -> str | None:
    """transformers' name for a tensor of a file. None where it has none.

    Args:
        layer: The names of tensors of a layer.
        name: llama.cpp's.
    """
    place, _, kind = name.rpartition(".")
    if place in _MODEL:
        return f"{_MODEL[place]}.{kind}"
    blk, _, rest = place.partition(".")
    number, _, part = rest.partition(".")
    if blk != "blk" or not number.isdecimal() or part not in layer:
        return None
    stock = f"model.layers.{int(number)}.{layer[part]}"
    if layer[part] not in _BARE:
        return f"{stock}.{kind}"
    return stock if kind == "weight" else stock.replace("[", f"_{kind}[")

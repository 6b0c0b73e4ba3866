"""A tiny Llama checkpoint as a GGUF file, with a vocabulary of its own making."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

#: Ids 0 to 2 are what a llama.cpp vocabulary of this kind must have; the end of text may be drawn like any token.
_SPECIAL = ("<unk>", "<s>", "</s>")
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3


def write_gguf(checkpoint: str, path: Path) -> str:
    """Write a checkpoint of `save_tiny_llama` as `path`, float32 throughout; returns the path.

    Args:
        checkpoint: Its folder.
        path: The file.
    """
    import gguf
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _write_vocabulary(writer, config.vocab_size)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        rows = weight.float().numpy()
        for part, count in heads.items():
            rows = _paired(rows, count) if part in name else rows
        writer.add_tensor(_renamed(name), np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _write_vocabulary(writer: Any, size: int) -> None:
    words = [*_SPECIAL, *(chr(ord("A") + i) for i in range(size - len(_SPECIAL)))]
    writer.add_tokenizer_model("llama")
    writer.add_vocab_size(size)
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([_UNKNOWN, _CONTROL, _CONTROL, *[_NORMAL] * (size - len(_SPECIAL))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _paired(rows: Any, num_heads: int) -> Any:
    """Rows [num_heads * size, hidden] with the halves of each head interleaved: llama.cpp rotates neighbours."""
    return rows.reshape(num_heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _renamed(name: str) -> str:
    """A parameter's name in GGUF."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem = name.removesuffix(".weight")
    if stem in outer:
        return f"{outer[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{inner[part]}.weight"

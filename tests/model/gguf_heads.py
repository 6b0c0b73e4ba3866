"""Heads of EAGLE-3 and DFlash, and assistants of Gemma 4, as llama.cpp's converter writes them in GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from outrider.heads.formats.published import read_head_config
from outrider.lab.convert.gguf import frequency_factors

#: llama.cpp's names for parts of the layer, and the names of SafeAILab.
_LAYER = {
    "attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_BLOCK_LAYER = {**_LAYER, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MODEL = {"fc": "fc", "output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens"}


def write_head(
    folder: str, path: Path, layers: list[int], *, key: str = "target_layers", stored: str = "F32", **more: Any
) -> str:
    """Write a head of SafeAILab's layout as a GGUF file; returns its path.

    Args:
        folder: Of the head.
        path: The file.
        layers: The target's layers whose inputs it reads.
        key: Where they stand.
        stored: The type of its matrices.
        more: Other values of the architecture.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    tensors = load_file(Path(folder) / "model.safetensors")
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_context_length(128)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(1)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_array(f"eagle3.{key}", layers)
    writer.add_uint32("eagle3.target_hidden_size", config.get("target_hidden_size") or config["hidden_size"])
    for name, value in more.items():
        writer.add_bool(f"eagle3.{name}", value)
    for name, factors in frequency_factors(read_head_config(folder).layer).items():
        writer.add_tensor(name, factors)
    for name, theirs in [*_MODEL.items(), *((f"blk.0.{ours}", f"midlayer.{own}") for ours, own in _LAYER.items())]:
        if (weight := tensors.get(f"{theirs}.weight")) is not None:
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-1])
            if heads is not None:  # dimension i comes beside i + head_dim / 2
                weight = weight.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
            _add(writer, f"{name}.weight", weight, stored if weight.dim() > 1 else "F32")
    if "d2t" in tensors:
        tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        writer.add_tensor("d2t", tokens.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def write_block_head(folder: str, path: Path, *, stored: str = "F32", architecture: str = "dflash", **more: Any) -> str:
    """Write a head of DFlash or DSpark as a GGUF file; returns its path.

    Args:
        folder: Of the head, in a layout that names inputs of layers or outputs of them.
        path: The file.
        stored: The type of its matrices.
        architecture: What it says that it is.
        more: Other values of the architecture; None leaves one out.
    """
    mapping = json.loads((Path(folder) / "config.json").read_text())
    nested, sizes = mapping.get("dflash_config", mapping), mapping.get("transformer_layer_config", mapping)
    outputs = nested.get("target_layer_ids")
    values: dict[str, Any] = {
        "context_length": 128, "embedding_length": sizes["hidden_size"], "block_count": sizes["num_hidden_layers"],
        "feed_forward_length": sizes["intermediate_size"], "attention.head_count": sizes["num_attention_heads"],
        "attention.head_count_kv": sizes["num_key_value_heads"], "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"], "rope.freq_base": sizes["rope_theta"],
        "attention.layer_norm_rms_epsilon": sizes["rms_norm_eps"], "vocab_size": sizes["vocab_size"],
        "block_size": nested.get("block_size", mapping.get("block_size")),
        "target_layers": mapping["aux_hidden_state_layer_ids"] if outputs is None else [i + 1 for i in outputs],
        "mask_token_id": nested.get("mask_token_id", mapping.get("mask_token_id")), **more,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, architecture)
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in values.items():
        if value is not None:
            key = "tokenizer.ggml.mask_token_id" if name == "mask_token_id" else f"dflash.{name}"
            adds[type(value)](key, value)
    theirs = {
        "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output",
        "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
    }  # fmt: skip
    own = {name: place for place, name in _BLOCK_LAYER.items()}
    for name, weight in load_file(Path(folder) / "model.safetensors").items():
        place, kind = name.rsplit(".", 1) if "." in name else (name, "")
        if name == "d2t":
            tokens = (weight + torch.arange(len(weight))).numpy()
            writer.add_tensor(name, tokens, raw_dtype=gguf.GGMLQuantizationType.I64)
        elif name != "t2d":
            _, number, part = [*place.split(".", 2), "", ""][:3]
            new = theirs.get(place) or f"blk.{number}.{own[part]}"
            _add(writer, f"{new}.{kind}", weight, stored if weight.dim() > 1 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


#: llama.cpp's names for parts of the layers of assistants, and transformers'.
_ASSISTANT_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm", "layer_output_scale": "layer_scalar",
}  # fmt: skip


def write_assistant(folder: str, path: Path, *, stored: str = "F32") -> str:
    """Write an assistant of Gemma 4 as a GGUF file, without clusters of its vocabulary; returns its path."""
    mapping = json.loads((Path(folder) / "config.json").read_text())
    sizes = mapping["text_config"]
    full, sliding = (sizes["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    narrow, count = sizes["head_dim"], sizes["num_hidden_layers"]
    wide = sizes["per_layer_config"][str(sizes["layer_types"].index("full_attention"))]["head_dim"]
    values: dict[str, Any] = {
        "context_length": sizes["max_position_embeddings"], "embedding_length": sizes["hidden_size"],
        "block_count": count, "feed_forward_length": sizes["intermediate_size"],
        "attention.head_count": sizes["num_attention_heads"], "attention.head_count_kv": sizes["num_key_value_heads"],
        "attention.key_length": wide, "attention.value_length": wide, "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow, "attention.layer_norm_rms_epsilon": sizes["rms_norm_eps"],
        "attention.sliding_window": sizes["sliding_window"], "attention.shared_kv_layers": count,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in sizes["layer_types"]],
        "embedding_length_per_layer_input": 0, "rope.dimension_count": wide, "rope.dimension_count_swa": narrow,
        "rope.freq_base": float(full["rope_theta"]), "rope.freq_base_swa": float(sliding["rope_theta"]),
        "embedding_length_out": mapping["backbone_hidden_size"], "nextn_predict_layers": count,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    adds = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in values.items():
        adds[type(value)](f"gemma4-assistant.{name}", value)
    turning = int(wide * full["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (wide // 2 - turning), np.float32))
    theirs = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "pre_projection": "nextn.pre_projection",
        "post_projection": "nextn.post_projection",
    }  # fmt: skip
    parts = {f"model.layers.{i}.{own}": f"blk.{i}.{ours}" for i in range(count) for ours, own in _ASSISTANT_LAYER.items()}
    for name, weight in load_file(Path(folder) / "model.safetensors").items():
        new = (theirs | parts).get(name.removesuffix(".weight"))
        if new is not None:
            _add(writer, f"{new}.weight", weight, stored if weight.dim() > 1 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _add(writer: Any, name: str, weight: torch.Tensor, stored: str) -> None:
    kind = gguf.GGMLQuantizationType[stored]
    rows = np.ascontiguousarray(weight.float().numpy())
    writer.add_tensor(name, rows if stored == "F32" else gguf.quants.quantize(rows, kind), raw_dtype=kind)

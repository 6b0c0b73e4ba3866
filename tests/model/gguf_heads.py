"""Heads of EAGLE-3 and DFlash as GGUF files, written with the gguf package as llama.cpp's converter writes them."""

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


def _add(writer: Any, name: str, weight: torch.Tensor, stored: str) -> None:
    kind = gguf.GGMLQuantizationType[stored]
    rows = np.ascontiguousarray(weight.float().numpy())
    writer.add_tensor(name, rows if stored == "F32" else gguf.quants.quantize(rows, kind), raw_dtype=kind)

"""Writes a checkpoint as a GGUF file, for engines that read no other format.

The file has the same weights, but its vocabulary consists of placeholders. Prompts are given as token ids, and a
pre-tokenizer that llama.cpp does not know by name could not be written anyway. So the strings that such an engine returns
mean nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.model.loading.exclusive import exclusive_transformers

#: The types in which weights may be stored, with their names in the gguf package.
STORED_AS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
#: The model types whose layers GGUF can describe completely. The value says whether llama.cpp rotates neighbours in them.
_ROTATES_NEIGHBOURS = {"llama": True, "qwen2": False, "qwen3": False}


def write_gguf(checkpoint: str, path: Path, dtype: str = "float32", *, eos_token_id: int | None = None) -> str:
    """Write a checkpoint to `path`, and return the path. This needs memory for several copies of the weights.

    Args:
        checkpoint: Folder or hub id of a Llama, Qwen2 or Qwen3.
        path: The file. It appears when it is complete.
        dtype: The type of the matrices: "float32", "bfloat16", "float16", "int8" (Q8_0) or "int4" (Q4_0). The last
            two have a scale for 32 weights. Vectors stay float32.
        eos_token_id: The token that ends a text. With None no token ends a text.

    Raises:
        InvalidParameterError: The dtype is unknown.
        UnsupportedModelError: GGUF cannot describe what this model computes.
    """
    import gguf
    from transformers import AutoModelForCausalLM

    if dtype not in STORED_AS:
        raise InvalidParameterError("dtype", dtype, "not a type of weights in GGUF", f"Use one of {', '.join(STORED_AS)}.")
    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    _check(checkpoint, model.config)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(unfinished, model.config.model_type)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "float32" else f"MOSTLY_{STORED_AS[dtype]}"])
    _write_shape(writer, model.config)
    _write_vocabulary(writer, model.config.vocab_size, eos_token_id)
    _write_tensors(writer, model, _storing(checkpoint, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)
    return str(path)


def _check(checkpoint: str, config: Any) -> None:
    known = ", ".join(_ROTATES_NEIGHBOURS)
    if config.model_type not in _ROTATES_NEIGHBOURS:
        raise UnsupportedModelError(checkpoint, f"no GGUF is written for {config.model_type}", f"Use one of {known}.")
    special = {
        "rotary positions of another kind than the default": config.rope_parameters["rope_type"] != "default",
        "another activation than SiLU": config.hidden_act != "silu",
        "a sliding window": bool(getattr(config, "use_sliding_window", False)),
    }
    for name in (name for name, found in special.items() if found):
        raise UnsupportedModelError(checkpoint, f"it has {name}", "No GGUF is written for such a model.")


def _write_shape(writer: Any, config: Any) -> None:
    head_dim = _head_dim(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _write_vocabulary(writer: Any, size: int, eos_token_id: int | None) -> None:
    import gguf

    # This is the only kind of vocabulary without special tokens. With the others, token 2 or 11 would end every text.
    writer.add_tokenizer_model("rwkv")
    writer.add_vocab_size(size)
    writer.add_token_list([f"<{token}>" for token in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_add_bos_token(False)
    if eos_token_id is not None:
        writer.add_eos_token_id(eos_token_id)


def _write_tensors(writer: Any, model: Any, store: Callable[[Any], tuple[Any, Any]]) -> None:
    import gguf

    config = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = weight.float().numpy()
        for part, count in heads.items():
            if part in name and _ROTATES_NEIGHBOURS[config.model_type]:
                rows = _paired(rows, count)
        stored, kind = store(np.ascontiguousarray(rows))
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stored, raw_dtype=kind)


def _storing(checkpoint: str, dtype: str) -> Callable[[Any], tuple[Any, Any]]:
    """A function that stores an array of float32: a matrix as `dtype`, and a vector as it is."""
    import gguf

    kind = gguf.GGMLQuantizationType[STORED_AS[dtype]]
    block = gguf.GGML_QUANT_SIZES[kind][0]

    def store(rows: Any) -> tuple[Any, Any]:
        if rows.ndim == 1:
            return rows, gguf.GGMLQuantizationType.F32
        if rows.shape[-1] % block:
            problem = f"rows of {rows.shape[-1]} weights do not divide into blocks of {block}"
            raise UnsupportedModelError(checkpoint, problem, "Store it as float32 or bfloat16.")
        return gguf.quants.quantize(rows, kind), kind

    return store


def _paired(rows: Any, num_heads: int) -> Any:
    """Rows [num_heads * head_dim, ...] with the halves of each head interleaved, since llama.cpp rotates neighbours."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

"""GGUF files of any size whose blocks are drawn, one tensor after another, so that no model is ever in full precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.lab.convert.gguf import is_matrix
from outrider.lab.convert.gguf_families import family_of
from outrider.lab.convert.gguf_vocabulary import placeholders
from tests.model.gguf_files import blocks


def q4_k_m(config: Any) -> Callable[[str], str]:
    """The types that llama.cpp's Q4_K_M gives to matrices, by their names.

    The head, and values and projections back of some layers, are Q6_K.
    """
    count = config.num_hidden_layers
    more = {i for i in range(count) if i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2}

    def kind(name: str) -> str:
        if name.startswith("blk."):
            wide = int(name.split(".")[1]) in more and name.split(".")[2] in ("attn_v", "ffn_down", "ffn_down_exps")
        else:
            wide = name == "output.weight"
        return "Q6_K" if wide else "Q4_K"

    return kind


def write_drawn(path: Path, config: Any, kind: Callable[[str], str], seed: int = 0) -> int:
    """Write a file without a vocabulary.

    Args:
        path: The file.
        config: transformers' configuration of the model.
        kind: The type of a matrix by its name.
        seed: Of its blocks.

    Returns:
        Its size in bytes.
    """
    import gguf
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    family = family_of(config)
    assert family is not None
    writer = gguf.GGUFWriter(path, family.architecture)
    family.describe(writer, config)
    placeholders()(writer, config.vocab_size)
    tensors = [(each.name, _shape(each, state), kind(each.name)) for each in family.tensors(config, state)]
    for name, shape, each in tensors:
        ggml = gguf.GGMLQuantizationType[each if is_matrix(name) else "F32"]
        size, nbytes = gguf.GGML_QUANT_SIZES[ggml]
        count = int(np.prod(shape)) // size * nbytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), count, raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for turn, (name, shape, each) in enumerate(tensors):
        drawn = blocks(each, int(np.prod(shape[:-1])), shape[-1], seed + turn) if is_matrix(name) else _floats(name, shape)
        writer.write_tensor_data(drawn)
    writer.close()
    return path.stat().st_size


def _floats(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What is in no blocks: routers that choose, rates below 0, and otherwise ones."""
    if ".ffn_gate_inp." in name:
        return np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
    return np.full(shape, -1 if name.endswith("ssm_a") else 1, np.float32)


def _shape(tensor: Any, state: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """That of a tensor of the file, of which no number is looked at."""
    stock = state[tensor.stock]
    found: tuple[int, ...] = tensor.arranged(np.broadcast_to(np.float32(0), stock.shape)).shape
    return found

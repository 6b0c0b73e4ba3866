"""GGUF files as llama.cpp's tools write them: names and layouts by the gguf package, blocks of every type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.formats.gguf import GGUF_TYPES

#: The types that the gguf package can round to. Blocks of others are drawn.
ROUNDED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_ARCHITECTURES |= {"gemma2": "gemma2", "gemma3_text": "gemma3"}


def blocks(kind: str, rows: int, cols: int, seed: int) -> np.ndarray:
    """Random blocks of a type, whose scales are finite and small."""
    known, random = GGUF_TYPES[kind], np.random.default_rng(seed)
    found = random.integers(0, 256, (rows * cols // known.inputs, known.nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        found[:, 0] = random.integers(118, 124, len(found))
        return found.reshape(rows, -1)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "IQ4_NL": (0,)}[kind]
    for place in places:
        size = {"Q2_K": 0.02, "IQ4_NL": 0.002, "Q6_K": 0.0001}.get(kind, 0.0006)
        scale = (size * random.uniform(0.5, 1, len(found))).astype(np.float16)
        found[:, place : place + 2] = scale[:, None].view(np.uint8)
    return found.reshape(rows, -1)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads as llama.cpp's converter writes them for Llama (`LlamaModel.permute`)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def deinterleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class Written:
    """A file, and the weights that it stands for by the names of transformers.

    Args:
        checkpoint: A folder of a Llama, Qwen2 or Qwen3.
        path: The file.
        kinds: The types of matrices, in turn.
        metadata: More values, or others.
        vocabulary: Writes the vocabulary.
    """

    def __init__(
        self, checkpoint: str, path: Path, kinds: tuple[str, ...] = ("Q4_0",), vocabulary: Any = None, **metadata: Any
    ) -> None:
        import gguf
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        config = model.config
        self.path, self.model, self.values = path, model, {}
        name = _ARCHITECTURES[config.model_type]
        writer = gguf.GGUFWriter(path, name)
        self._describe(writer, config)
        for key, value in metadata.items():
            writer.add_float32(f"{name}.{key}", value) if isinstance(value, float) else writer.add_string(
                f"{name}.{key}", value
            )
        if vocabulary is not None:
            vocabulary(writer)
        arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
        names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight" or not config.tie_word_embeddings}
        for turn, (stock, weight) in enumerate(state.items()):
            theirs = names.get_name(stock, try_suffixes=(".weight", ".bias"))
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            count = next((n for part, n in heads.items() if f"{part}." in stock), None) if name == "llama" else None
            kind = kinds[turn % len(kinds)] if weight.dim() == 2 else "F32"
            offset = 1 if name.startswith("gemma") and "norm" in stock else 0
            self._add(writer, theirs, stock, weight.numpy() + offset, kind, count, turn)
            self.values[stock] -= offset
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _describe(self, writer: Any, config: Any) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
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
        rope = config.rope_parameters
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
        if config.model_type.startswith("gemma"):
            writer.add_sliding_window(config.sliding_window)
            if config.attn_logit_softcapping:
                writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            if config.final_logit_softcapping:
                writer.add_final_logit_softcapping(config.final_logit_softcapping)

    def _add(
        self, writer: Any, theirs: str, stock: str, weight: np.ndarray, kind: str, heads: int | None, seed: int
    ) -> None:
        import gguf

        ggml = gguf.GGMLQuantizationType[kind]
        if heads is not None:
            weight = interleaved(weight, heads)
        if kind in ROUNDED:
            data = gguf.quants.quantize(np.ascontiguousarray(weight), ggml)
        else:
            data = blocks(kind, *weight.shape, seed)
        writer.add_tensor(theirs, data, raw_dtype=ggml)
        value = gguf.quants.dequantize(data, ggml).reshape(weight.shape)
        value = deinterleaved(value, heads) if heads is not None else value
        self.values[stock] = torch.from_numpy(np.array(value, dtype=np.float32))

    def plain(self, folder: Path) -> str:
        """The same model as a checkpoint in full precision."""
        state: dict[str, Tensor] = self.model.state_dict()
        for name, value in self.values.items():
            state[name].copy_(value)
        self.model.save_pretrained(folder)
        return str(folder)

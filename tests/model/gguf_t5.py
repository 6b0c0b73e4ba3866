"""GGUF files of T5: the names and values of llama.cpp's converter, which `outrider convert` does not write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.model import encoders

#: Models by what sets them apart: the first T5, and T5 1.1, whose head has weights of its own.
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def save(kind: str, folder: Path, **changes: Any) -> str:
    """A checkpoint whose rows divide into blocks, those of its biases of distances among them. Its head has weights of its
    own, which transformers ties in each new model, or is scaled, so that its weights are wide."""
    from transformers import AutoModelForSeq2SeqLM

    sizes = {"d_model": 128, "d_ff": 96, "num_heads": 32, "relative_attention_max_distance": 128}
    source = encoders.save(folder, **{**sizes, **SHAPES[kind], **changes})
    model = AutoModelForSeq2SeqLM.from_pretrained(source)
    head = torch.randn(model.shared.weight.shape, generator=torch.Generator().manual_seed(2)).double()
    if SHAPES[kind].get("tie_word_embeddings", True):
        model.shared.weight.data.copy_(2 * head)
    else:
        model.lm_head.weight = torch.nn.Parameter(0.3 * head)
    model.save_pretrained(source)
    return source


def write(
    checkpoint: str,
    path: Path,
    kind: str = "F32",
    *,
    vocabulary: Callable[[Any], None] | None = None,
    missing: tuple[str, ...] = (),
    more: dict[str, tuple[int, ...]] | None = None,
    **values: int | None,
) -> str:
    """Write a file whose matrices have this type, and return its path.

    Args:
        missing: Tensors that are left out.
        more: Tensors of zeros beside those of the model.
        values: Other values of the architecture, by their names without dots; None for none.
    """
    import gguf
    from transformers import AutoModelForSeq2SeqLM

    model: Any = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=torch.float32)
    config, writer = model.config, gguf.GGUFWriter(path, "t5")
    found = {
        "context_length": 512,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "block_count": config.num_layers,
        "decoder_block_count": config.num_decoder_layers,
        "head_count": config.num_heads,
        "key_length": config.d_kv,
        "value_length": config.d_kv,
        "layer_norm_eps": config.layer_norm_epsilon,
        "relative_attn_buckets_count": config.relative_attention_num_buckets,
        "layer_norm_rms_eps": config.layer_norm_epsilon,
        "decoder_start_token_id": config.decoder_start_token_id,
    } | values
    for name, value in found.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    if vocabulary is not None:
        vocabulary(writer)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, max(config.num_layers, config.num_decoder_layers))
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    if model.lm_head.weight is model.shared.weight:
        copies.add("lm_head.weight")
    for stock, weight in model.state_dict().items():
        name = known.get_name(stock, (".weight",))
        if stock not in copies and name not in missing:
            stored = gguf.GGMLQuantizationType[kind if weight.dim() > 1 else "F32"]
            writer.add_tensor(name, gguf.quants.quantize(weight.numpy(), stored), raw_dtype=stored)
    for name, shape in (more or {}).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def plain(checkpoint: str, folder: Path, kind: str) -> str:
    """The same model with the numbers that matrices of this type stand for."""
    import gguf
    from transformers import AutoModelForSeq2SeqLM

    model: Any = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=torch.float32)
    stored = gguf.GGMLQuantizationType[kind]
    for weight in model.parameters():
        if weight.dim() > 1:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.detach().numpy(), stored), stored)
            weight.data.copy_(torch.from_numpy(rounded.copy()))
    model.save_pretrained(folder)
    return str(folder)


def charsmap(changes: dict[str, str]) -> bytes:
    """SentencePiece's table of what characters become: a trie whose nodes have 256 units each, and texts behind it."""
    keys = {key.encode(): text.encode() for key, text in changes.items()}
    nodes = sorted({key[:end] for key in keys for end in range(len(key) + 1)})
    begins = {node: 256 * (place + 1) for place, node in enumerate(nodes)}
    units, texts = np.zeros(256 * (len(nodes) + 1), np.uint32), b""
    for node, begin in begins.items():
        place = begins[node[:-1]] + node[-1] if node else 0
        units[place] = (place ^ begin) << 10 | (node in keys) << 8 | (node[-1] if node else 0)
        if node in keys:
            units[begin] = 2**31 | len(texts)
            texts += keys[node] + b"\0"
    return len(units.tobytes()).to_bytes(4, "little") + units.tobytes() + texts

"""Writes a checkpoint as a GGUF file, for engines that read no other format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from outrider.convert.gguf_description import check_describable, describe, frequency_factors
from outrider.convert.gguf_file import write_file
from outrider.convert.gguf_layout import FAMILIES, file_tensors, is_matrix
from outrider.convert.gguf_vocabulary import WriteVocabulary, placeholders
from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.model.loading.exclusive import exclusive_transformers

#: The types in which weights may be stored, with their names in the gguf package.
STORED_AS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}


def write_gguf(checkpoint: str, path: Path, dtype: str = "float32", vocabulary: WriteVocabulary | None = None) -> str:
    """Write a checkpoint to `path`, and return the path. This needs memory for several copies of the weights.

    Args:
        checkpoint: Folder or hub id of a Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Phi-3, gpt-oss, Gemma 2 or Gemma 3.
        path: The file. It appears when it is complete.
        dtype: The type of the matrices: "float32", "bfloat16", "float16", "int8" (Q8_0) or "int4" (Q4_0). The last
            two have a scale for 32 weights. Vectors stay float32.
        vocabulary: Writes the vocabulary. None for placeholders, of which none ends a text.

    Raises:
        InvalidParameterError: The dtype is unknown.
        StorageError: The file cannot be written.
        UnsupportedModelError: GGUF cannot describe what this model computes.
    """
    import gguf
    from transformers import AutoModelForCausalLM

    if dtype not in STORED_AS:
        raise InvalidParameterError("dtype", dtype, "not a type of weights in GGUF", f"Use one of {', '.join(STORED_AS)}.")
    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    check_describable(checkpoint, model.config)
    writer = gguf.GGUFWriter(None, FAMILIES[model.config.model_type].architecture)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "float32" else f"MOSTLY_{STORED_AS[dtype]}"])
    describe(writer, model.config)
    (vocabulary or placeholders())(writer, model.config.vocab_size)
    _write_tensors(writer, model, _storing(checkpoint, dtype))
    write_file(writer, path)
    return str(path)


def _write_tensors(writer: Any, model: Any, store: Callable[[Any], tuple[Any, Any]]) -> None:
    import gguf

    for name, factors in frequency_factors(model.config).items():
        writer.add_tensor(name, factors)
    state = model.state_dict()
    for tensor in file_tensors(model.config, state):
        rows = np.ascontiguousarray(tensor.rows(state[tensor.stock]))
        stored, kind = store(rows) if is_matrix(tensor.name) else (rows, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(tensor.name, stored, raw_dtype=kind)


def _storing(checkpoint: str, dtype: str) -> Callable[[Any], tuple[Any, Any]]:
    """A function that stores a matrix of float32 as `dtype`."""
    import gguf

    kind = gguf.GGMLQuantizationType[STORED_AS[dtype]]
    block = gguf.GGML_QUANT_SIZES[kind][0]

    def store(rows: Any) -> tuple[Any, Any]:
        if rows.shape[-1] % block:
            problem = f"rows of {rows.shape[-1]} weights do not divide into blocks of {block}"
            raise UnsupportedModelError(checkpoint, problem, "Store it as float32 or bfloat16.")
        return gguf.quants.quantize(rows, kind), kind

    return store

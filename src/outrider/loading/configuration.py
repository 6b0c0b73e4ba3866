"""Configurations of checkpoints: they are read and checked before any weight is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from outrider.config import ModelConfig, QuantizationName
from outrider.errors import ContradictionError, InvalidParameterError, ModelLoadError, UnsupportedModelError
from outrider.kernels.library import kernel_library
from outrider.loading import hf_modules
from outrider.loading.exclusive import attempt
from outrider.loading.file_limits import check_file_limit
from outrider.loading.fit import Needs, needs, stored_tensors
from outrider.loading.gguf.architecture import read_config
from outrider.loading.gguf.header import GgufFile, is_gguf, may_be_narrowed, mixes_rows, read_gguf, rows_may_be_rounded
from outrider.loading.loaded_model import LONGEST_TEXT
from outrider.loading.quantised import declared, layout_of
from outrider.loading.sources import check_files, source_options

logger = logging.getLogger(__name__)

#: How blocks of a file may be rounded again: those of Q5_0 and Q8_0 become Q4_0, numbers of 4 bits in groups of 32.
FILE_ROUNDING: QuantizationName = "int4-g32"


def read_context(config: ModelConfig) -> int:
    """The longest sequence of a checkpoint, in tokens. Its configuration alone is read."""
    if is_gguf(config.model):
        return longest_text(config, read_file_config(config, read_gguf(config.model)))
    source = source_options(config)
    return longest_text(config, read_hf_config(config, source))


def read_needs(config: ModelConfig) -> Needs | None:
    """Returns what a checkpoint takes of memory; None where that is not known. Its configuration and headers alone are
    read."""
    if is_gguf(config.model):
        file = read_gguf(config.model)
        return needs(config, read_file_config(config, file), file.nbytes)
    source = source_options(config)
    return needs(config, read_hf_config(config, source))


def read_hf_config(config: ModelConfig, source: dict[str, Any]) -> Any:
    """The configuration of a folder or hub id, checked before transformers makes anything from it."""
    from transformers import AutoConfig

    check_files(config.model)
    found = attempt(config.model, "its configuration cannot be read", AutoConfig.from_pretrained, config.model, **source)
    part = None if declared(found) else hf_modules.language_model(found)
    found = found if part is None else part
    check_decoder(config.model, found)
    _check_writes_text(config.model, found)
    _check_depth(config.model, found)
    check_rounding(config, found)
    layout = layout_of(config.model, found)  # refuses what is not loaded here
    check_rounded_rows(config, brought=layout is not None and layout.stays_rounded)
    return found


def read_file_config(config: ModelConfig, file: GgufFile) -> Any:
    """The configuration that a file describes. It is quantised already, so it is not rounded again, but for blocks of 5 and
    8 bits that may become blocks of 4."""
    found = read_config(file)
    if config.quantization not in (None, FILE_ROUNDING):
        raise UnsupportedModelError(
            config.model,
            f"its weights are in blocks already, and quantization={config.quantization!r} would round them again",
            f"Leave quantization out, or use {FILE_ROUNDING}, which makes Q4_0 of Q5_0 and Q8_0.",
        )
    if config.quantization is not None and not may_be_narrowed(file):
        problem = f"quantization={config.quantization!r} makes Q4_0 of Q5_0 and Q8_0, and no matrix of it has these types"
        raise UnsupportedModelError(config.model, problem, "Leave quantization out.")
    check_rounded_rows(config, brought=rows_may_be_rounded(file))
    return found


def longest_text(config: ModelConfig, hf_config: Any) -> int:
    """The checkpoint's context, or less where the caller asks or where rotary factors begin to change with every token."""
    text_config = hf_modules.decoder_config(hf_config)
    written = getattr(text_config, "max_position_embeddings", None)
    context = LONGEST_TEXT if written is None else written
    if not isinstance(context, int) or context < 1:
        problem = f"its configuration says max_position_embeddings={context!r}"
        raise ModelLoadError(config.model, problem, "Correct config.json: a context has 1 token or more.")
    fixed = hf_modules.fixed_rope_context(text_config)
    if fixed is not None and fixed < context:
        logger.warning("%s: context limited to %d tokens, where its rotary factors begin to change", config.model, fixed)
        context = fixed
    if config.max_model_len is not None and config.max_model_len > context:
        raise InvalidParameterError(
            "max_model_len",
            config.max_model_len,
            f"the context of {config.model} is {context}",
            "Lower it or leave it out.",
        )
    return config.max_model_len or int(context)


def check_decoder(name: str, hf_config: Any) -> None:
    """Raise UnsupportedModelError for a model whose encoder reads no text."""
    if hf_modules.has_encoder(hf_config) and not hf_modules.reads_text(hf_config):
        kind = getattr(hf_config, "model_type", type(hf_config).__name__)
        problem = f"it is an encoder-decoder of type {kind!r}, whose encoder reads no text"
        raise UnsupportedModelError(
            name, problem, "Use a causal decoder, or a model like T5 or BART that reads and writes text."
        )


def _check_writes_text(name: str, hf_config: Any) -> None:
    """Raise UnsupportedModelError for a checkpoint of a type of which transformers makes no causal language model."""
    kind = getattr(hf_config, "model_type", type(hf_config).__name__)
    if kind in hf_modules.ASSISTANTS:
        problem = f"it is an assistant of type {kind!r}, which drafts for a target and writes no text alone"
        raise UnsupportedModelError(name, problem, "Give its target as the model, and this folder as draft_model.")
    if hf_modules.has_encoder(hf_config) or hf_modules.is_causal(hf_config):
        return
    if any(hasattr(hf_config, f"{sense}_config") for sense in ("vision", "audio")) and hasattr(hf_config, "text_config"):
        problem = f"it is a multimodal model of type {kind!r}, and of these only some are loaded here, for text alone"
        raise UnsupportedModelError(name, problem, "Give its language model in a folder of its own, or Gemma 3.")
    problem = f"it is of type {kind!r}, which is no causal language model"
    raise UnsupportedModelError(name, problem, "Use a causal language model, like one that is called ...ForCausalLM.")


def check_rounding(config: ModelConfig, hf_config: Any) -> None:
    """Raise UnsupportedModelError where weights that are quantised already would be rounded again."""
    given = declared(hf_config)
    if config.quantization is None or given is None:
        return
    method = given.get("quant_method")
    raise UnsupportedModelError(
        config.model,
        f"its weights are quantised already ({method}), and quantization={config.quantization!r} would round them again",
        "Leave quantization out, or give the original checkpoint.",
    )


def check_rounded_rows(config: ModelConfig, *, brought: bool) -> None:
    """Raise ContradictionError where rows are to be rounded, and would meet no rounded weights. `brought` says whether the
    checkpoint brings such weights."""
    if not config.asks_for_rounded_rows or config.quantization is not None or brought:
        return
    raise ContradictionError(
        "activations",
        config.activations,
        f"only products with rounded weights take rounded activations, quantization is None, and {config.model} brings no "
        "weights of 8 bits or less",
        'Use quantization="int8" or "int4" with it, or leave it out.',
    )


def has_rounded_weights(config: ModelConfig) -> bool:
    """Tells whether weights of a checkpoint are rounded at load, or were in its files. Its configuration alone is read."""
    if is_gguf(config.model):
        return rows_may_be_rounded(read_gguf(config.model))
    if config.quantization is not None:
        return True
    plain = config.replace(activations=None)
    layout = layout_of(config.model, read_hf_config(plain, source_options(plain)))
    return layout is not None and layout.stays_rounded


def rounds_rows(config: ModelConfig) -> bool:
    """Tells whether rows of a checkpoint are rounded to 8 bits on a CPU: where the caller asks for it, and unasked where a
    file with blocks is computed by our kernels, as llama.cpp computes it. Its configuration alone is read."""
    if config.activations is not None:
        return config.asks_for_rounded_rows
    return is_gguf(config.model) and usually_rounds_rows(read_gguf(config.model))


def usually_rounds_rows(file: GgufFile) -> bool:
    """Tells whether rows are rounded that meet the blocks of a file, unless the caller says otherwise."""
    return rows_may_be_rounded(file) and not mixes_rows(file) and kernel_library() is not None


def _check_depth(name: str, hf_config: Any) -> None:
    """Refuse a number of layers that no files can hold, before transformers makes so many."""
    layers = getattr(hf_modules.decoder_config(hf_config), "num_hidden_layers", 1)
    if not isinstance(layers, int) or layers < 1:
        problem = f"its configuration says num_hidden_layers={layers!r}"
        raise ModelLoadError(name, problem, "Correct config.json: a decoder has 1 layer or more.")
    most = len(stored_tensors(Path(name)))  # a layer has one tensor at least
    if layers > most > 0:
        problem = f"its configuration says num_hidden_layers={layers}, and its files hold no more than {most}"
        raise ModelLoadError(name, problem, "Correct config.json, or download the checkpoint again.")
    check_file_limit(name, "layers", layers)

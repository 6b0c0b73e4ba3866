"""The format of llama.cpp's DFlash heads: one GGUF file with llama.cpp's names, and the target's embeddings.

`target_layers` name the layers whose *inputs* are read, one more than z-lab's ids of the same layers, and `block_size`
counts the last token of the text too. The mask token stands among the values of the tokenizer. Norms are stored as they
are. Rows see their block both ways unless `attention.causal` is true. For layers with a window llama.cpp and z-lab take
different values where it is left out, so it is needed there.
"""

from __future__ import annotations

from typing import Any

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.heads.block_config import BlockHeadConfig, BlockReach
from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.folder import HeadTensor
from outrider.heads.formats.gguf_tensors import (
    ORIGINAL,
    GgufFormat,
    read_draft_vocab_size,
    read_head_tensors,
    read_target_layers,
    read_vocab_size,
)
from outrider.heads.formats.layer import FULL, SLIDING, read_layers
from outrider.model.loading.gguf.architecture import Architecture, read_shape
from outrider.model.loading.gguf.header import read_gguf
from outrider.model.loading.gguf.names import LAYER
from outrider.model.loading.gguf.values import AGAIN, Values

ARCHITECTURE = "dflash"
_WINDOW, _PATTERN, _CAUSAL = "attention.sliding_window", "attention.sliding_window_pattern", "attention.causal"
#: Its layers are those of Qwen3, and are written as such.
_LAYERS = Architecture("Qwen3Config", knows=(_WINDOW, _CAUSAL))
_MASK = "tokenizer.ggml.mask_token_id"
#: What DFlash 2 and DSpark add.
_FOREIGN = ("selector_rank", "conv_kernel_size", "hyper_connection_count", "sample_from_anchor")
_OUTSIDE = {
    "token_embd.": "embed_tokens.",
    "enc.output_norm.": "hidden_norm.",
    "output_norm.": "norm.",
    "output.": "lm_head.",
}


def read(path: str) -> BlockHeadConfig:
    """The head that a file describes.

    Raises:
        ModelLoadError: The file is corrupt, a value is missing, or is not what it has to be.
        UnsupportedModelError: It holds a head that computes something else.
    """
    values = Values(read_gguf(path))
    for name in _FOREIGN:
        if values.get(name):
            raise UnsupportedModelError(path, f"it has {ARCHITECTURE}.{name}, which is not computed", ORIGINAL)
    shape = read_shape(values, _LAYERS)
    reaches = _reaches(values, shape["num_hidden_layers"])
    layers = read_layers(path, shape | _windows(reaches) | {"vocab_size": read_vocab_size(values)}, "qwen3")
    size, mask = values.count("block_size"), values.file.metadata.get(_MASK)
    if size < 2:
        raise ModelLoadError(path, f"its {ARCHITECTURE}.block_size is {size}, and one row drafts nothing", AGAIN)
    if type(mask) is not int or not 0 <= mask < layers.vocab_size:
        raise ModelLoadError(path, f"its {_MASK} is {mask!r}, and no token of {layers.vocab_size}", AGAIN)
    return BlockHeadConfig(
        method="dflash",
        layer=layers,
        target_hidden_size=values.count("target_hidden_size", layers.hidden_size),
        vocab_size=layers.vocab_size,
        draft_vocab_size=read_draft_vocab_size(values, layers.vocab_size),
        aux_layers=read_target_layers(values, ("target_layers",)),
        block_size=size,
        mask_token_id=mask,
        reaches=reaches,
    )


def read_tensors(path: str) -> dict[str, HeadTensor]:
    """The tensors of a file by llama.cpp's names.

    Raises:
        ModelLoadError: The file is corrupt, a tensor holds NaN or infinity, or d2t is of another type.
    """
    return read_head_tensors(read_gguf(path))


def prefixes(config: FeatureHeadConfig) -> dict[str, str]:
    """Names of tensors in files, and here."""
    layers = range(config.layer.num_hidden_layers)
    return _OUTSIDE | {f"blk.{i}.{name}.": f"layers.{i}.{own}." for i in layers for name, own in LAYER.items()}


def _reaches(values: Values, num_layers: int) -> tuple[BlockReach, ...]:
    """What rows see, by layer."""
    causal, path = values.get(_CAUSAL), values.file.path
    if causal is not None and not isinstance(causal, bool):
        raise ModelLoadError(path, f"its {ARCHITECTURE}.{_CAUSAL} is {causal!r}, and neither true nor false", AGAIN)
    if not values.get(_WINDOW):
        return (BlockReach(None, bool(causal)),) * num_layers
    window, kinds = values.count(_WINDOW), values.get(_PATTERN)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(type(kind) is not bool for kind in kinds):
        problem = f"its {ARCHITECTURE}.{_PATTERN} is {kinds!r}, and does not say which of {num_layers} layers have a window"
        raise ModelLoadError(path, problem, AGAIN)
    if causal is None and any(kinds):
        problem = f"it has layers with a window and no {ARCHITECTURE}.{_CAUSAL}, and engines take different values then"
        raise ModelLoadError(path, problem, ORIGINAL)
    return tuple(BlockReach(window if kind else None, bool(causal)) for kind in kinds)


def _windows(reaches: tuple[BlockReach, ...]) -> dict[str, Any]:
    """The windows as transformers' configuration has them."""
    windows = [reach.window for reach in reaches]
    if not any(windows):
        return {}
    kinds = [SLIDING if window else FULL for window in windows]
    return {"layer_types": kinds, "sliding_window": max(filter(None, windows)), "use_sliding_window": True}


GGUF_DFLASH = GgufFormat(ARCHITECTURE, read, read_tensors, prefixes)

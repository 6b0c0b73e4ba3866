"""The format of llama.cpp's EAGLE-3 heads: one GGUF file, with llama.cpp's names and an absolute d2t.

`target_layers` (`extract_layers` in older files) name the layers whose inputs are read, as files of SafeAILab do. Rows of
queries and keys are interleaved for neighbours that turn together, and are put back here. The residual is the feature
before its norm, unless `norm_before_residual` is true, and the next token reads what the layer left before the norm of the
output layer.
"""

from __future__ import annotations

from typing import Any

from outrider.errors import ModelLoadError, UnsupportedModelError
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
from outrider.heads.formats.layer import read_layer
from outrider.model.loading.gguf.architecture import ARCHITECTURES, read_shape, row_order
from outrider.model.loading.gguf.header import GgufFile, read_gguf
from outrider.model.loading.gguf.names import LAYER
from outrider.model.loading.gguf.rotary import FREQUENCY_FACTORS
from outrider.model.loading.gguf.values import AGAIN, Values

#: Names of tensors in files, and here.
PREFIXES = {
    "token_embd.": "embed_tokens.",
    "output_norm.": "norm.",
    "output.": "lm_head.",
    "blk.0.attn_norm_2.": "layer.hidden_norm.",
    **{f"blk.0.{name}.": f"layer.{own}." for name, own in LAYER.items()},
}
ARCHITECTURE = "eagle3"
#: Its layer is one of Llama, and is written as one.
_LAYER = ARCHITECTURES["llama"]
#: Names of the list of the target's layers; the first is written.
LAYERS = ("target_layers", "extract_layers")
#: Flags of forks that llama.cpp does not know.
_FOREIGN = ("fc_norm", "norm_before_fc", "norm_output")


def read(path: str) -> FeatureHeadConfig:
    """The head that a file describes.

    Raises:
        ModelLoadError: The file is corrupt, a value is missing, or is not what it has to be.
        UnsupportedModelError: It holds a head that computes something else.
    """
    file = read_gguf(path)
    values = Values(file)
    for name in _FOREIGN:
        if values.get(name):
            raise UnsupportedModelError(path, f"it has {ARCHITECTURE}.{name}, which is not known", ORIGINAL)
    shape = read_shape(values, _LAYER) | {"vocab_size": read_vocab_size(values)}
    layer = read_layer(path, shape, "llama")
    if FREQUENCY_FACTORS in file.tensors:
        layer.rope_parameters = _scaled(file, layer)
    normed = values.get("norm_before_residual")
    return FeatureHeadConfig(
        method="eagle3",
        layer=layer,
        target_hidden_size=values.count("target_hidden_size", layer.hidden_size),
        vocab_size=layer.vocab_size,
        draft_vocab_size=read_draft_vocab_size(values, layer.vocab_size),
        aux_layers=read_target_layers(values, LAYERS),
        norm_before_residual=bool(normed),
    )


def read_tensors(path: str) -> dict[str, HeadTensor]:
    """The tensors of a file by llama.cpp's names, rows of queries and keys in order.

    Raises:
        ModelLoadError: The file is corrupt, a tensor holds NaN or infinity, or d2t is of another type.
    """
    layer = read(path).layer
    return read_head_tensors(read_gguf(path), (FREQUENCY_FACTORS,), lambda name: row_order(_LAYER, name, layer))


def prefixes(config: FeatureHeadConfig) -> dict[str, str]:
    """Names of tensors in files, and here."""
    return PREFIXES


def _scaled(file: GgufFile, layer: Any) -> dict[str, Any]:
    """Rotary positions whose frequencies are divided by the factors of a file, whatever the length of a text."""
    factors = file.tensors[FREQUENCY_FACTORS].floats()
    if factors.shape != (layer.head_dim // 2,) or not bool((factors > 0).all() and factors.isfinite().all()):
        problem = f"its {FREQUENCY_FACTORS} are no factors of {layer.head_dim // 2} frequencies"
        raise ModelLoadError(file.path, problem, AGAIN)
    told = factors.tolist()
    return {
        "rope_type": "longrope", "rope_theta": layer.rope_parameters["rope_theta"], "short_factor": told,
        "long_factor": told, "attention_factor": 1.0, "factor": 1.0,
        "original_max_position_embeddings": layer.max_position_embeddings,
    }  # fmt: skip


GGUF_EAGLE3 = GgufFormat(ARCHITECTURE, read, read_tensors, prefixes)

"""The format of llama.cpp's EAGLE-3 heads: one GGUF file, with llama.cpp's names and an absolute d2t.

`target_layers` (`extract_layers` in older files) name the layers whose inputs are read, as files of SafeAILab do. `d2t`
holds the target's token for each of the head's own, and not how far it lies away. Rows of queries and keys are interleaved
for neighbours that turn together, and are put back here. The residual is the feature before its norm, unless
`norm_before_residual` is true, and the next token reads what the layer left before the norm of the output layer. Weights in
blocks become float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.folder import HeadTensor
from outrider.heads.formats.layer import read_layer
from outrider.model.loading.gguf.architecture import ARCHITECTURES, read_shape, row_order
from outrider.model.loading.gguf.header import GgufFile, read_gguf
from outrider.model.loading.gguf.names import LAYER
from outrider.model.loading.gguf.rotary import FREQUENCY_FACTORS
from outrider.model.loading.gguf.values import AGAIN, Values

NAME = "GGUF EAGLE-3"
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
_ORIGINAL = "Use the head as it was published in safetensors."


def read(path: str) -> FeatureHeadConfig:
    """The head that a file describes.

    Raises:
        ModelLoadError: The file is corrupt, a value is missing, or is not what it has to be.
        UnsupportedModelError: It holds another kind of model, or a head that computes something else.
    """
    file = read_gguf(path)
    values = Values(file)
    if values.architecture != ARCHITECTURE:
        problem = f"its architecture is {values.architecture}, and heads in GGUF files are of {ARCHITECTURE}"
        raise UnsupportedModelError(path, problem, _ORIGINAL)
    for name in _FOREIGN:
        if values.get(name):
            raise UnsupportedModelError(path, f"it has {ARCHITECTURE}.{name}, which is not known", _ORIGINAL)
    shape = read_shape(values, _LAYER) | {"vocab_size": _vocab_size(values)}
    layer = read_layer(path, shape, "llama")
    if FREQUENCY_FACTORS in file.tensors:
        layer.rope_parameters = _scaled(file, layer)
    normed = values.get("norm_before_residual")
    drafted = file.tensors.get("d2t")
    return FeatureHeadConfig(
        method="eagle3",
        layer=layer,
        target_hidden_size=values.count("target_hidden_size", layer.hidden_size),
        vocab_size=layer.vocab_size,
        draft_vocab_size=layer.vocab_size if drafted is None else drafted.shape[0],
        aux_layers=_layers(values),
        norm_before_residual=bool(normed),
    )


def read_tensors(path: str) -> dict[str, HeadTensor]:
    """The tensors of a file by llama.cpp's names, as the formats in folders have them: rows of queries and keys in order,
    and a d2t that says how far the target's token lies away.

    Raises:
        ModelLoadError: The file is corrupt, or a tensor holds NaN or infinity.
    """
    file, name = read_gguf(path), Path(path).name
    layer = read(path).layer
    found: dict[str, torch.Tensor] = {}
    for key, tensor in file.tensors.items():
        if key == "d2t":
            if tensor.type != "I64":
                raise ModelLoadError(path, f"d2t is of type {tensor.type}, and I64 is needed", AGAIN)
            found[key] = tensor.integers() - torch.arange(tensor.shape[0])
        elif key != FREQUENCY_FACTORS:
            rows, order = tensor.floats(), row_order(_LAYER, key, layer)
            found[key] = rows if order is None or len(order) != len(rows) else rows[order]
            if not found[key].isfinite().all():
                raise ModelLoadError(path, f"{key} holds NaN or infinity", AGAIN)
    return {key: HeadTensor(tensor, name) for key, tensor in found.items()}


def _vocab_size(values: Values) -> int:
    """Width of the target's logits, which the file's vocabulary names too."""
    tokens = values.file.metadata.get("tokenizer.ggml.tokens")
    return values.count("vocab_size", len(tokens) if isinstance(tokens, list) and tokens else None)


def _layers(values: Values) -> tuple[int, ...]:
    ids: Any = next((found for name in LAYERS if (found := values.get(name)) is not None), None)
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids) or ids != sorted(set(ids)):
        problem = f"its {ARCHITECTURE}.{LAYERS[0]} is {ids!r}, and no list of the target's layers from low to high"
        raise ModelLoadError(values.file.path, problem, AGAIN)
    return tuple(ids)


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

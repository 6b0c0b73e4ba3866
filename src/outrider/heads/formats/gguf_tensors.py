"""What GGUF files of all heads have in common: tensors by llama.cpp's names, an absolute d2t, and numbers of layers.

`d2t` holds the target's token for each of the head's own, and not how far it lies away. Weights in blocks become float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelLoadError
from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.folder import HeadTensor
from outrider.model.loading.gguf.header import GgufFile
from outrider.model.loading.gguf.values import AGAIN, Values

#: What to do with a file that computes something else.
ORIGINAL = "Use the head as it was published in safetensors."


class GgufFormat(NamedTuple):
    """A format for heads of one method in GGUF files.

    Attributes:
        architecture: The name of the kind of model that such a file gives.
        read: The head that a file describes.
        read_tensors: The tensors of a file by llama.cpp's names, and its rows as they are here.
        prefixes: What names of tensors begin with in files, and here, for a head.
    """

    architecture: str
    read: Callable[[str], FeatureHeadConfig]
    read_tensors: Callable[[str], dict[str, HeadTensor]]
    prefixes: Callable[[Any], dict[str, str]]


def read_head_tensors(
    file: GgufFile, unused: tuple[str, ...] = (), order: Callable[[str], Tensor | None] = lambda name: None
) -> dict[str, HeadTensor]:
    """The tensors of a file, with a d2t that says how far the target's token lies away, as the formats in folders have it.

    Args:
        file: The file.
        unused: Names of tensors that are left out.
        order: Gives the rows of a tensor in the order that they have here; None where they are in it.

    Raises:
        ModelLoadError: A tensor holds NaN or infinity, or its d2t is of another type.
    """
    found: dict[str, Tensor] = {}
    for key, tensor in file.tensors.items():
        if key == "d2t":
            if tensor.type != "I64":
                raise ModelLoadError(file.path, f"d2t is of type {tensor.type}, and I64 is needed", AGAIN)
            found[key] = tensor.integers() - torch.arange(tensor.shape[0])
        elif key not in unused:
            rows, places = tensor.floats(), order(key)
            found[key] = rows if places is None or len(places) != len(rows) else rows[places]
            if not found[key].isfinite().all():
                raise ModelLoadError(file.path, f"{key} holds NaN or infinity", AGAIN)
    return {key: HeadTensor(tensor, Path(file.path).name) for key, tensor in found.items()}


def read_vocab_size(values: Values) -> int:
    """Width of the target's logits, which the file's vocabulary names too."""
    tokens = values.file.metadata.get("tokenizer.ggml.tokens")
    return values.count("vocab_size", len(tokens) if isinstance(tokens, list) and tokens else None)


def read_draft_vocab_size(values: Values, vocab_size: int) -> int:
    """Width of the head's own logits."""
    drafted = values.file.tensors.get("d2t")
    return vocab_size if drafted is None else drafted.shape[0]


def read_target_layers(values: Values, names: tuple[str, ...]) -> tuple[int, ...]:
    """The target's layers whose inputs a head reads.

    Args:
        values: Of the file.
        names: Where they may stand, the usual name first.

    Raises:
        ModelLoadError: They are no layers from low to high.
    """
    ids: Any = next((found for name in names if (found := values.get(name)) is not None), None)
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids) or ids != sorted(set(ids)):
        problem = f"its {values.architecture}.{names[0]} is {ids!r}, and no list of the target's layers from low to high"
        raise ModelLoadError(values.file.path, problem, AGAIN)
    return tuple(ids)

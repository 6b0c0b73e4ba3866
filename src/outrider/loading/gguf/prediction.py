"""The layers of a GGUF file behind those of its model, which predict several tokens (`nextn` in llama.cpp's names)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.errors import HeadMismatchError, ModelError, ModelLoadError
from outrider.kernels.formats import StoredWeight
from outrider.loading.gguf.architecture import architecture_of, read_config
from outrider.loading.gguf.checkpoint import GgufCheckpoint
from outrider.loading.gguf.header import AGAIN, GgufFile, GgufTensor, is_packed, read_gguf, stored_tensor
from outrider.loading.gguf.names import layer_part, stock_names
from outrider.loading.gguf.values import Values

#: What such a layer has beside its decoder layer, by the names of files and of folders in the layout of DeepSeek-V3.
_BESIDE = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "layer_output_norm": "shared_head.norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}
_NORMS, _FC = ("nextn.shared_head_norm.weight", "layer_output_norm.weight"), "nextn.eh_proj.weight"
#: What a model must have and a decoder layer alone has not.
_OF_THE_MODEL = ("model.embed_tokens.weight", "lm_head.weight")


class PredictionLayer(NamedTuple):
    """One layer, as its file has it."""

    fc: Tensor  # [hidden_size, 2 * hidden_size] floats; without numbers where `stored` has them
    stored: StoredWeight | None  # fc in blocks
    embedding_norm: Tensor  # [hidden_size]
    hidden_norm: Tensor  # [hidden_size]
    decoder: dict[str, Tensor]  # by transformers' names behind "model."; those in blocks hold no numbers
    fill: Callable[[nn.Module], None]  # gives a model of this one layer its blocks


class PredictionLayers:
    """The layers of a file that predict several tokens."""

    def __init__(self, path: str, config: Any) -> None:
        self._file = read_gguf(path)
        self._first = int(config.num_hidden_layers)
        self._known = architecture_of(self._file)
        _check_target(path, read_config(self._file), config)
        self._tensors: dict[int, dict[str, GgufTensor]] = {}
        for name, tensor in self._file.tensors.items():
            number, part = layer_part(name)
            if number is not None and number >= self._first:
                self._tensors.setdefault(number, {})[part] = tensor

    @property
    def names(self) -> list[str]:
        """The tensors by their names in a folder in the layout of DeepSeek-V3, those of experts by their parts."""
        found = []
        for number, tensors in self._tensors.items():
            for part in tensors:
                own, _, kind = part.rpartition(".")
                stock = [f"model.layers.{number}.{_BESIDE[own]}.{kind}"] if own in _BESIDE else None
                found += stock_names(self._known.layer, f"blk.{number}.{part}") if stock is None else stock
        return found

    @property
    def shared(self) -> bool:
        """Tells whether layers behind the first have no projection of their own, and take that of the first."""
        behind = [tensors for number, tensors in self._tensors.items() if number > self._first]
        return bool(behind) and not any(_FC in tensors for tensors in behind)

    @property
    def layer_type(self) -> str:
        """The kind of attention of the layers, where the model has several."""
        windows = Values(self._file).get("attention.sliding_window_pattern")
        windowed = isinstance(windows, list) and any(windows[self._first :])
        return "sliding_attention" if windowed else "full_attention"

    def read(self, place: int, config: Any, empty: nn.Module, dtype: torch.dtype) -> PredictionLayer:
        """One layer."""
        number, path = self._first + place, self._file.path
        own = self._tensors[number]
        beside = (self._tensors[self._first] if self.shared else {}) | own
        for name in ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight"):
            if name not in beside:
                raise ModelLoadError(path, f"its layer {number} that predicts several tokens has no {name}", AGAIN)
        try:
            checkpoint = GgufCheckpoint(self._alone(own, beside), config)
            checkpoint.check(empty, without=_OF_THE_MODEL)
            state = checkpoint.state(empty, dtype)
        except ModelError as error:
            problem = f"its layer {number} that predicts several tokens cannot be read: {error.problem}"
            raise type(error)(path, problem, error.remedy) from error
        fc, hidden = beside[_FC], int(config.hidden_size)
        _check_shape(path, fc, (hidden, 2 * hidden))
        embedding_norm, hidden_norm = (self._norm(beside[f"nextn.{name}.weight"], hidden) for name in ("enorm", "hnorm"))
        stored = stored_tensor(path, fc, dtype) if is_packed(fc) else None
        floats = torch.full((), float("nan")).expand(fc.shape) if stored is not None else _finite(path, fc)
        decoder = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        fill = partial(checkpoint.fill, dtype=dtype)
        return PredictionLayer(floats, stored, embedding_norm, hidden_norm, decoder, fill)

    def _alone(self, own: dict[str, GgufTensor], beside: dict[str, GgufTensor]) -> GgufFile:
        """The file of a model that has this layer alone, without embeddings and output layer."""
        tensors = {f"blk.0.{part}": tensor for part, tensor in own.items() if part.rpartition(".")[0] not in _BESIDE}
        norm = next((beside[name] for name in _NORMS if name in beside), self._file.tensors.get("output_norm.weight"))
        tensors |= {} if norm is None else {"output_norm.weight": norm}
        tensors |= {name: self._file.tensors[name] for name in self._known.apart if name in self._file.tensors}
        return replace(self._file, tensors=tensors)

    def _norm(self, tensor: GgufTensor, hidden: int) -> Tensor:
        _check_shape(self._file.path, tensor, (hidden,))
        return _finite(self._file.path, tensor) - (1 if self._known.offset_norms else 0)


def carries_prediction_layers(path: str, config: Any) -> bool:
    """Tells whether a file of this model holds such layers. Raises ModelLoadError for a file that cannot be read."""
    first = int(config.num_hidden_layers)
    return any(number >= first for number in _layers(path, _FC))


def holds_prediction_layers_alone(path: str) -> bool:
    """Tells whether a file holds such layers and not those before them. Raises ModelLoadError as above."""
    return bool(_layers(path, _FC)) and 0 not in _layers(path)


def _layers(path: str, wanted: str | None = None) -> set[int]:
    """The numbers of the layers of a file; if a part is given, of those that have it."""
    parts = map(layer_part, read_gguf(path).tensors)
    return {number for number, part in parts if number is not None and wanted in (None, part)}


def _check_target(path: str, found: Any, config: Any) -> None:
    for field in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        needed, own = getattr(config, field), getattr(found, field)
        if needed != own:
            problem = f"its layers are for a model with {field}={own}, and the target has {needed}"
            remedy = "Use the file that was made of the target's own checkpoint."
            raise HeadMismatchError(path, problem, remedy, field, needed, own)


def _check_shape(path: str, tensor: GgufTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        problem = f"its tensor {tensor.name} has shape {list(tensor.shape)}, and {list(shape)} is needed"
        raise ModelLoadError(path, problem, AGAIN)


def _finite(path: str, tensor: GgufTensor) -> Tensor:
    found = tensor.floats()
    if not bool(found.isfinite().all()):
        raise ModelLoadError(path, f"{tensor.name} holds NaN or infinity", AGAIN)
    return found

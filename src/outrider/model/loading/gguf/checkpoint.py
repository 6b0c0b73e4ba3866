"""The tensors of a GGUF file, which a model of transformers gets one after another and keeps in their blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.weights import keep_quantised
from outrider.model import hf
from outrider.model.loading.exclusive import check_wanted
from outrider.model.loading.gguf.architecture import architecture_of, row_order
from outrider.model.loading.gguf.blocks import is_packed, stored_tensor
from outrider.model.loading.gguf.experts import projections
from outrider.model.loading.gguf.header import GgufFile, GgufTensor
from outrider.model.loading.gguf.names import stock_name
from outrider.model.loading.gguf.rotary import FREQUENCY_FACTORS
from outrider.model.loading.gguf.values import AGAIN, ORIGINAL
from outrider.model.loading.reading import Reading


class GgufCheckpoint:
    """The tensors of a file by transformers' names.

    Args:
        file: The file.
        config: transformers' configuration of it.

    Raises:
        UnsupportedModelError: It has a tensor that is not known of its architecture.
    """

    def __init__(self, file: GgufFile, config: Any) -> None:
        self._file, self._config = file, config
        self._known = architecture_of(file)
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in file.tensors.items():
            stock = stock_name(self._known.layer, name)
            if stock is not None:
                self._tensors[stock] = tensor
            elif name not in self._known.factors:
                problem = f"it has a tensor {name}, which is not known of its architecture"
                raise UnsupportedModelError(file.path, problem, ORIGINAL)

    def check(self, empty: nn.Module) -> None:
        """Refuse a file whose tensors are not those of a model, before anything is read. What transformers would make for
        itself might be as large as any number in the file.

        Raises:
            ModelLoadError: A tensor is missing, has another shape, or is one that the model does not have.
        """
        wanted = {name: tuple(weight.shape) for name, weight in empty.state_dict().items()}
        if self._config.tie_word_embeddings:
            wanted.pop("lm_head.weight", None)
        for projection in projections(empty):
            wanted.pop(projection.name)
            wanted.pop(f"{projection.name}_bias", None)
            wanted |= projection.shapes
        for name, tensor in self._tensors.items():
            if name not in wanted:
                problem = f"it has a tensor {tensor.name}, which its architecture does not have"
                raise ModelLoadError(self._file.path, problem, AGAIN)
            if tensor.shape != wanted[name]:
                shapes = f"has shape {list(tensor.shape)}, and its metadata ask for {list(wanted[name])}"
                raise ModelLoadError(self._file.path, f"its tensor {tensor.name} {shapes}", AGAIN)
        missing = sorted(wanted.keys() - self._tensors.keys())
        if missing:
            problem = f"{len(missing)} tensors are missing, that for {missing[0]} first"
            raise ModelLoadError(self._file.path, problem, AGAIN)

    @property
    def dtype(self) -> torch.dtype:
        """That of what is not in blocks: bfloat16 where this holds all of it exactly, and the numbers of all codes. Or else
        float32."""
        if any(tensor.type == "F16" for tensor in self._tensors.values()):
            return torch.float32
        floats = (self._floats(tensor) for tensor in self._tensors.values() if not is_packed(tensor))
        exact = all(torch.equal(values.bfloat16().float(), values) for values in floats)
        return torch.bfloat16 if exact else torch.float32

    def state(self, empty: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        """What transformers loads into a model: vectors and matrices of floats, and empty weights for those in blocks.

        Raises:
            UnsupportedModelError: Gates and values of experts have different types.
        """
        state = {}
        for name, tensor in self._single():
            if is_packed(tensor):
                state[name] = torch.full((), float("nan"), dtype=dtype).expand(tensor.shape)
            else:
                state[name] = self._floats(tensor)
        for projection in projections(empty):
            state |= projection.state(self._file.path, self._tensors, dtype)
        return state

    def fill(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Give the layers of a model their blocks, one after another; tied ones share them.

        Raises:
            ModelLoadError: Numbers of a tensor are not finite, or it has no such layer.
        """
        modules, reading = (
            dict(model.named_modules()),
            Reading(sum(tensor.data.nbytes for tensor in self._tensors.values())),
        )
        for name, tensor in self._single():
            if is_packed(tensor):
                check_wanted()
                module = modules[name.removesuffix(".weight")]
                stored = self._stored(tensor, dtype)
                keep_quantised(module, stored)
                if name == "model.embed_tokens.weight" and self._config.tie_word_embeddings:
                    keep_quantised(modules["lm_head"], stored)
            reading.advance(tensor.data.nbytes)
        for projection in projections(model):
            check_wanted()
            projection.fill(self._file.path, self._tensors, dtype)
            reading.advance(sum(self._tensors[part].data.nbytes for part in (*projection.parts, *projection.bias_parts)))
        hf.use_stored_experts(model)
        self._scale_frequencies(model)

    def _single(self) -> list[tuple[str, GgufTensor]]:
        """The tensors that are no parts of others, by transformers' names."""
        return [(name, tensor) for name, tensor in self._tensors.items() if not name.endswith("]")]

    def _floats(self, tensor: GgufTensor) -> Tensor:
        values, order = tensor.floats(), self._order(tensor)
        if self._known.offset_norms and "norm" in tensor.name:
            values = values - 1
        return values if order is None else values[order]

    def _stored(self, tensor: GgufTensor, dtype: torch.dtype) -> StoredWeight:
        return stored_tensor(self._file.path, tensor, dtype, self._order(tensor))

    def _order(self, tensor: GgufTensor) -> Tensor | None:
        return row_order(self._known, tensor.name, self._config)

    def _scale_frequencies(self, model: nn.Module) -> None:
        """Divide rotary frequencies by the factors of the file, as those of Llama 3.1 are."""
        found = self._file.tensors.get(FREQUENCY_FACTORS)
        if found is None:
            return
        rotary: Any = hf.decoder_stack(model).rotary_emb
        factors = found.floats()
        if not hasattr(rotary, "inv_freq"):
            raise UnsupportedModelError(
                self._file.path, f"it has {FREQUENCY_FACTORS} for several kinds of layers", ORIGINAL
            )
        if factors.shape != rotary.inv_freq.shape or not bool((factors > 0).all() and factors.isfinite().all()):
            problem = f"its {FREQUENCY_FACTORS} are no factors of {len(rotary.inv_freq)} frequencies"
            raise ModelLoadError(self._file.path, problem, AGAIN)
        rotary.inv_freq = rotary.inv_freq / factors.to(rotary.inv_freq)

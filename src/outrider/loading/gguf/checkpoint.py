"""The tensors of a GGUF file, which a model of transformers gets one after another and keeps in their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.kernels.formats import StoredWeight
from outrider.kernels.weights import ExpertStack, keep_quantised
from outrider.loading import hf_modules
from outrider.loading.exclusive import check_wanted
from outrider.loading.gguf.architecture import architecture_of
from outrider.loading.gguf.arrangement import Joined, arrangement_of, column_order, layer_name, row_order
from outrider.loading.gguf.header import (
    AGAIN,
    ORIGINAL,
    FileProgress,
    GgufFile,
    GgufTensor,
    is_packed,
    mixes_rows,
    stored_tensor,
    takes_rounded_rows,
)
from outrider.loading.gguf.names import layer_part, stock_names
from outrider.loading.gguf.rotary import FREQUENCY_FACTORS
from outrider.loading.gguf.values import Values
from outrider.loading.quantised_checkpoint import joined_parts, num_parts, part_shape

#: What may have more bits than the rest of a model: norms, biases of routers, and what rates and steps are made of.
_KEPT_WIDE = ("norm.weight", ".A_log", ".dt_bias", ".e_score_correction_bias", ".expert_bias")


#: What a layer does not have that reads keys and values of another one.
_SHARED = ("attn_k", "attn_v", "attn_k_norm")


class GgufCheckpoint:
    """The tensors of a file by transformers' names."""

    def __init__(self, file: GgufFile, config: Any, *, narrow: bool = False) -> None:
        self._file, self._config, self._narrow = file, config, narrow
        self._known = architecture_of(file)
        self._tensors: dict[str, GgufTensor] = {}
        self._sharing: dict[str, list[str]] = {}  # the tensors of transformers that one of the file holds
        unshared = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
        for name, tensor in file.tensors.items():
            layer, part = layer_part(name)
            stock = stock_names(self._known.layer, name)
            if layer is not None and layer >= config.num_hidden_layers and self._predicts:
                continue  # `prediction.py` reads it
            if layer is not None and layer >= unshared and part.partition(".")[0] in _SHARED:
                continue  # files hold them, and nothing reads them
            parts = _halves(tensor) if len(stock) == 2 and stock[1].endswith("[1]") else _matrices(tensor, len(stock))
            if len(parts) > 1:
                for own, one in zip(stock, parts, strict=True):
                    self._tensors[own], self._sharing[one.name] = one, [own]
            elif stock:
                self._tensors |= dict.fromkeys(stock, tensor)
                self._sharing[tensor.name] = stock
            elif name not in self._known.apart:
                problem = f"it has a tensor {tensor.name}, which is not known of its architecture"
                raise UnsupportedModelError(file.path, problem, ORIGINAL)

    @property
    def _predicts(self) -> bool:
        """Tells whether there are layers behind those of the model."""
        values = Values(self._file)
        return values.num_layers < values.count("block_count")

    def check(self, empty: nn.Module, without: tuple[str, ...] = ()) -> None:
        """Refuse a file whose tensors are not those of a model, before anything is read. What transformers would make for
        itself might be as large as any number in the file."""
        wanted = {name: tuple(weight.shape) for name, weight in empty.state_dict().items()}
        unneeded = {*without, *self._copies(empty)}
        wanted = {name: shape for name, shape in wanted.items() if name not in unneeded}
        for projection in projections(empty):
            wanted.pop(projection.name)
            wanted.pop(f"{projection.name}_bias", None)
            wanted |= projection.shapes
        for whole, (_, parts) in self._joined().items():
            if wanted.pop(whole, None) is not None:
                wanted |= {f"{whole}[{part}]": part_shape for part, part_shape in enumerate(parts)}
        for name, tensor in self._tensors.items():
            if name not in wanted:
                problem = f"it has a tensor {tensor.name}, which its architecture does not have"
                raise ModelLoadError(self._file.path, problem, AGAIN)
            rows = sum(wanted[other][0] for other in self._sharing[tensor.name] if other in wanted)
            shape = (rows, *wanted[name][1:])
            flat = arrangement_of(self._known.arranged, name).flat and prod(tensor.shape) == prod(shape)
            if not flat and _squeezed(tensor.shape) != _squeezed(shape):
                problem = f"its tensor {tensor.name} has shape {list(tensor.shape)}, and its metadata ask for {list(shape)}"
                raise ModelLoadError(self._file.path, problem, AGAIN)
        missing = sorted(wanted.keys() - self._tensors.keys())
        if missing:
            problem = f"{len(missing)} tensors are missing, that for {missing[0]} first"
            raise ModelLoadError(self._file.path, problem, AGAIN)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of what is not in blocks: bfloat16 where this holds all codes and all matrices exactly, or else
        float32. Norms, and biases of blocks, keep their own bits."""
        if mixes_rows(self._file) or any(tensor.type == "F16" for tensor in self._tensors.values()):
            return torch.float32  # in which all matrices take rows in one form
        single = {name: tensor for name, tensor in self._tensors.items() if not is_packed(tensor)}
        exact = all(
            _is_bfloat16(self._floats(name, tensor)) for name, tensor in single.items() if not self._keeps_bits(name)
        )
        return torch.bfloat16 if exact else torch.float32

    def _keeps_bits(self, name: str) -> bool:
        """Tells whether a vector may have more bits than the rest of a model: a norm, or a bias that is added to a product
        with blocks of codes."""
        tensor = self._tensors[name]
        if len(_squeezed(tensor.shape)) > 1 and not arrangement_of(self._known.arranged, name).flat:
            return False
        if f"{name.removesuffix('.weight')}.bias" in self._tensors and name.endswith("norm.weight"):
            return False  # PyTorch takes both of a norm in one dtype
        matrix = self._tensors.get(f"{name.removesuffix('.bias')}.weight") if name.endswith(".bias") else None
        return takes_rounded_rows(matrix) if matrix is not None else name.endswith(_KEPT_WIDE)

    def state(self, empty: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns what transformers loads into a model: vectors and matrices of floats, and empty weights for those in
        blocks."""
        state, shapes = {}, {name: weight.shape for name, weight in empty.state_dict().items()}
        for name, tensor in self._single():
            if is_packed(tensor):
                state[name] = torch.full((), float("nan"), dtype=dtype).expand(shapes[name])
            else:
                state[name] = self._floats(name, tensor).reshape(shapes[name])
        for name, (joined, _) in self._joined().items():
            if self._is_joined_by_blocks(name):
                state[name] = torch.full((), float("nan"), dtype=dtype).expand(shapes[name])
            else:
                state[name] = joined.join([self._tensors[part].floats() for part in self._parts(name)])
        for projection in projections(empty):
            state |= projection.state(self._file.path, self._tensors, dtype)
        return state

    def fill(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Give the layers of a model their blocks, one after another; tied ones share them. Norms and biases get the bits
        that the dtype does not hold."""
        modules, reading = (
            dict(model.named_modules()),
            FileProgress(self._file.path, sum(tensor.data.nbytes for tensor in self._tensors.values())),
        )
        for name, tensor in self._single():
            if is_packed(tensor):
                check_wanted()
                module = modules[name.removesuffix(".weight")]
                stored = self._stored(name, tensor, dtype)
                keep_quantised(module, stored)
                if tensor.name == "token_embd.weight":
                    self._keep_copies(model, stored)
            elif dtype == torch.bfloat16 and self._keeps_bits(name) and not _is_bfloat16(self._floats(name, tensor)):
                path, _, kind = name.rpartition(".")
                values = self._floats(name, tensor).reshape(getattr(modules[path], kind).shape)
                _keep_wide(modules[path], kind, values)
            reading.advance(tensor.data.nbytes)
        for name, (joined, _) in self._joined().items():
            if self._is_joined_by_blocks(name):
                stored_parts = [self._stored(part, self._tensors[part], dtype) for part in self._parts(name)]
                keep_quantised(modules[name.removesuffix(".weight")], StoredWeight.of(stored_parts, joined.join))
            reading.advance(sum(self._tensors[part].data.nbytes for part in self._parts(name)))
        for projection in projections(model):
            check_wanted()
            projection.fill(self._file.path, self._tensors, dtype)
            reading.advance(sum(self._tensors[part].data.nbytes for part in (*projection.parts, *projection.bias_parts)))
        hf_modules.use_stored_experts(model)
        self._scale_frequencies(model)

    def _copies(self, model: nn.Module) -> list[str]:
        """What is tied to the embeddings, and has no tensor of its own. T5's output layer may have one: its configuration
        says that weights are tied, since those of its encoder and of its decoder are."""
        tied = getattr(model, "_tied_weights_keys", None) if self._config.tie_word_embeddings else None
        return [name for name in tied or () if name not in self._tensors]

    def _keep_copies(self, model: nn.Module, stored: StoredWeight) -> None:
        """Tie blocks. The kernels take away the memory of the output layer, whose blocks are the embeddings', too, but not
        what an encoder looks up."""
        copies, head = self._copies(model), "lm_head.weight"
        apart = stored.each(torch.clone) if {*copies} - {head} else stored
        for name in copies:
            module: Any = model.get_submodule(name.removesuffix(".weight"))
            keep_quantised(module, stored if name == head else apart)

    def _joined(self) -> dict[str, tuple[Joined, list[tuple[int, ...]]]]:
        """The tensors of transformers that have several ones in the file, with the shapes of these."""
        found = {name[:-3]: self._known.joined.get(layer_name(name[:-3])) for name in self._tensors if name.endswith("]")}
        return {name: (joined, joined.shapes(self._config)) for name, joined in found.items() if joined is not None}

    def _is_joined_by_blocks(self, name: str) -> bool:
        """Tells whether the parts of a tensor stay in their blocks, which have one type."""
        parts = [self._tensors[part] for part in self._parts(name)]
        alike = len({part.type for part in parts}) == 1
        return self._joined()[name][0].by_rows and alike and all(is_packed(part) for part in parts)

    def _parts(self, name: str) -> list[str]:
        """The names of the parts of a tensor that is joined."""
        return [f"{name}[{part}]" for part in range(len(self._joined()[name][1]))]

    def _single(self) -> list[tuple[str, GgufTensor]]:
        """The tensors that are no parts of others, by transformers' names."""
        return [(name, tensor) for name, tensor in self._tensors.items() if not name.endswith("]")]

    def _floats(self, name: str, tensor: GgufTensor) -> Tensor:
        values, arranged = tensor.floats(), self._known.arranged
        if self._known.offset_norms and name.endswith("norm.weight") and layer_name(name) not in arranged:
            values = values - 1
        order, columns = row_order(arranged, name, self._config), column_order(arranged, name, self._config)
        values = values if order is None else values[order]
        values = values if columns is None else values[:, columns]
        change = arrangement_of(arranged, name).floats
        if change is None:
            return values
        values = change(values)
        if not bool(values.isfinite().all()):
            raise ModelLoadError(self._file.path, f"the tensor {tensor.name} holds numbers that cannot be", AGAIN)
        return values

    def _stored(self, name: str, tensor: GgufTensor, dtype: torch.dtype) -> StoredWeight:
        only_looked_up = tensor.name == "token_embd.weight" and "lm_head.weight" in self._tensors
        arranged, narrow = self._known.arranged, self._narrow and not only_looked_up
        order, columns = row_order(arranged, name, self._config), column_order(arranged, name, self._config)
        return stored_tensor(self._file.path, tensor, dtype, order, columns, narrow=narrow)

    def _scale_frequencies(self, model: nn.Module) -> None:
        """Divide rotary frequencies by the factors of the file, as those of Llama 3.1 are."""
        found = self._file.tensors.get(FREQUENCY_FACTORS)
        if found is None or not self._known.scaled:
            return
        rotary: Any = hf_modules.decoder_stack(model).rotary_emb
        factors = found.floats()
        if not hasattr(rotary, "inv_freq"):
            raise UnsupportedModelError(
                self._file.path, f"it has {FREQUENCY_FACTORS} for several kinds of layers", ORIGINAL
            )
        if factors.shape != rotary.inv_freq.shape or not bool((factors > 0).all() and factors.isfinite().all()):
            problem = f"its {FREQUENCY_FACTORS} are no factors of {len(rotary.inv_freq)} frequencies"
            raise ModelLoadError(self._file.path, problem, AGAIN)
        rotary.inv_freq = rotary.inv_freq / factors.to(rotary.inv_freq)


def _halves(tensor: GgufTensor) -> list[GgufTensor]:
    """Gates and values of experts [num_experts, 2 * rows, cols] as two tensors."""
    if len(tensor.shape) != 3 or tensor.shape[1] % 2:
        return [tensor, tensor]  # which is refused for its shape
    count, rows, cols = tensor.shape[0], tensor.shape[1] // 2, tensor.shape[2]
    data = tensor.data.reshape(count, 2, -1)
    return [
        replace(tensor, name=f"{tensor.name}[{half}]", shape=(count, rows, cols), data=data[:, half]) for half in (0, 1)
    ]


def _matrices(tensor: GgufTensor, count: int) -> list[GgufTensor]:
    """The matrices of a stack of so many, as tensors. A tensor that is no such stack stays one."""
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        return [tensor]
    data = tensor.data.reshape(count, -1)
    return [
        replace(tensor, name=f"{tensor.name}[{place}]", shape=tensor.shape[1:], data=data[place]) for place in range(count)
    ]


class _WideNorm(nn.Module):
    """A norm whose factors have more bits than what it reads and returns."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] of any floating dtype to the same."""
        found: Tensor = super().forward(hidden)
        return found.to(hidden.dtype)


def _keep_wide(module: nn.Module, name: str, values: Tensor) -> None:
    """Give a norm its factors, or a layer its bias, in float32 among weights of bfloat16."""
    setattr(module, name, nn.Parameter(values, requires_grad=False))
    if name == "weight":
        module.__class__ = type(f"Wide{type(module).__name__}", (_WideNorm, type(module)), {})


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of 1, which files may leave out or have."""
    return tuple(size for size in shape if size != 1)


def _is_bfloat16(values: Tensor) -> bool:
    """Tells whether bfloat16 holds these numbers exactly."""
    return torch.equal(values.bfloat16().float(), values)


# --- The projections of experts, of which GGUF files keep gates and values apart, and transformers together.


@dataclass(frozen=True)
class Projection:
    """One projection of all experts of a layer, and its parts in a file, which are named by their numbers."""

    name: str  # transformers' name of the tensor
    stack: ExpertStack  # the tensor

    @property
    def parts(self) -> list[str]:
        """The names of its parts."""
        return [f"{self.name}[{part}]" for part in range(num_parts(self.stack))]

    @property
    def bias_parts(self) -> list[str]:
        """The names of the parts of its biases."""
        return [f"{self.name}_bias[{part}]" for part in range(num_parts(self.stack) if self._has_bias else 0)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns what a file has to hold: [num_experts, out_features, in_features] each, and [num_experts,
        out_features]."""
        count, rows, cols = part_shape(self.stack)
        found: dict[str, tuple[int, ...]] = dict.fromkeys(self.parts, (count, rows, cols))
        return found | dict.fromkeys(self.bias_parts, (count, rows))

    def state(self, path: str, tensors: Mapping[str, GgufTensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns what transformers loads: floats, and an empty tensor for blocks."""
        parts = [tensors[name] for name in self.parts]
        if len({part.type for part in parts}) > 1:
            types = " and ".join(f"{part.name} as {part.type}" for part in parts)
            problem = f"it has {types}, and the kernels take gates and values of experts of one type"
            raise UnsupportedModelError(path, problem, ORIGINAL)
        weight = getattr(self.stack.module, self.stack.name)
        if is_packed(parts[0]):
            found = {self.name: torch.full((), float("nan"), dtype=dtype).expand(weight.shape)}
        else:
            floats = self._joined([part.floats() for part in parts])
            found = {self.name: floats.transpose(1, 2).contiguous() if self.stack.transposed else floats}
        if self._has_bias:
            found[f"{self.name}_bias"] = self._joined([tensors[name].floats() for name in self.bias_parts])
        return found

    def fill(self, path: str, tensors: Mapping[str, GgufTensor], dtype: torch.dtype) -> None:
        """Give the tensor its blocks, if it has some."""
        parts = [tensors[name] for name in self.parts]
        if is_packed(parts[0]):
            stored = [stored_tensor(path, part, dtype) for part in parts]
            self.stack.keep(StoredWeight.of(stored, self._joined))

    @property
    def _has_bias(self) -> bool:
        return hasattr(self.stack.module, f"{self.stack.name}_bias")

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return joined_parts(self.stack, parts)


def projections(model: nn.Module) -> list[Projection]:
    """Those of all layers of a model."""
    paths = {id(module): path for path, module in model.named_modules()}
    return [Projection(f"{paths[id(stack.module)]}.{stack.name}", stack) for stack in hf_modules.expert_stacks(model)]

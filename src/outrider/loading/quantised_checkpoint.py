"""The files of a quantised checkpoint, whose matrices and experts are read one after another and kept packed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.kernels.formats import StoredWeight
from outrider.kernels.weights import ExpertStack, keep_quantised
from outrider.loading import hf_modules
from outrider.loading.exclusive import check_wanted
from outrider.loading.fit import StoredTensor, file_headers
from outrider.loading.quantised import Layout, MisshapenError, check
from outrider.loading.sources import wrong_shape

# --- The files of a quantised checkpoint, whose matrices are read one after another and kept packed.
#
# transformers builds the model and loads what is not quantised, and so checks names and shapes as it does for every
# checkpoint. For each quantised matrix it is given a weight of the right shape that holds no numbers and takes no
# memory.


_AGAIN = "Download or save the checkpoint again."


class QuantisedCheckpoint:
    """Safetensors files with quantised matrices. A context manager: the files are open inside."""

    def __init__(self, name: str, folder: Path, layout: Layout) -> None:
        self._name, self._layout = name, layout
        self._open = ExitStack()
        self._files: dict[str, Any] = {}  # the open file of each tensor
        self._headers: dict[str, StoredTensor] = {}
        try:
            for path, tensors in file_headers(folder):
                file = self._opened(path)
                self._headers |= {tensor.name: tensor for tensor in tensors}
                self._files |= dict.fromkeys((tensor.name for tensor in tensors), file)
        except Exception as error:  # whatever a file that is none makes its readers raise
            self._open.close()
            raise ModelLoadError(name, f"its weights cannot be read ({error})", _AGAIN) from error
        self.layers = self._quantised_layers()
        if not self.layers:
            self._open.close()
            raise ModelLoadError(name, "its configuration says that weights are quantised, and none are", _AGAIN)

    def __enter__(self) -> QuantisedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def state(self, empty: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        """Returns what transformers loads into a model: tensors that are not quantised, read when they are asked for, and
        empty weights."""
        parts = {f"{layer}.{suffix}" for layer, suffixes in self.layers.items() for suffix in suffixes}
        state = {name: file.get_slice(name) for name, file in self._files.items() if name not in parts}
        nothing, (experts, layers) = torch.full((), float("nan"), dtype=dtype), self._parted(empty)
        shapes = {f"{layer}.weight": self._shape(layer) for layer in layers}
        shapes |= {each.name: getattr(each.stack.module, each.stack.name).shape for each in experts}
        return state | {name: nothing.expand(shape) for name, shape in shapes.items()}

    def check(self, empty: nn.Module) -> None:
        """Refuse quantised matrices of other shapes than those of a model, before anything is made of these shapes."""
        weights, (experts, _) = empty.state_dict(), self._parted(empty)
        of_experts = {matrix: each.shape for each in experts for part in each.parts for matrix in part}
        missing = sorted(of_experts.keys() - self.layers.keys())
        if missing:
            problem = f"{len(missing)} quantised matrices of experts are missing, {missing[0]} first"
            raise ModelLoadError(self._name, problem, _AGAIN)
        found = {f"{layer}.weight": self._shape(layer) for layer in self.layers}
        known = {name: tuple(weights[name].shape) for name in found if name in weights}
        known |= {f"{matrix}.weight": shape for matrix, shape in of_experts.items()}
        wrong = [(name, found[name], shape) for name, shape in known.items() if shape != found[name]]
        if wrong:
            raise wrong_shape(self._name, wrong)

    def fill(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Give the layers of a model their weights, one after another."""
        modules, (experts, layers) = dict(model.named_modules()), self._parted(model)
        for layer in layers:
            check_wanted()
            module = modules.get(layer)
            if not isinstance(module, nn.Linear | nn.Embedding):
                problem = f"{layer} is quantised, and transformers' model has no such linear layer"
                raise UnsupportedModelError(self._name, problem, "Give the original checkpoint.")
            keep_quantised(module, self._stored(layer, dtype))
        for each in experts:
            check_wanted()
            try:
                each.fill(lambda matrix: self._stored(matrix, dtype, in_blocks=True))
            except MisshapenError as error:
                raise UnsupportedModelError(self._name, f"{each.name}: {error}", "Give the original checkpoint.") from error
        hf_modules.use_stored_experts(model)

    def _parted(self, model: nn.Module) -> tuple[list[QuantisedExperts], list[str]]:
        """The projections of experts that are quantised, and the paths of all other quantised matrices."""
        experts = quantised_experts(model, self.layers)
        taken = {matrix for each in experts for part in each.parts for matrix in part}
        return experts, [layer for layer in self.layers if layer not in taken]

    def _quantised_layers(self) -> dict[str, dict[str, StoredTensor]]:
        found: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        for name, tensor in self._headers.items():
            layer, _, suffix = name.rpartition(".")
            if suffix in self._layout.suffixes:
                found[layer][suffix] = tensor
        return {layer: tensors for layer, tensors in sorted(found.items()) if self._layout.holds(tensors)}

    def _shape(self, layer: str) -> tuple[int, int]:
        headers = self.layers[layer]
        try:
            return self._layout.shape(headers, lambda suffix: self._tensor(f"{layer}.{suffix}"))
        except (MisshapenError, KeyError, ValueError) as error:
            raise self._misshapen(layer, error) from error

    def _stored(self, layer: str, dtype: torch.dtype, *, in_blocks: bool = False) -> Any:
        shape, headers = self._shape(layer), self.layers[layer]
        try:
            tensors = {suffix: self._tensor(f"{layer}.{suffix}") for suffix in headers}
            stored = self._layout.stored(tensors, dtype, in_blocks=in_blocks)
        except (MisshapenError, KeyError, ValueError, IndexError, RuntimeError) as error:
            raise self._misshapen(layer, error) from error
        assert (len(stored.data), stored.format.inputs(stored.data)) == shape, "a layout says what its weights are"
        return stored

    def _misshapen(self, layer: str, error: Exception) -> ModelLoadError:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
        return ModelLoadError(self._name, f"the quantised weights of {layer} cannot be read: {reason}", _AGAIN)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _opened(self, path: Path) -> Any:
        from safetensors import safe_open

        return self._open.enter_context(safe_open(path, framework="pt"))


# --- Experts of quantised checkpoints, which keep each projection of each expert as a matrix of its own.


#: The names of matrices of an expert, gate, values and back, and what the module of experts is called, here and there.
_NAMES = (
    (("gate_proj", "up_proj", "down_proj"), ("", "")),
    (("w1", "w3", "w2"), (".mlp.", ".block_sparse_moe.")),
)


@dataclass(frozen=True)
class QuantisedExperts:
    """One projection of all experts of a layer."""

    name: str  # transformers' name of the tensor
    stack: ExpertStack  # the tensor
    parts: list[list[str]]  # for each part of the projection the paths of its matrices in the files, expert by expert

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features] of each matrix."""
        _, rows, cols = part_shape(self.stack)
        return rows, cols

    def fill(self, read: Callable[[str], StoredWeight]) -> None:
        """Give the tensor its matrices, which `read` reads by their paths."""
        found = [[read(path) for path in paths] for paths in self.parts]
        every = [stored for part in found for stored in part]
        check(all(stored.format == every[0].format for stored in every), "its matrices have scales of different types")
        check(all(stored.order is None for stored in every), "experts with an order of inputs of their own are not known")
        parts = [StoredWeight.of(part, torch.stack) for part in found]
        whole = StoredWeight.of(parts, lambda tensors: joined_parts(self.stack, tensors))
        if whole.quantised:
            self.stack.keep(whole)
        else:
            self.stack.restore(whole)


def quantised_experts(model: nn.Module, matrices: Container[str]) -> list[QuantisedExperts]:
    """The projections of experts of a model that are among the quantised matrices of a checkpoint, given by their paths."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = []
    for stack in hf_modules.expert_stacks(model):
        path = paths[id(stack.module)]
        for (*gates, down), renamed in _NAMES:
            names = gates if stack.name == "gate_up_proj" else [down]
            count = part_shape(stack)[0]
            parts = [[f"{path.replace(*renamed)}.{number}.{name}" for number in range(count)] for name in names]
            if parts[0][0] in matrices:
                found.append(QuantisedExperts(f"{path}.{stack.name}", stack, parts))
                break
    return found


# --- The parts that files keep of projections which transformers has as one: gates and values of experts.


def num_parts(stack: ExpertStack) -> int:
    """Returns how many parts files keep of a projection: gates and values are two."""
    return 2 if stack.name == "gate_up_proj" else 1


def part_shape(stack: ExpertStack) -> tuple[int, int, int]:
    """[num_experts, out_features, in_features] of each part."""
    count, first, second = getattr(stack.module, stack.name).shape
    rows, cols = (second, first) if stack.transposed else (first, second)
    return count, rows // num_parts(stack), cols


def joined_parts(stack: ExpertStack, parts: list[Tensor]) -> Tensor:
    """Parts [num_experts, rows, ...] as the rows of one matrix for each expert. Some families keep them in turn."""
    if stack.module.is_concatenated:
        return torch.cat(parts, 1)
    return torch.stack(parts, 2).flatten(1, 2)

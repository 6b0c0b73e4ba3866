"""GGUF files with matrices of any types, and blocks of all bits where nothing rounds to a type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.gguf_blocks import GGUF_TYPES
from outrider.lab.convert.gguf import NOT_ROUNDED, frequency_factors, is_matrix
from outrider.lab.convert.gguf_families import family_of
from outrider.lab.convert.gguf_family import FileTensor

#: The types that the gguf package can round to. Blocks of others are drawn.
ROUNDED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
Kinds = tuple[str, ...] | Callable[[int, str], str]


def blocks(kind: str, rows: int, cols: int, seed: int) -> np.ndarray:
    """Random blocks of a type, whose scales are finite and small."""
    known, random = GGUF_TYPES[kind], np.random.default_rng(seed)
    found = random.integers(0, 256, (rows * cols // known.inputs, known.nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        found[:, 0] = random.integers(118, 124, len(found))
        return found.reshape(rows, -1)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(kind, (0,))
    for place in places:
        size = {"Q2_K": 0.02, "IQ4_NL": 0.002, "Q6_K": 0.0001, "Q8_0": 0.001, "Q4_0": 0.01}.get(kind, 0.0006)
        scale = (size * random.uniform(0.5, 1, len(found))).astype(np.float16)
        found[:, place : place + 2] = scale[:, None].view(np.uint8)
    return found.reshape(rows, -1)


def _kind(kinds: Kinds, turn: int, name: str) -> str:
    return kinds(turn, name) if callable(kinds) else kinds[(turn - ("up_exps" in name)) % len(kinds)]


class Written:
    """A file, and the weights that it stands for by the names of transformers.

    Args:
        checkpoint: A folder of a family that has such files.
        path: The file.
        kinds: The types of matrices, in turn, where gates and values of experts have one; or what gives a type for a
            number and a name.
        metadata: More values, or others.
        vocabulary: Writes the vocabulary.
        more: Tensors of zeros beside those of the model, by their names.
        without: Values of attention that are left out.
        missing: Tensors that are left out.
        behind: Tensors of layers behind those of the model, with their numbers.
    """

    def __init__(
        self,
        checkpoint: str,
        path: Path,
        kinds: Kinds = ("Q4_0",),
        vocabulary: Any = None,
        more: dict[str, tuple[int, ...]] | None = None,
        without: tuple[str, ...] = (),
        missing: tuple[str, ...] = (),
        behind: Iterable[tuple[FileTensor, Tensor]] = (),
        **metadata: Any,
    ) -> None:
        import gguf
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        config, state = model.config, model.state_dict()
        self.path, self.model, self.values = path, model, {}
        family = family_of(config)
        assert family is not None
        name = family.architecture
        writer = gguf.GGUFWriter(path, name)
        family.describe(writer, config)
        for key, value in metadata.items():
            adding = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
            add = adding[type(value)]
            writer.kv_data[0].pop(f"{name}.{key}", None)
            add(f"{name}.{key}", value)
        for key in without:
            writer.kv_data[0].pop(f"{name}.attention.{key}")
        if vocabulary is not None:
            vocabulary(writer)
        for factors, value in frequency_factors(config).items():
            writer.add_tensor(factors, value)
        own = [(tensor, state[tensor.stock]) for tensor in family.tensors(config, state)]
        stacks: dict[str, list[tuple[FileTensor, Tensor]]] = {}
        for tensor, weight in [*own, *behind]:
            if tensor.name not in missing:
                stacks.setdefault(tensor.name, []).append((tensor, weight))
        for turn, (stacked, parts) in enumerate(stacks.items()):
            kind = _kind(kinds, turn, stacked) if is_matrix(stacked) else "F32"
            kept = any(name in stacked for name in NOT_ROUNDED) and kind not in ("F16", "BF16")
            self._add(writer, parts, "F32" if kept else kind, turn)
        for extra, shape in (more or {}).items():
            writer.add_tensor(extra, np.zeros(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _add(self, writer: Any, parts: list[tuple[FileTensor, Tensor]], kind: str, seed: int) -> None:
        """Write a tensor, which several of the checkpoint may be stacked in."""
        import gguf

        each = [np.ascontiguousarray(tensor.rows(stock)) for tensor, stock in parts]
        ggml, rows = gguf.GGMLQuantizationType[kind], each[0] if len(each) == 1 else np.stack(each)
        if kind in ROUNDED:
            data = gguf.quants.quantize(rows, ggml)
        else:
            data = blocks(kind, rows.size // rows.shape[-1], rows.shape[-1], seed).reshape(*rows.shape[:-1], -1)
        writer.add_tensor(parts[0][0].name, data, raw_dtype=ggml)
        values = gguf.quants.dequantize(data, ggml).reshape(len(parts), *each[0].shape)
        for (tensor, stock), value in zip(parts, values, strict=True):
            self._keep(tensor, stock, tensor.change.undo(value))

    def _keep(self, tensor: FileTensor, stock: Tensor, value: np.ndarray) -> None:
        kept = self.values.setdefault(tensor.stock, torch.full(stock.shape, float("nan")))
        places = tensor.arranged(np.arange(stock.numel()).reshape(stock.shape))  # where each number of the file belongs
        kept.view(-1)[torch.from_numpy(places.flatten())] = torch.from_numpy(np.array(value, np.float32).flatten())

    def plain(self, folder: Path) -> str:
        """The same model as a checkpoint in full precision."""
        state: dict[str, Tensor] = self.model.state_dict()
        for name in state.keys() & self.values.keys():
            state[name].copy_(self.values[name])
        self.model.save_pretrained(folder)
        return str(folder)

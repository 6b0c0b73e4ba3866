"""Where the weights of a model lie in a GGUF file: llama.cpp's names of tensors, and the order of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

_GATES = "mlp.experts.gate_up_proj"


@dataclass(frozen=True)
class FileFamily:
    """How models of a type become files.

    Attributes:
        architecture: llama.cpp's name.
        interleaved: Whether llama.cpp rotates neighbours in them.
        offset_norms: Whether transformers adds 1 to the weights of norms, which files have added already.
    """

    architecture: str
    interleaved: bool = False
    offset_norms: bool = False


#: By the model type of their configuration.
FAMILIES = {
    "llama": FileFamily("llama", interleaved=True),
    "mistral": FileFamily("llama", interleaved=True),
    "ministral3": FileFamily("mistral3", interleaved=True),
    "qwen2": FileFamily("qwen2"),
    "qwen3": FileFamily("qwen3"),
    "qwen3_moe": FileFamily("qwen3moe"),
    "phi3": FileFamily("phi3"),
    "gpt_oss": FileFamily("gpt-oss"),
    "gemma2": FileFamily("gemma2", offset_norms=True),
    "gemma3_text": FileFamily("gemma3", offset_norms=True),
}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file.

    Attributes:
        name: llama.cpp's name.
        stock: The name of the tensor of transformers that it is, or is a part of.
        arranged: Makes the file's array of that of transformers.
        offset: What is added to each number.
    """

    name: str
    stock: str
    arranged: Callable[[np.ndarray], np.ndarray]
    offset: int = 0

    def rows(self, weight: Tensor) -> np.ndarray:
        """The file's array, float32, of the tensor of transformers."""
        rows = self.arranged(weight.float().numpy())
        return rows + np.float32(self.offset) if self.offset else rows


def is_matrix(name: str) -> bool:
    """Whether a tensor of a file may be rounded. Norms, biases, sinks and routers stay float32."""
    return not any(part in name for part in ("norm", ".bias", "attn_sinks", ".ffn_gate_inp.", "rope_"))


def file_tensors(config: Any, names: Iterable[str]) -> Iterator[FileTensor]:
    """The tensors of the file of a model. A tied head is none of them.

    Args:
        config: transformers' configuration of the model.
        names: transformers' names of its tensors.
    """
    import gguf

    family = FAMILIES[config.model_type]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}

    def named(stock: str) -> str:
        found: str | None = known.get_name(stock, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"the gguf package has a name for {stock}"
        return found

    for stock in names:
        if stock == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".mlp.experts." in stock:
            yield from _expert_tensors(config, stock, named)
        elif stock.endswith(".sinks"):
            yield FileTensor(f"{named(stock)}.weight", stock, _as_it_is)
        else:
            count = next((n for part, n in heads.items() if part in stock and family.interleaved), None)
            offset = int(family.offset_norms and "norm" in stock)
            yield FileTensor(named(stock), stock, _as_it_is if count is None else Paired(count), offset)


def _expert_tensors(config: Any, stock: str, named: Callable[[str], str]) -> Iterator[FileTensor]:
    """Gates and values of all experts, which lie apart in files, or their projections back."""
    plain = stock.removesuffix("_bias")
    kind = "weight" if plain == stock else "bias"
    in_turn = turned = config.model_type == "gpt_oss"  # in transformers
    turned = turned and kind == "weight"
    if not plain.endswith(_GATES):
        yield FileTensor(named(f"{plain}.{kind}"), stock, _turned if turned else _as_it_is)
        return
    for part, projection in enumerate(("gate_proj", "up_proj")):
        name = named(f"{plain.replace('gate_up_proj', projection)}.{kind}")
        yield FileTensor(name, stock, _Part(part, in_turn=in_turn, turned=turned))


def _as_it_is(rows: np.ndarray) -> np.ndarray:
    return rows


def _turned(experts: np.ndarray) -> np.ndarray:
    return experts.swapaxes(1, 2)


@dataclass(frozen=True)
class _Part:
    """Gates (0) or values (1) of the rows of all experts."""

    part: int
    in_turn: bool
    turned: bool

    def __call__(self, experts: np.ndarray) -> np.ndarray:
        rows = _turned(experts) if self.turned else experts
        if self.in_turn:
            return rows[:, self.part :: 2]
        found: np.ndarray = np.split(rows, 2, axis=1)[self.part]
        return found


@dataclass(frozen=True)
class Paired:
    """Rows [num_heads * head_dim, ...] with the halves of each head interleaved, since llama.cpp rotates neighbours."""

    num_heads: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(self.num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

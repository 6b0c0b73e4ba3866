"""How the numbers of tensors lie in GGUF files where they lie otherwise than in transformers: orders of rows and columns,
and what llama.cpp's converter computes beforehand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Gives the places of a file's rows or columns, in the order of transformers, for a configuration.
Places = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Arrangement:
    """Says how a tensor of transformers is made of one of a file."""

    rows: Places | None = None  # the rows that it has. None for all in their order.
    columns: Places | None = None  # the columns. None for all in their order.
    floats: Callable[[Tensor], Tensor] | None = None  # changes numbers, which are floats and no blocks
    flat: bool = False  # whether the file has it as rows, and transformers all rows as one


#: How the names of tensors of a layer begin in transformers.
_OF_A_LAYER = re.compile(r"^(model|backbone)\.layers\.[^.]*\.")
#: By the name of a tensor in a layer of transformers, without its ending.
Arranged = Mapping[str, Arrangement]
_AS_IT_IS = Arrangement()


def arrangement_of(arranged: Arranged, stock: str) -> Arrangement:
    """Returns the arrangement of a tensor by transformers' name."""
    return arranged.get(layer_name(stock), _AS_IT_IS)


def layer_name(stock: str) -> str:
    """The name of a tensor of transformers in its layer, without its ending."""
    return _OF_A_LAYER.sub("", stock).removesuffix(".weight").removesuffix(".bias")


def row_order(arranged: Arranged, stock: str, config: Any) -> Tensor | None:
    """The rows of a file that a tensor of transformers has. None where it has all in their order."""
    rows = arrangement_of(arranged, stock).rows
    return None if rows is None else rows(config)


def column_order(arranged: Arranged, stock: str, config: Any) -> Tensor | None:
    """The columns of a file that a tensor of transformers has. None where it has all in their order."""
    columns = arrangement_of(arranged, stock).columns
    return None if columns is None else columns(config)


@dataclass(frozen=True)
class Joined:
    """A tensor of transformers whose parts are tensors of a file, which are named by their numbers."""

    shapes: Callable[[Any], list[tuple[int, ...]]]  # those of the parts, for a configuration
    join: Callable[[list[Tensor]], Tensor]  # makes the tensor of its parts
    by_rows: bool = False  # whether blocks of the parts are those of the tensor. Otherwise it becomes floats.


# --- What unfolds latent keys and values: keys of each head the other way round, then values. Both are the rows of a head
# in transformers.


def _unfolding_shapes(config: Any) -> list[tuple[int, ...]]:
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    return [(heads, latent, config.qk_nope_head_dim), (heads, config.v_head_dim, latent)]


def _unfolding(parts: list[Tensor]) -> Tensor:
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


def _shared_shapes(config: Any) -> list[tuple[int, ...]]:
    return [(config.shared_intermediate_size, config.hidden_size)] * 2


# --- The experts of Llama 4, whose projections lie the other way round in transformers.


def _turned_shapes(config: Any) -> list[tuple[int, ...]]:
    return [(config.num_local_experts, config.intermediate_size, config.hidden_size)] * 2


def _turned_back_shapes(config: Any) -> list[tuple[int, ...]]:
    return [(config.num_local_experts, config.hidden_size, config.intermediate_size)]


def _turned(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1).transpose(1, 2).contiguous()


TURNED_EXPERTS = {
    "feed_forward.experts.gate_up_proj": Joined(_turned_shapes, _turned),
    "feed_forward.experts.down_proj": Joined(_turned_back_shapes, _turned),
}
#: Gates and values of Granite's feed-forward.
GATES_AND_VALUES = {"shared_mlp.input_linear": Joined(_shared_shapes, torch.cat, by_rows=True)}
UNFOLDING = {"self_attn.kv_b_proj": Joined(_unfolding_shapes, _unfolding)}


# --- Heads whose rows are interleaved in a file, since llama.cpp rotates neighbours.


def _halves_of(heads: str) -> Arrangement:
    def rows(config: Any) -> Tensor:
        count = getattr(config, heads)
        return torch.arange(count * config.head_dim).reshape(count, -1, 2).transpose(1, 2).flatten()

    return Arrangement(rows)


ROTATED = {
    "self_attn.q_proj": _halves_of("num_attention_heads"),
    "self_attn.k_proj": _halves_of("num_key_value_heads"),
}


# --- Queries, keys and values that are one tensor in a file, one behind another.


def _part_of_three(which: int) -> Arrangement:
    def rows(config: Any) -> Tensor:
        counts = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        return torch.arange(sum(counts[:which]) * config.head_dim, sum(counts[: which + 1]) * config.head_dim)

    return Arrangement(rows)


QUERIES_KEYS_VALUES = {f"self_attn.{name}_proj": _part_of_three(which) for which, name in enumerate("qkv")}


# --- The gated delta rule. Where several heads of values share one of keys, files of Qwen3.5 have the first heads of all
# keys, then the second ones, so that ggml may repeat keys as a whole. Transformers has all heads of the first key, then
# those of the second. Files have the rates themselves, and transformers has their logarithms.


def _logarithms(rates: Tensor) -> Tensor:
    """Those of rates below 0, and not finite for others. Models compute the rates again, in float32, so logarithms are
    chosen that give the bits of the file: numbers of 16 bits where there are such, since most models have been in them."""
    near = (-rates).double().log().float()
    found, infinity = near, torch.tensor(torch.inf)
    for logs in (near.nextafter(-infinity), near.nextafter(infinity), near, near.bfloat16().float()):
        found = torch.where(logs.exp() == -rates, logs, found)
    return found


#: Of the scan of Mamba-2, whose norm has a row for each group in files.
SCANS = {"mamba.A_log": Arrangement(floats=_logarithms), "mamba.norm": Arrangement(flat=True)}
SCANS_ALONE = {name.replace("mamba.", "mixer."): arranged for name, arranged in SCANS.items()}


def _by_keys(config: Any, size: int) -> Tensor:
    """The places of heads of values, of `size` numbers each, one key after another."""
    keys = config.linear_num_key_heads
    each = config.linear_num_value_heads // keys
    return torch.arange(keys * each * size).reshape(each, keys, size).transpose(0, 1).flatten()


def _values(config: Any) -> Tensor:
    return _by_keys(config, config.linear_value_head_dim)


def _behind_keys(config: Any) -> Tensor:
    """Queries and keys, then values."""
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([torch.arange(before), before + _values(config)])


def _heads(config: Any) -> Tensor:
    return _by_keys(config, 1)


RATES = {"linear_attn.A_log": Arrangement(floats=_logarithms), "linear_attn.norm": Arrangement()}
#: Of Qwen3.5.
DELTA_BY_TURNS = {
    **dict.fromkeys(("linear_attn.in_proj_qkv", "linear_attn.conv1d"), Arrangement(_behind_keys)),
    **dict.fromkeys(("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.dt_bias"), Arrangement(_heads)),
    "linear_attn.in_proj_z": Arrangement(_values),
    "linear_attn.out_proj": Arrangement(columns=_values),
    "linear_attn.A_log": Arrangement(_heads, floats=_logarithms),
    "linear_attn.norm": Arrangement(),
}


def _of_each_key(which: int) -> Places:
    """Gates of steps (0) or the steps (1), of which a tensor holds both for one key after another."""

    def rows(config: Any) -> Tensor:
        keys = config.linear_num_key_heads
        return torch.arange(2 * config.linear_num_value_heads).reshape(keys, 2, -1)[:, which].flatten()

    return rows


#: Of Qwen3-Next.
DELTA_BY_KEYS = {
    **RATES,
    "linear_attn.in_proj_b": Arrangement(_of_each_key(0)),
    "linear_attn.in_proj_a": Arrangement(_of_each_key(1)),
}

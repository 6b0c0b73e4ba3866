"""What a family of models is in files of llama.cpp: names of values and tensors, orders of rows, and rotary positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import UnsupportedModelError

Rows = Callable[[np.ndarray], np.ndarray]
#: Writes values of a configuration.
Describe = Callable[[Any, Any], None]


# --- What a family is, and a tensor of its files.


@dataclass(frozen=True)
class Change:
    """A change of numbers, and what undoes it."""

    do: Rows = lambda rows: rows
    undo: Rows = lambda rows: rows


AS_IT_IS = Change()
PLUS_ONE = Change(lambda rows: rows + np.float32(1), lambda rows: rows - np.float32(1))
RATE = Change(lambda logs: -torch.from_numpy(logs).exp().numpy(), lambda rates: torch.from_numpy(-rates).log().numpy())
#: What a tensor of a folder becomes: the name that the gguf package knows, the part of it, and a change of its numbers.
Part = tuple[str, Rows, Change]
#: By the name of a tensor in its layer. Others are written as they are.
Parts = Mapping[str, list[Part]]


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file."""

    name: str  # llama.cpp's name
    stock: str  # the name of the tensor of transformers that it is, or is a part of
    arranged: Rows  # makes the file's array of that of transformers
    change: Change = AS_IT_IS  # of its numbers

    def rows(self, weight: Tensor) -> np.ndarray:
        """The file's array, float32, of the tensor of transformers."""
        return self.change.do(self.arranged(weight.float().numpy()))


def whole(rows: np.ndarray) -> np.ndarray:
    """All of a tensor, as it lies."""
    return rows


def half(which: int, axis: int = 1) -> Rows:
    """One of the two that lie behind one another: by default gates (0) and values (1) of all experts."""
    return lambda rows: np.split(rows, 2, axis=axis)[which]


#: The writer's methods for values of configurations, by their names.
COMMON = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    **dict.fromkeys(("rms_norm_eps", "norm_eps"), "layer_norm_rms_eps"),
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon"), "layer_norm_eps"),
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
#: What becomes of tensors that several families have: of experts, of routers and their biases, and of a convolution.
_USUAL: Parts = {
    "mlp.experts.gate_up_proj": [
        (f"mlp.experts.{name}_proj", half(which), AS_IT_IS) for which, name in enumerate(("gate", "up"))
    ],
    "mlp.gate.e_score_correction_bias": [("mlp.gate.e_score_correction", whole, AS_IT_IS)],
    "block_sparse_moe.experts.gate_up_proj": [
        (f"block_sparse_moe.experts.{name}", half(which), AS_IT_IS) for which, name in enumerate(("w1", "w3"))
    ],
    "block_sparse_moe.experts.down_proj": [("block_sparse_moe.experts.w2", whole, AS_IT_IS)],
    "block_sparse_moe.router": [("block_sparse_moe.router.layer", whole, AS_IT_IS)],
    "feed_forward.experts.gate_up_proj": [
        (f"feed_forward.experts.{name}_proj", half(which), AS_IT_IS) for which, name in enumerate(("gate", "up"))
    ],
    "feed_forward.expert_bias": [("feed_forward.expert_bias", whole, AS_IT_IS)],
    "conv.conv": [("conv.conv", lambda taps: taps[:, 0], AS_IT_IS)],
    "mlp.gate.moe_statics.e_score_correction_bias": [
        ("mlp.moe_statics.e_score_correction", lambda bias: bias[0], AS_IT_IS)
    ],
    "mlp.e_score_correction_bias": [("block_sparse_moe.e_score_correction", whole, AS_IT_IS)],
}


def describe_heads(writer: Any, config: Any) -> None:
    """Write the widths of heads, and how they are rotated."""
    head_dim = head_width(config)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    describe_rope(writer, config, head_dim)


def describe_nothing(writer: Any, config: Any) -> None:
    """Write nothing more."""


def describe_sigmoid(writer: Any, config: Any) -> None:
    """Write that experts are scored by sigmoid."""
    import gguf

    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


@dataclass(frozen=True)
class FileFamily:
    """Says how models of a type become files."""

    architecture: str  # llama.cpp's name
    values: Mapping[str, str | None] = field(default_factory=dict)  # more of `COMMON`; None for what `described` writes
    described: Describe = describe_nothing  # writes other values
    parts: Callable[[Any], Parts] = lambda config: {}  # what becomes of tensors, for a configuration
    norms: Change = AS_IT_IS  # of norms that `parts` does not name
    heads: Describe = field(default=describe_heads)  # writes the widths of heads, and how they are rotated
    # The fields of a configuration that its tensors have taken in, and that a reader finds otherwise.
    unread: Callable[[Any], tuple[str, ...]] = lambda config: ()
    # llama.cpp's name of the last norm of layers that predict several tokens; None where files have no such layers.
    predicted_norm: str | None = None

    def describe(self, writer: Any, config: Any, behind: int = 0) -> None:
        """Write what a file says of the shape of a model, and of so many layers behind its own that predict several
        tokens."""
        names = {name: method for name, method in {**COMMON, **self.values}.items() if method is not None}
        found = {method: getattr(config, name) for name, method in names.items() if getattr(config, name, None) is not None}
        if behind:
            found |= {"block_count": config.num_hidden_layers + behind, "nextn_predict_layers": behind}
        for method, value in found.items():
            getattr(writer, f"add_{method}")(value)
        self.heads(writer, config)
        self.described(writer, config)

    def tensors(self, config: Any, names: Iterable[str], num_layers: int | None = None) -> Iterator[FileTensor]:
        """The tensors of the file of a model, by transformers' names of its tensors. A tied head is none of them. Layers
        may have numbers behind those of the model, below `num_layers`."""
        import gguf

        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        known = gguf.get_tensor_name_map(arch, num_layers or config.num_hidden_layers)
        rules = self.parts(config)
        for stock in names:
            if stock == "lm_head.weight" and config.tie_word_embeddings:
                continue
            prefix, part = _parted(stock)
            plain = part.removesuffix(".weight").removesuffix(".bias")
            usual = (plain.removesuffix("_bias"), whole, self.norms if stock.endswith("norm.weight") else AS_IT_IS)
            for name, arranged, change in rules.get(plain, _USUAL.get(plain, [usual])):
                found = known.get_name(prefix + name) or known.get_name(f"backbone.{prefix.removeprefix('model.')}{name}")
                if found is None:
                    problem = f"files of {self.architecture} have no tensor for {stock}"
                    raise UnsupportedModelError(str(config.name_or_path), problem, "No GGUF is written for such a model.")
                ending = "" if name.endswith(".weight") else _ending(stock)  # some names are whole
                yield FileTensor(found + ending, stock, arranged, change)


def _parted(stock: str) -> tuple[str, str]:
    """What stands before the name of a tensor in its layer, and this name."""
    found = re.match(r"(model|backbone)\.layers\.\d+\.", stock)
    return ("", stock) if found is None else (found[0], stock[found.end() :])


def _ending(stock: str) -> str:
    if stock.endswith(("A_log", "D")):
        return ""
    if stock.endswith(("router.scale", "expert_scale")):
        return ".scale"
    return ".bias" if "bias" in stock else ".weight"


# --- Rotary positions.


#: Those with latent keys and values, whose files say no ends of a ramp.
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3")


def head_width(config: Any) -> int:
    """The dimensions of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary positions of its layers without a window; the default ones where it says nothing."""
    found: dict[str, Any] = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    full: dict[str, Any] = found.get("full_attention", found)
    return full


def describe_rope(writer: Any, config: Any, head_dim: int) -> None:
    """Write how heads of this width are rotated."""
    import gguf

    rope = rope_of(config)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "yarn" and config.model_type not in _LATENT_TYPES:
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    if kind == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        writer.add_rope_scaling_attn_factors(ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")[1])


@dataclass(frozen=True)
class Paired:
    """Rows [num_heads * head_dim, ...] with the halves of each head interleaved, since llama.cpp rotates neighbours."""

    num_heads: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(self.num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def rotated(config: Any) -> Parts:
    """Halves of heads in turn, for which llama.cpp rotates neighbours."""
    counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return {f"self_attn.{name}": [(f"self_attn.{name}", Paired(count), AS_IT_IS)] for name, count in counts.items()}

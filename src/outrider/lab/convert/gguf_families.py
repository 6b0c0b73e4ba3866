"""How llama.cpp's converter writes a family of models: the names of its values and tensors, and the orders of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    "rms_norm_eps": "layer_norm_rms_eps",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
#: The projections and the bias of a router that families of experts share.
EXPERTS: Parts = {
    "mlp.experts.gate_up_proj": [
        (f"mlp.experts.{name}_proj", half(which), AS_IT_IS) for which, name in enumerate(("gate", "up"))
    ],
    "mlp.gate.e_score_correction_bias": [("mlp.gate.e_score_correction", whole, AS_IT_IS)],
}


def describe_heads(writer: Any, config: Any) -> None:
    """Write the widths of heads, and how they are rotated."""
    head_dim = head_width(config)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    describe_rope(writer, config, head_dim)


def describe_nothing(writer: Any, config: Any) -> None:
    """Write nothing more."""


@dataclass(frozen=True)
class FileFamily:
    """Says how models of a type become files."""

    architecture: str  # llama.cpp's name
    values: Mapping[str, str | None] = field(default_factory=dict)  # more of `COMMON`; None for what `described` writes
    described: Describe = describe_nothing  # writes other values
    parts: Callable[[Any], Parts] = lambda config: {}  # what becomes of tensors, for a configuration
    norms: Change = AS_IT_IS  # of norms that `parts` does not name
    heads: Describe = field(default=describe_heads)  # writes the widths of heads, and how they are rotated

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
            for name, arranged, change in rules.get(plain, EXPERTS.get(plain, [usual])):
                found = known.get_name(prefix + name) or known.get_name(f"backbone.{prefix.removeprefix('model.')}{name}")
                assert found is not None, f"the gguf package has a name for {prefix + name}"
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


def _describe_temperature(writer: Any, config: Any) -> None:
    """Ministral's temperature of attention."""
    rope = rope_of(config)
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"] if rope.get("mscale") else 0.0)
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _describe_window(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)


def _describe_gemma(writer: Any, config: Any) -> None:
    _describe_window(writer, config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            getattr(writer, f"add_{name}")(getattr(config, name))


def _describe_gpt_oss(writer: Any, config: Any) -> None:
    _describe_window(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _gpt_oss_parts(config: Any) -> Parts:
    """Experts whose projections lie the other way round in transformers, gates and values in turn."""

    def turned(experts: np.ndarray) -> np.ndarray:
        return experts.swapaxes(1, 2)

    def in_turn(which: int, rows: Rows) -> Rows:
        return lambda experts: rows(experts)[:, which::2]

    names = list(enumerate(("gate_proj", "up_proj")))
    return {
        "mlp.experts.gate_up_proj": [(f"mlp.experts.{name}", in_turn(one, turned), AS_IT_IS) for one, name in names],
        "mlp.experts.gate_up_proj_bias": [(f"mlp.experts.{name}", in_turn(one, whole), AS_IT_IS) for one, name in names],
        "mlp.experts.down_proj": [("mlp.experts.down_proj", turned, AS_IT_IS)],
    }


# --- The gated delta rule of Qwen3.5.


def describe_delta(writer: Any, config: Any) -> None:
    """Write the shape of a gated delta rule, and which layers have it."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(attention_interval(config))


def attention_interval(config: Any) -> int:
    """Every how many layers one attends, if that is how they are ordered; 0 for another order."""
    kinds = config.layer_types
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    wanted = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(len(kinds))]
    return every if kinds == wanted else 0


def _describe_qwen35(writer: Any, config: Any) -> None:
    describe_delta(writer, config)
    writer.add_rope_dimension_sections([*rope_of(config).get("mrope_section", (11, 11, 10)), 0])


def squeezed(taps: np.ndarray) -> np.ndarray:
    """The taps of a convolution [channels, taps], or its bias."""
    return taps[:, 0] if taps.ndim == 3 else taps


def _delta_by_turns(config: Any) -> Parts:
    """The first heads of values of all keys, then the second ones."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    before = 2 * keys * config.linear_key_head_dim

    def turned(rows: np.ndarray, size: int = size) -> np.ndarray:
        return rows.reshape(keys, -1, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    def behind(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([rows[:before], turned(rows[before:])])

    def single(rows: np.ndarray) -> np.ndarray:
        return turned(rows, 1)

    found: dict[str, Part] = {
        "in_proj_qkv": ("in_proj_qkv", behind, AS_IT_IS),
        "in_proj_z": ("in_proj_z", turned, AS_IT_IS),
        "in_proj_a": ("in_proj_a", single, AS_IT_IS),
        "in_proj_b": ("in_proj_b", single, AS_IT_IS),
        "A_log": ("A_log", single, RATE),
        "dt_bias": ("dt_proj", single, AS_IT_IS),
        "conv1d": ("conv1d", lambda taps: behind(squeezed(taps)), AS_IT_IS),
        "norm": ("norm", whole, AS_IT_IS),
        "out_proj": ("out_proj", lambda rows: turned(rows.T).T, AS_IT_IS),
    }
    return {f"linear_attn.{name}": [(f"linear_attn.{part[0]}", *part[1:])] for name, part in found.items()}


# --- Routers with a bias, and latent keys and values, as in DeepSeek-V3 and GLM-4.5.


ROUTED = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
LATENT = {"q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank"}
_GROUPS = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3")


def describe_sigmoid(writer: Any, config: Any) -> None:
    """Write that experts are scored by sigmoid."""
    import gguf

    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def describe_latent(writer: Any, config: Any) -> None:
    """Write the widths of latent keys and values, which are one head of keys in files."""
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    describe_rope(writer, config, config.qk_rope_head_dim)
    if rope_of(config)["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope_of(config)["mscale_all_dim"])


def latent_parts(config: Any) -> Parts:
    """Keys of all heads the other way round, and values."""

    def rows(which: slice) -> Rows:
        heads, latent = config.num_attention_heads, config.kv_lora_rank
        return lambda both: both.reshape(heads, -1, latent)[:, which]

    keys, values = rows(slice(config.qk_nope_head_dim)), rows(slice(config.qk_nope_head_dim, None))
    return {
        "self_attn.kv_b_proj": [
            ("self_attn.k_b_proj", lambda both: keys(both).swapaxes(1, 2), AS_IT_IS),
            ("self_attn.v_b_proj", values, AS_IT_IS),
        ]
    }


# --- The families.


_COMPRESSED: dict[str, Any] = {"heads": describe_latent, "parts": latent_parts}
_KEYS = {"num_key_value_heads": None}
_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
#: By the model type of their configuration.
FAMILIES = {
    "llama": FileFamily("llama", parts=rotated),
    "mistral": FileFamily("llama", parts=rotated),
    "ministral3": FileFamily("mistral3", described=_describe_temperature, parts=rotated),
    "qwen2": FileFamily("qwen2"),
    "qwen3": FileFamily("qwen3"),
    "qwen3_moe": FileFamily("qwen3moe"),
    "phi3": FileFamily("phi3", described=_describe_window),
    "gpt_oss": FileFamily("gpt-oss", described=_describe_gpt_oss, parts=_gpt_oss_parts),
    "gemma2": FileFamily("gemma2", described=_describe_gemma, norms=PLUS_ONE),
    "gemma3_text": FileFamily("gemma3", described=_describe_gemma, norms=PLUS_ONE),
    "qwen3_5_text": FileFamily("qwen35", {}, _describe_qwen35, _delta_by_turns, PLUS_ONE),
    "qwen3_5_moe_text": FileFamily("qwen35moe", _SHARED, _describe_qwen35, _delta_by_turns, PLUS_ONE),
    "deepseek_v3": FileFamily("deepseek2", {**ROUTED, **LATENT, **_GROUPS, **_KEYS}, describe_sigmoid, **_COMPRESSED),
    "glm4_moe": FileFamily("glm4moe", ROUTED, describe_sigmoid),
}

"""How llama.cpp's converter writes families that nothing is converted to here: names by the gguf package, and its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.lab.convert.gguf import FileTensor, Paired
from tests.model import checkpoints

Rows = Callable[[np.ndarray], np.ndarray]
#: What a tensor of a folder becomes: the name that the gguf package knows, the part of it, and a change of its numbers.
Part = tuple[str, Rows, "Change"]


@dataclass(frozen=True)
class Change:
    """A change of numbers, and what undoes it."""

    do: Rows = lambda rows: rows
    undo: Rows = lambda rows: rows


AS_IT_IS = Change()
PLUS_ONE = Change(lambda rows: rows + np.float32(1), lambda rows: rows - np.float32(1))
RATE = Change(lambda logs: -torch.from_numpy(logs).exp().numpy(), lambda rates: torch.from_numpy(-rates).log().numpy())


@dataclass(frozen=True)
class ChangedTensor(FileTensor):
    """A tensor of a file whose numbers are others than those of the folder."""

    change: Change = AS_IT_IS

    def rows(self, weight: Any) -> np.ndarray:
        """The file's array, float32, of the tensor of transformers."""
        return self.change.do(self.arranged(weight.float().numpy()))


@dataclass(frozen=True)
class WrittenFamily:
    """How a family becomes files.

    Attributes:
        architecture: llama.cpp's name.
        values: The writer's methods for values of the configuration, by their names; None for what `described` writes.
        described: Writes other values.
        parts: By the name of a tensor in its layer, what it becomes. Others are written as they are.
        norms: The change of norms that `parts` does not name.
    """

    architecture: str
    values: dict[str, str | None] = field(default_factory=dict)
    described: Callable[[Any, Any], None] = lambda writer, config: None
    parts: Callable[[Any], dict[str, list[Part]]] = lambda config: {}
    norms: Change = AS_IT_IS

    def describe(self, writer: Any, config: Any) -> None:
        """Write what a file says of the shape of a model."""
        for name, method in (COMMON | self.values).items():
            value = getattr(config, name, None)
            if value is not None and method is not None:
                getattr(writer, f"add_{method}")(value)
        rope = config.rope_parameters
        if "rope_theta" in rope:  # else layers differ
            for method in ("key_length", "value_length"):
                getattr(writer, f"add_{method}")(config.head_dim)
            writer.add_rope_freq_base(rope["rope_theta"])
            writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 1.0)))
        self.described(writer, config)

    def tensors(self, config: Any, names: Iterable[str]) -> Iterator[FileTensor]:
        """The tensors of the file of a model, by transformers' names of its tensors."""
        import gguf

        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        rules = self.parts(config)
        for stock in names:
            if stock == "lm_head.weight" and config.tie_word_embeddings:
                continue
            prefix, part = _parted(stock)
            kind = "" if stock.endswith(("A_log", "D")) else ".bias" if "bias" in stock else ".weight"
            kind = ".scale" if stock.endswith(("router.scale", "expert_scale")) else kind
            plain = part.removesuffix(".weight").removesuffix(".bias")
            for name, arranged, change in rules.get(plain, EXPERTS.get(plain, [(plain, _whole, self._usual(stock))])):
                found = known.get_name(prefix + name)
                assert found is not None, f"the gguf package has a name for {prefix + name}"
                yield ChangedTensor(found + kind, stock, arranged, change=change)

    def _usual(self, stock: str) -> Change:
        return self.norms if stock.endswith("norm.weight") else AS_IT_IS


def save(family: str, path: Path, **changes: Any) -> str:
    """A checkpoint whose routers have biases, which new models have not."""
    from transformers import AutoModelForCausalLM

    if family.startswith("gemma4") and "vocab_size" in changes:
        changes["vocab_size_per_layer_input"] = changes["vocab_size"]
    source = checkpoints.save(family.partition(":")[0], path, seed=1, **changes)
    model = AutoModelForCausalLM.from_pretrained(source)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith(("e_score_correction_bias", "expert_bias"))]
    for bias in biases:
        bias.copy_(0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(2)))
    if biases:
        model.save_pretrained(source)
    return source


def _parted(stock: str) -> tuple[str, str]:
    """What stands before the name of a tensor in its layer, and this name."""
    if not stock.startswith("model.layers."):
        return "", stock
    number, _, part = stock.removeprefix("model.layers.").partition(".")
    return f"model.layers.{number}.", part


def _whole(rows: np.ndarray) -> np.ndarray:
    return rows


def half(which: int, axis: int = 1) -> Rows:
    """One of the two that lie behind one another: by default gates (0) and values (1) of all experts."""
    return lambda rows: np.split(rows, 2, axis=axis)[which]


COMMON = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "norm_eps": "layer_norm_rms_eps",
    "layer_norm_eps": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
EXPERTS: dict[str, list[Part]] = {
    "mlp.experts.gate_up_proj": [
        (f"mlp.experts.{name}_proj", half(which), AS_IT_IS) for which, name in enumerate(("gate", "up"))
    ],
    "mlp.experts.down_proj": [("mlp.experts.down_proj", _whole, AS_IT_IS)],
    "block_sparse_moe.experts.gate_up_proj": [
        (f"block_sparse_moe.experts.{name}", half(which), AS_IT_IS) for which, name in enumerate(("w1", "w3"))
    ],
    "block_sparse_moe.experts.down_proj": [("block_sparse_moe.experts.w2", _whole, AS_IT_IS)],
    "block_sparse_moe.router": [("block_sparse_moe.router.layer", _whole, AS_IT_IS)],
    "feed_forward.experts.gate_up_proj": [
        (f"feed_forward.experts.{name}_proj", half(which), AS_IT_IS) for which, name in enumerate(("gate", "up"))
    ],
    "feed_forward.expert_bias": [("feed_forward.expert_bias", _whole, AS_IT_IS)],
    "conv.conv": [("conv.conv", lambda taps: taps[:, 0], AS_IT_IS)],
    "mlp.gate.moe_statics.e_score_correction_bias": [
        ("mlp.moe_statics.e_score_correction", lambda bias: bias[0], AS_IT_IS)
    ],
    "mlp.e_score_correction_bias": [("block_sparse_moe.e_score_correction", _whole, AS_IT_IS)],
    "mlp.gate.e_score_correction_bias": [("mlp.gate.e_score_correction", _whole, AS_IT_IS)],
}


# --- The gated delta rule.


def _describe_delta(writer: Any, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)


def _describe_qwen35(writer: Any, config: Any) -> None:
    _describe_delta(writer, config)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _squeezed(taps: np.ndarray) -> np.ndarray:
    return taps[:, 0] if taps.ndim == 3 else taps  # a bias


def _delta_by_turns(config: Any) -> dict[str, list[Part]]:
    """The first heads of values of all keys, then the second ones."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    before = 2 * keys * config.linear_key_head_dim

    def turned(rows: np.ndarray, size: int = size) -> np.ndarray:
        return rows.reshape(keys, -1, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    def behind(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([rows[:before], turned(rows[before:])])

    def single(rows: np.ndarray) -> np.ndarray:
        return turned(rows, 1)

    found: dict[str, tuple[str, Rows, Change]] = {
        "in_proj_qkv": ("in_proj_qkv", behind, AS_IT_IS),
        "in_proj_z": ("in_proj_z", turned, AS_IT_IS),
        "in_proj_a": ("in_proj_a", single, AS_IT_IS),
        "in_proj_b": ("in_proj_b", single, AS_IT_IS),
        "A_log": ("A_log", single, RATE),
        "dt_bias": ("dt_proj", single, AS_IT_IS),
        "conv1d": ("conv1d", lambda taps: behind(_squeezed(taps)), AS_IT_IS),
        "norm": ("norm", _whole, AS_IT_IS),
        "out_proj": ("out_proj", lambda rows: turned(rows.T).T, AS_IT_IS),
    }
    return {f"linear_attn.{name}": [(f"linear_attn.{part[0]}", *part[1:])] for name, part in found.items()}


def _delta_by_keys(config: Any) -> dict[str, list[Part]]:
    """Queries, keys and values of all heads, and their gates, of a projection that has them one key after another."""
    key = config.linear_key_head_dim
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim

    def each(begin: int, end: int) -> Rows:
        def found(rows: np.ndarray) -> np.ndarray:
            return rows.reshape(config.linear_num_key_heads, -1, rows.shape[1])[:, begin:end].reshape(-1, rows.shape[1])

        return found

    ends = (each(0, key), each(key, 2 * key), each(2 * key, 2 * key + values))
    found: dict[str, list[Part]] = {
        "in_proj_qkvz": [
            ("in_proj_qkv", lambda rows: np.concatenate([part(rows) for part in ends]), AS_IT_IS),
            ("in_proj_z", each(2 * key + values, 2 * (key + values)), AS_IT_IS),
        ],
        "A_log": [("A_log", _whole, RATE)],
        "dt_bias": [("dt_proj", _whole, AS_IT_IS)],
        "conv1d": [("conv1d", _squeezed, AS_IT_IS)],
        "norm": [("norm", _whole, AS_IT_IS)],
    }
    return {
        f"linear_attn.{name}": [(f"linear_attn.{part[0]}", *part[1:]) for part in parts] for name, parts in found.items()
    }


def _describe_sigmoid(writer: Any, config: Any) -> None:
    import gguf

    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _describe_minimax(writer: Any, config: Any) -> None:
    _describe_sigmoid(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)


_ROUTED = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}


def _describe_latent(writer: Any, config: Any) -> None:
    import gguf

    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    kind = "SIGMOID" if config.model_type == "deepseek_v3" else "SOFTMAX"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType[kind])


def _latent_parts(config: Any) -> dict[str, list[Part]]:
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


_LATENT = {"q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank"}
_GROUPS = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}


def _rotated(config: Any) -> dict[str, list[Part]]:
    """Halves of heads in turn, for which llama.cpp rotates neighbours."""
    counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return {f"self_attn.{name}": [(f"self_attn.{name}", Paired(count), AS_IT_IS)] for name, count in counts.items()}


def _describe_convolutions(writer: Any, config: Any) -> None:
    kinds = config.layer_types
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        _describe_sigmoid(writer, config)


def _describe_stablelm(writer: Any, config: Any) -> None:
    writer.add_parallel_residual(config.use_parallel_residual)


_MULTIPLIERS = {
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_SCAN = {
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "mamba_d_conv": "ssm_conv_kernel",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "ssm_group_count",
    "mamba_n_heads": "ssm_time_step_rank",
}


def _describe_scan(writer: Any, config: Any) -> None:
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * one for one in attends])
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_rope_scaling_finetuned(False)


def _scan_parts(config: Any) -> dict[str, list[Part]]:
    def column(values: np.ndarray) -> np.ndarray:
        return values[:, None]

    mlp = "mlp.shared_experts" if config.num_local_experts else "mlp"
    shared = [(f"{mlp}.{name}_proj", half(which, 0), AS_IT_IS) for which, name in enumerate(("gate", "up"))]
    return _rotated(config) | {
        "mamba.A_log": [("mamba.A_log", column, RATE)],
        "mamba.D": [("mamba.D", column, AS_IT_IS)],
        "mamba.dt_bias": [("mamba.dt_proj", _whole, AS_IT_IS)],
        "mamba.conv1d": [("mamba.conv1d", _squeezed, AS_IT_IS)],
        "mamba.norm": [("mamba.norm", lambda norm: norm.reshape(config.mamba_n_groups, -1), AS_IT_IS)],
        "shared_mlp.input_linear": shared,
        "shared_mlp.output_linear": [(f"{mlp}.down_proj", _whole, AS_IT_IS)],
    }


def _describe_gemma_4(writer: Any, config: Any) -> None:
    kinds, shared = config.layer_types, config.num_kv_shared_layers
    wide, narrow = (config.per_layer_config[kinds.index(f"{kind}_attention")] for kind in ("full", "sliding"))
    writer.add_key_length(wide.head_dim)
    writer.add_value_length(wide.head_dim)
    writer.add_key_length_swa(narrow.head_dim)
    writer.add_value_length_swa(narrow.head_dim)
    writer.add_head_count_kv([config.per_layer_config[layer].num_key_value_heads for layer in range(len(kinds))])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    size, own = config.intermediate_size, len(kinds) - shared if config.use_double_wide_mlp else len(kinds)
    writer.add_feed_forward_length([size if layer < own else 2 * size for layer in range(len(kinds))])
    writer.add_rope_dimension_count(wide.head_dim)
    writer.add_rope_dimension_count_swa(narrow.head_dim)
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_float32("gemma4.rope.freq_base_swa", sliding["rope_theta"])
    turning = int(wide.head_dim * full["partial_rotary_factor"] / 2)
    factors = [1.0] * turning + [1e30] * (wide.head_dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _gemma_4_parts(config: Any) -> dict[str, list[Part]]:
    """What scales the router and what experts give has the names of these, with an ending of its own."""
    return {
        "router.scale": [("router.proj", _whole, AS_IT_IS)],
        "router.per_expert_scale": [("experts.down_proj", _whole, AS_IT_IS)],
    }


def _describe_windows(writer: Any, config: Any) -> None:
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _describe_ernie(writer: Any, config: Any) -> None:
    writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)


def _describe_hunyuan(writer: Any, config: Any) -> None:
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)


_ERNIE = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_num_shared_experts": "expert_shared_count",
}
_WINDOWS = {"logit_scale": "logit_scale", "sliding_window": "sliding_window"}
_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_OF_LAYERS = {
    "num_key_value_heads": None, "intermediate_size": None, "final_logit_softcapping": "final_logit_softcapping",
    "top_k_experts": "expert_used_count",
}  # fmt: skip
#: By the model type of their configuration.
WRITTEN: dict[str, WrittenFamily] = {
    "qwen3_5_text": WrittenFamily("qwen35", {}, _describe_qwen35, _delta_by_turns, PLUS_ONE),
    "qwen3_5_moe_text": WrittenFamily("qwen35moe", _SHARED, _describe_qwen35, _delta_by_turns, PLUS_ONE),
    "qwen3_next": WrittenFamily("qwen3next", _SHARED, _describe_delta, _delta_by_keys, PLUS_ONE),
    "qwen2_moe": WrittenFamily("qwen2moe", _SHARED),
    "olmoe": WrittenFamily("olmoe"),
    "minimax_m2": WrittenFamily("minimax-m2", {}, _describe_minimax),
    "dots1": WrittenFamily("dots1", _ROUTED, _describe_sigmoid),
    "exaone4": WrittenFamily("exaone4", {}, _describe_windows),
    "seed_oss": WrittenFamily("seed_oss"),
    "ernie4_5": WrittenFamily("ernie4_5"),
    "hunyuan_v1_dense": WrittenFamily("hunyuan-dense"),
    "arcee": WrittenFamily("arcee", parts=_rotated),
    "nemotron": WrittenFamily("nemotron", {"norm_eps": "layer_norm_eps"}, norms=PLUS_ONE),
    "glm4": WrittenFamily("glm4"),
    "olmo2": WrittenFamily("olmo2"),
    "smollm3": WrittenFamily("smollm3", parts=_rotated),
    "granite": WrittenFamily("granite", _MULTIPLIERS, parts=_rotated),
    "granitemoe": WrittenFamily("granitemoe", _MULTIPLIERS, parts=_rotated),
    "granitemoehybrid": WrittenFamily("granitehybrid", _MULTIPLIERS | _SCAN, _describe_scan, _scan_parts),
    "ernie4_5_moe": WrittenFamily("ernie4_5-moe", _ERNIE, _describe_ernie),
    "hunyuan_v1_moe": WrittenFamily("hunyuan-moe", {"moe_topk": "expert_used_count"}, _describe_hunyuan),
    "cohere2": WrittenFamily("cohere2", _WINDOWS),
    "starcoder2": WrittenFamily("starcoder2"),
    "phi": WrittenFamily("phi2"),
    "stablelm": WrittenFamily("stablelm", {}, _describe_stablelm),
    "lfm2": WrittenFamily("lfm2", {}, _describe_convolutions),
    "lfm2_moe": WrittenFamily("lfm2moe", {"num_dense_layers": "leading_dense_block_count"}, _describe_convolutions),
    "gemma": WrittenFamily("gemma", norms=PLUS_ONE),
    "gemma4_text": WrittenFamily("gemma4", _OF_LAYERS, _describe_gemma_4, _gemma_4_parts),
    "deepseek_v3": WrittenFamily("deepseek2", _ROUTED | _LATENT | _GROUPS, _describe_latent, _latent_parts),
    "deepseek_v2": WrittenFamily("deepseek2", _ROUTED | _LATENT, _describe_latent, _latent_parts),
    "glm4_moe": WrittenFamily("glm4moe", _ROUTED, _describe_sigmoid),
}
#: Three heads of values for each of four of keys, so that no order of heads is its own inverse, and in blocks of 256
#: columns that hold several heads.
_HEADS: dict[str, Any] = {
    "layers": 4, "linear_num_value_heads": 12, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
_SMALL_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
_LATENTS: dict[str, Any] = {
    "q_lora_rank": 64, "kv_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 128,
    "head_dim": 32, "qk_head_dim": 96, "moe_intermediate_size": 256,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40, "mscale": 0.707,
    "mscale_all_dim": 0.707,
}  # fmt: skip
_SCANS: dict[str, Any] = {
    "layers": 4, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "shared_intermediate_size": 256,
    "attention_multiplier": 0.1, "position_embedding_type": None,
}  # fmt: skip
#: What a checkpoint of a family needs for a file, by the names of checkpoints and what sets it apart. llama.cpp has kernels
#: for some sizes alone.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _HEADS,
    "qwen3_5_moe_text": _HEADS | _SMALL_EXPERTS,
    "qwen3_next": _HEADS | _SMALL_EXPERTS,
    "qwen2_moe": _SMALL_EXPERTS | {"norm_topk_prob": False},
    "olmoe": {"intermediate_size": 256, "num_key_value_heads": 4},
    "minimax_m2": {},
    "dots1": {"moe_intermediate_size": 256, "routed_scaling_factor": 1.5, "num_key_value_heads": 4},
    "exaone4": {"layers": 4, "sliding_window": None, "layer_types": ["full_attention"] * 4},
    "exaone4:windows": {"layers": 4},
    "seed_oss": {"attention_bias": True},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "arcee": {},
    "nemotron": {},
    "glm4": {"attention_bias": True},
    "olmo2": {},
    "smollm3": {"layers": 4, "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": False},
    "granite": {},
    "granitemoe": {
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "embedding_multiplier": 3.0,
    },
    "granitemoehybrid": _SCANS,
    "granitemoehybrid:dense": _SCANS | {"num_local_experts": 0, "num_experts_per_tok": 0},
    "ernie4_5_moe": {"moe_intermediate_size": 256, "intermediate_size": 512},
    "hunyuan_v1_moe": {},
    "cohere2": {"layers": 4},
    "starcoder2": {"sliding_window": None},
    "phi": {"qk_layernorm": False},
    "stablelm": {"qk_layernorm": False, "use_qkv_bias": True},
    "stablelm_beside": {"qk_layernorm": False},
    "lfm2": {"layers": 4, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layers": 4, "moe_intermediate_size": 256},
    "gemma": {},
    "gemma4_text": {
        "layers": 4,
        "hidden_size_per_layer_input": 32,
        "final_logit_softcapping": 5.0,
        "use_double_wide_mlp": True,
    },
    "gemma4_text:experts": {
        "layers": 4,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 256,
        "attention_k_eq_v": True,
    },
    "deepseek_v3": _LATENTS | {"n_group": 2, "topk_group": 1, "rope_parameters": _YARN},
    "deepseek_v2": _LATENTS | {"norm_topk_prob": False},
    "glm4_moe": {"moe_intermediate_size": 256, "routed_scaling_factor": 1.5},
}

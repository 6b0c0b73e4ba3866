"""What a GGUF file says of the shape of its model, and the models that it cannot describe."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.convert.gguf_layout import FAMILIES
from outrider.errors import UnsupportedModelError
from outrider.model.loading.gguf.rotary import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS

#: The activation that llama.cpp takes, by model type; "silu" elsewhere.
_ACTIVATIONS = {"gemma2": "gelu_pytorch_tanh", "gemma3_text": "gelu_pytorch_tanh"}
#: The kinds of rotary positions that a file describes, by model type; "default" elsewhere.
_ROPES = {"llama": ("default", "linear", "yarn", "llama3"), "phi3": ("default", "longrope"), "gpt_oss": ("default", "yarn")}
_ROPES |= dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "gemma3_text"), ("default", "linear", "yarn"))
_ROPES |= {"ministral3": ("yarn",)}


def check_describable(checkpoint: str, config: Any) -> None:
    """Refuse a model that llama.cpp would compute in another way, or would not load.

    Raises:
        UnsupportedModelError: It is one.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        problem = f"no GGUF is written for {kind}"
        raise UnsupportedModelError(checkpoint, problem, f"Use one of {', '.join(FAMILIES)}.")
    rope, window = _rope(config), getattr(config, "sliding_window", None)
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    wanted = _ACTIVATIONS.get(kind, "silu")
    special = {
        f"rotary positions of the kind {rope['rope_type']}": rope["rope_type"] not in _ROPES.get(kind, ("default",)),
        f"the activation {activation}": activation != wanted,
        "a scale of its own in YaRN": rope["rope_type"] == "yarn" and not _is_usual_yarn(kind, rope),
        "a sliding window": kind in ("mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe")
        and window is not None
        and _is_used(config),
        "another order of windows": _windows(config) not in (None, getattr(config, "layer_types", None)),
        "another scale of its scores": getattr(config, "query_pre_attn_scalar", None) not in (None, _score_scale(config)),
        "weights of experts that do not add up to 1": not getattr(config, "norm_topk_prob", True),
        "layers without experts beside others": bool(getattr(config, "mlp_only_layers", None))
        or getattr(config, "decoder_sparse_step", 1) != 1,
        "another gate of its experts": kind == "gpt_oss" and (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0),
    }
    for name in (name for name, found in special.items() if found):
        raise UnsupportedModelError(checkpoint, f"it has {name}", "No GGUF is written for such a model.")


def describe(writer: Any, config: Any) -> None:
    """Write what a file says of the shape of a model."""
    head_dim = head_width(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _describe_rope(writer, config, head_dim)
    if config.model_type in ("gemma2", "gemma3_text", "gpt_oss", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.model_type.startswith("gemma") and getattr(config, name, None):
            getattr(writer, f"add_{name}")(getattr(config, name))
    if config.model_type in ("qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))


def frequency_factors(config: Any) -> dict[str, np.ndarray]:
    """The tensors with factors of rotary frequencies, float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = _rope(config)
    if rope["rope_type"] == "longrope":
        names = {SHORT_FACTORS: "short_factor", LONG_FACTORS: "long_factor"}
        return {name: np.array(rope[key], np.float32) for name, key in names.items()}
    if rope["rope_type"] != "llama3":
        return {}
    width = head_width(config)
    usual = rope["rope_theta"] ** -(np.arange(0, width, 2) / width)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return {FREQUENCY_FACTORS: (usual / scaled.double().numpy()).astype(np.float32)}


def head_width(config: Any) -> int:
    """The dimensions of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _describe_rope(writer: Any, config: Any, head_dim: int) -> None:
    import gguf

    rope = _rope(config)
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
    if kind == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"] if rope.get("mscale") else 0.0)
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        writer.add_rope_scaling_attn_factors(ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")[1])


def _rope(config: Any) -> dict[str, Any]:
    """The rotary positions of its layers without a window."""
    found: dict[str, Any] = config.rope_parameters
    whole: dict[str, Any] = found.get("full_attention", found)
    return whole


def _is_usual_yarn(kind: str, rope: dict[str, Any]) -> bool:
    """Whether readers of files know how it scales scores, and rounds the ends of its ramp."""
    names = ["attention_factor"]
    if kind != "ministral3" or not rope.get("mscale_all_dim") or rope.get("mscale") != 1.0:
        names += ["mscale", "mscale_all_dim"]
    scaled = any(rope.get(name) is not None for name in names)
    return not scaled and rope.get("truncate", True) is (kind != "gpt_oss")


def _is_used(config: Any) -> bool:
    """Whether its window is shorter than its context, and is used."""
    return bool(getattr(config, "use_sliding_window", True)) and config.sliding_window < config.max_position_embeddings


def _windows(config: Any) -> list[str] | None:
    """The order of the layers with windows that files mean. None for models without such layers."""
    every = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}.get(config.model_type)
    if every is None:
        return None
    layers = range(1, config.num_hidden_layers + 1)
    return ["sliding_attention" if layer % every else "full_attention" for layer in layers]


def _score_scale(config: Any) -> int:
    """The scale of scores that files mean: the width of heads, but in the largest Gemma the hidden size for each head."""
    largest = {"gemma2": 46, "gemma3_text": 62}.get(config.model_type)
    if config.num_hidden_layers == largest:
        return int(config.hidden_size // config.num_attention_heads)
    return head_width(config)

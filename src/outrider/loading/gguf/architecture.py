"""The architectures of GGUF files that are known, and what llama.cpp's converter does to each.

Files have llama.cpp's names of tensors and values. Where it rotates neighbours, the rows of queries and keys of each head
are interleaved in the file, and are put back here. What an architecture would mean otherwise is refused by name, and never
guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.loading.file_limits import check_file_limit
from outrider.loading.gguf.header import (
    AGAIN,
    FUSED,
    LAYER,
    ORIGINAL,
    WITH_EXPERTS,
    WITH_POST_NORMS,
    WITH_SINKS,
    GgufFile,
    Values,
)

# --- The rotary positions of GGUF files, as transformers' configurations describe them.
#
# A scaling is known by its name. Factors of frequencies are tensors of a file: those of "longrope" become lists of the
# configuration, and those of Llama 3.1 are divided by when the model is filled.


#: Factors of the rotary frequencies, which belong to no module of transformers.
FREQUENCY_FACTORS = "rope_freqs.weight"
#: Factors for texts within the original context, and for longer ones.
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_ORIGINAL_CONTEXT, _SCALED = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
#: By how much queries grow with the logarithm of their position, as in Llama 4.
TEMPERATURE = "attention.temperature_scale"
#: What llama.cpp takes where a file says nothing of them.
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
#: Values of YaRN that no converter of a known architecture writes, and what they are where they change nothing.
_LOG_MULTIPLIER = "yarn_log_multiplier"
_OF_YARN = {"yarn_ext_factor": 1.0, "yarn_attn_factor": None, _LOG_MULTIPLIER: 0.0}


def rope_parameters(
    values: Values, theta: float = 10_000.0, *, truncate: bool = True, weighs: bool = False
) -> dict[str, Any]:
    """Rotary positions by the scaling that a file names.

    Args:
        values: Of the file.
        theta: The base, where the file says none.
        truncate: Whether YaRN rounds the ends of its ramp to whole dimensions, as most models do.
        weighs: Whether files of this architecture may say how much YaRN's own scale of scores is to count.

    Raises:
        ModelLoadError: A value is missing, or is not what it has to be.
        UnsupportedModelError: The scaling is not known.
    """
    theta = values.number("rope.freq_base", theta)
    kind = values.get("rope.scaling.type")
    if kind in (None, "none"):
        if values.get("rope.scale_linear") not in (None, 1.0):
            raise values.refuse(f"{values.architecture}.rope.scale_linear")
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": values.number("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(values, theta, truncate=truncate, weighs=weighs)
    raise values.refuse(f"rotary positions that are scaled by {kind}")


def partial_rotary(values: Values, head_dim: int) -> float:
    """The part of a head that is rotated."""
    rotated = values.count("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise values.refuse(f"rotary positions of {rotated} of {head_dim} dimensions")
    return rotated / head_dim


def long_rope(values: Values, head_dim: int) -> dict[str, Any]:
    """Rotary positions of Phi-3: with factors for short texts and for long ones where the file has these.

    Raises:
        ModelLoadError: Factors are missing, or are none of these frequencies.
    """
    part = {"partial_rotary_factor": partial_rotary(values, head_dim)}
    theta = values.number("rope.freq_base", 10_000.0)
    found = [values.has(name) for name in (SHORT_FACTORS, LONG_FACTORS)]
    if not any(found):
        kind, scaled = values.get("rope.scaling.type"), values.get(_SCALED)
        if kind not in (None, "none") or scaled not in (None, 1.0):
            raise values.refuse(f"rotary positions that are scaled by {kind or scaled}, and no factors of frequencies")
        return part | {"rope_type": "default", "rope_theta": theta}
    original = values.count(_ORIGINAL_CONTEXT)
    count = int(head_dim * part["partial_rotary_factor"]) // 2
    rope = part | {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": _factors(values, SHORT_FACTORS, count),
        "long_factor": _factors(values, LONG_FACTORS, count),
        "original_max_position_embeddings": original,
        "factor": values.count("context_length") / original,
    }
    return rope if values.get(_SCALED) is None else rope | {"attention_factor": values.number(_SCALED)}


def tempered_rope(values: Values, head_dim: int) -> dict[str, Any]:
    """Rotary positions of Ministral 3, with the number by which queries of later positions grow.

    Raises:
        UnsupportedModelError: They are of another kind.
    """
    rope = rope_parameters(values, weighs=True)
    if partial_rotary(values, head_dim) != 1 or rope["rope_type"] != "yarn":
        raise values.refuse(f"{TEMPERATURE} and other rotary positions than those of YaRN")
    return rope | {"llama_4_scaling_beta": values.number(TEMPERATURE)}


def _yarn(values: Values, theta: float, *, truncate: bool, weighs: bool) -> dict[str, Any]:
    log_multiplier = values.get(f"rope.scaling.{_LOG_MULTIPLIER}")
    for name, plain in _OF_YARN.items():
        if values.get(f"rope.scaling.{name}") not in (None, plain) and not (weighs and name == _LOG_MULTIPLIER):
            raise values.refuse(f"rope.scaling.{name}={values.get(f'rope.scaling.{name}')!r}")
    betas = {name: values.number(f"rope.scaling.yarn_{name}", usual) for name, usual in _BETAS.items()}
    if log_multiplier:  # and the scale that it is compared with is 1, as llama.cpp takes it to be
        betas |= {"mscale": 1.0, "mscale_all_dim": values.number(f"rope.scaling.{_LOG_MULTIPLIER}")}
    return betas | {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": values.number("rope.scaling.factor"),
        "original_max_position_embeddings": values.count(_ORIGINAL_CONTEXT),
        "truncate": truncate,
    }


def _factors(values: Values, name: str, count: int) -> list[float]:
    tensor = values.file.tensors.get(name)
    if tensor is None:
        raise ModelLoadError(values.file.path, f"the tensor {name} is missing", AGAIN)
    factors = tensor.floats() if tensor.shape == (count,) else torch.zeros(1)
    if not bool((factors > 0).all() and factors.isfinite().all()):
        raise ModelLoadError(values.file.path, f"its {name} are no factors of {count} frequencies", AGAIN)
    found: list[float] = factors.tolist()
    return found


# --- The architectures: how the values and tensors of each become those of transformers.


@dataclass(frozen=True)
class Architecture:
    """A kind of model.

    Attributes:
        config: The name of its configuration in transformers.
        interleaved: Whether the rows of queries and keys are interleaved in the file.
        adjusted: Makes the configuration's values that are not common to all, from a reader of the file.
        layer: The names of tensors of a layer.
        offset_norms: Whether the weights of norms are kept plus 1.
        knows: Values that `adjusted` or `rope` take care of, and that are refused elsewhere.
        rope: Makes the parameters of its rotary positions, from a reader of the file and the width of a head.
        factors: The tensors with factors of its rotary frequencies.
    """

    config: str
    interleaved: bool = False
    adjusted: Callable[[Values], dict[str, Any]] = lambda values: {}
    layer: dict[str, str] = field(default_factory=lambda: LAYER)
    offset_norms: bool = False
    knows: tuple[str, ...] = ()
    rope: Callable[[Values, int], dict[str, Any]] = lambda values, head_dim: _whole_rope(values, head_dim)
    factors: tuple[str, ...] = (FREQUENCY_FACTORS,)


def _whole_rope(values: Values, head_dim: int, *, truncate: bool = True, weighs: bool = False) -> dict[str, Any]:
    if partial_rotary(values, head_dim) != 1:
        raise values.refuse("rotary positions of a part of each head")
    return rope_parameters(values, truncate=truncate, weighs=weighs)


def _llama(values: Values) -> dict[str, Any]:
    biases = values.has("blk.0.attn_q.bias")
    if biases != values.has("blk.0.attn_output.bias"):
        raise values.refuse("biases of some projections of its attention alone")
    return {"attention_bias": biases, "mlp_bias": values.has("blk.0.ffn_up.bias")}


def _without_window(values: Values) -> dict[str, Any]:
    """transformers would take a window of 4,096 tokens where nothing is said."""
    return {"sliding_window": None}


def _gemma(values: Values, largest: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. Scores are scaled by the width of heads, but in the largest model, which has `largest`
    layers, by the hidden size for each head; files do not say it."""
    heads, hidden = values.count("attention.head_count"), values.count("embedding_length")
    scale = values.count("attention.key_length", hidden // heads)
    return {
        "query_pre_attn_scalar": hidden // heads if values.count("block_count") == largest else scale,
        "sliding_window": values.count("attention.sliding_window"),
    }


def _gemma_2(values: Values) -> dict[str, Any]:
    return _gemma(values, 46) | {name: values.number(name) for name in _CAPS}


def _gemma_3(values: Values) -> dict[str, Any]:
    if values.get("attention.sliding_window_pattern") not in (None, 6):
        raise values.refuse(f"attention.sliding_window_pattern={values.get('attention.sliding_window_pattern')!r}")
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10_000.0)}
    caps = {name: values.number(name) if values.get(name) else None for name in _CAPS}
    return (
        _gemma(values, 62)
        | caps
        | {
            "rope_parameters": {"full_attention": rope_parameters(values, 1_000_000.0), "sliding_attention": local},
        }
    )


def _phi_3(values: Values) -> dict[str, Any]:
    found: dict[str, Any] = {"sliding_window": None}  # a window of 0 is none
    if values.get("attention.sliding_window"):
        found["sliding_window"] = values.count("attention.sliding_window")
    if values.get("rope.scaling.original_context_length") is not None:
        found["original_max_position_embeddings"] = values.count("rope.scaling.original_context_length")
    return found


def _qwen_3_experts(values: Values) -> dict[str, Any]:
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": values.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gpt_oss(values: Values) -> dict[str, Any]:
    return {
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "intermediate_size": values.count("expert_feed_forward_length"),
        "sliding_window": values.count("attention.sliding_window"),
    }


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_GEMMA: dict[str, Any] = {
    "layer": WITH_POST_NORMS,
    "offset_norms": True,
    "knows": (*_CAPS, "attention.sliding_window"),
}
_EXPERTS = ("expert_count",)
#: The architectures by their names in files.
ARCHITECTURES = {
    "llama": Architecture("LlamaConfig", interleaved=True, adjusted=_llama),
    "mistral3": Architecture(
        "MistralConfig", interleaved=True, adjusted=_without_window, rope=partial(_whole_rope, weighs=True)
    ),
    "qwen2": Architecture("Qwen2Config"),
    "qwen3": Architecture("Qwen3Config"),
    "qwen3moe": Architecture("Qwen3MoeConfig", adjusted=_qwen_3_experts, layer=WITH_EXPERTS, knows=_EXPERTS),
    "phi3": Architecture(
        "Phi3Config",
        adjusted=_phi_3,
        layer=FUSED,
        knows=("attention.sliding_window", "rope.scaling.attn_factor"),
        rope=long_rope,
        factors=(SHORT_FACTORS, LONG_FACTORS),
    ),
    "gpt-oss": Architecture(
        "GptOssConfig",
        adjusted=_gpt_oss,
        layer=WITH_SINKS,
        knows=(*_EXPERTS, "attention.sliding_window"),
        rope=partial(_whole_rope, truncate=False),
    ),
    "gemma2": Architecture("Gemma2Config", adjusted=_gemma_2, **_GEMMA),
    "gemma3": Architecture("Gemma3TextConfig", adjusted=_gemma_3, **_GEMMA),
}
#: Architectures that are other ones where a file has a certain value: by both names.
_WHERE_IT_HAS = {
    ("mistral3", TEMPERATURE): Architecture("Ministral3Config", interleaved=True, knows=(TEMPERATURE,), rope=tempered_rope)
}
#: Values that would change what a model computes, and what they are where they change nothing.
_SPECIAL = {
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_group_count": 0,
    "expert_weights_scale": 0.0,
    "expert_weights_norm": True,
    "attention.sliding_window": 0,
    "rope.scaling.attn_factor": 1.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "attention.scale": 0.0,
    TEMPERATURE: 0.0,
    "attention.temperature_length": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "use_parallel_residual": False,
    "attention.causal": True,
    "nextn_predict_layers": 0,
}


def architecture_of(file: GgufFile) -> Architecture:
    """What is known of a file's architecture.

    Raises:
        ModelLoadError: It does not say its architecture.
        UnsupportedModelError: The architecture is not known.
    """
    values = Values(file)
    name = values.architecture
    if name not in ARCHITECTURES:
        problem = f"its architecture is {name}, and {', '.join(ARCHITECTURES)} are known of GGUF files"
        raise UnsupportedModelError(file.path, problem, ORIGINAL)
    others = (known for (one, value), known in _WHERE_IT_HAS.items() if one == name and values.get(value))
    return next(others, ARCHITECTURES[name])


def read_config(file: GgufFile) -> Any:
    """transformers' configuration of a model.

    Raises:
        ModelLoadError: A value is missing, or is not what it has to be.
        UnsupportedModelError: The architecture is not known, or has something that is not.
    """
    import transformers

    known, values = architecture_of(file), Values(file)
    shape = read_shape(values, known) | {
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": not values.has("output.weight"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
    }
    try:
        return getattr(transformers, known.config)(**shape | known.adjusted(values))
    except Exception as error:  # whatever transformers finds wrong with a configuration
        reason = str(error).strip().splitlines()[-1].strip()
        raise ModelLoadError(file.path, f"its metadata are no configuration ({reason})", AGAIN) from error


def read_shape(values: Values, known: Architecture) -> dict[str, Any]:
    """The fields of transformers' configuration that describe the layers of a file.

    Raises:
        ModelLoadError: A value is missing, or is not what it has to be.
        UnsupportedModelError: The architecture has something that is not known.
    """
    for name, plain in _SPECIAL.items():
        if name not in known.knows and values.get(name) not in (None, plain):
            raise values.refuse(f"{values.architecture}.{name}={values.get(name)!r}")
    heads, hidden = values.count("attention.head_count"), values.count("embedding_length")
    layers = values.count("block_count")
    if layers > len(values.file.tensors):
        problem = f"it says {layers:,} layers, and holds {len(values.file.tensors)} tensors"
        raise ModelLoadError(values.file.path, problem, AGAIN)
    check_file_limit(values.file.path, "layers", layers)
    head_dim = values.count("attention.key_length", hidden // heads)
    if values.count("attention.value_length", head_dim) != head_dim:
        raise values.refuse("values of another width than its keys")
    return {
        "hidden_size": hidden,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": values.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": known.rope(values, head_dim),
    }


def _vocab_size(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelLoadError(file.path, "the tensor token_embd.weight is missing", AGAIN)
    return table.shape[0]


def row_order(known: Architecture, name: str, config: Any) -> Tensor | None:
    """The rows of a tensor of the file in the order of transformers. None where they are in it."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or not known.interleaved:
        return None
    rows = torch.arange(heads * config.head_dim)
    return rows.reshape(heads, -1, 2).transpose(1, 2).flatten()

"""The architectures of GGUF files that are known, and what llama.cpp's converter does to each.

Files have llama.cpp's names of tensors (`names.py`) and values, and its orders of rows (`arrangement.py`), which are put
back. What an architecture would mean otherwise is refused by name, and never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.loading.gguf import families, gemma, names
from outrider.loading.gguf.arrangement import (
    DELTA_BY_KEYS,
    DELTA_BY_TURNS,
    GATES_AND_VALUES,
    QUERIES_KEYS_VALUES,
    ROTATED,
    SCANS,
    SCANS_ALONE,
    TURNED_EXPERTS,
    UNFOLDING,
    Arranged,
    Joined,
)
from outrider.loading.gguf.header import AGAIN, ORIGINAL, GgufFile
from outrider.loading.gguf.names import LAYER, LayerNames
from outrider.loading.gguf.rotary import (
    FREQUENCY_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    TEMPERATURE,
    latent_rope,
    long_rope,
    partial_rope,
    partial_rotary,
    rope_parameters,
    tempered_rope,
)
from outrider.loading.gguf.values import Values

# --- The architectures: how the values and tensors of each become those of transformers.


@dataclass(frozen=True)
class Architecture:
    """A kind of model."""

    config: str  # the name of its configuration in transformers
    # Makes the configuration's values that are not common to all, from a reader of the file.
    adjusted: Callable[[Values], dict[str, Any]] = lambda values: {}
    layer: LayerNames = field(default_factory=lambda: LAYER)  # the names of tensors of a layer
    arranged: Arranged = field(default_factory=dict)  # what lies otherwise in the file
    joined: Mapping[str, Joined] = field(default_factory=dict)  # what has several tensors in the file
    offset_norms: bool = False  # whether the weights of norms are kept plus 1, those of `arranged` apart
    attends: bool = True  # whether any layer does. Files of others say that they have 0 heads.
    knows: tuple[str, ...] = ()  # values that `adjusted` or `rope` take care of, and that are refused elsewhere
    # Makes the parameters of its rotary positions, from a reader of the file and the width of a head.
    rope: Callable[[Values, int], dict[str, Any]] = lambda values, head_dim: _whole_rope(values, head_dim)
    # What the number that keeps norms finite is called in transformers, and in files.
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    # The tensors that no module of transformers has: factors of its rotary frequencies, and what nothing reads.
    apart: tuple[str, ...] = (FREQUENCY_FACTORS,)
    # Whether frequencies are divided by those factors when the model is filled, where its configuration does not have them.
    scaled: bool = True


def _whole_rope(values: Values, head_dim: int, *, truncate: bool = True, weighs: bool = False) -> dict[str, Any]:
    if partial_rotary(values, head_dim) != 1:
        raise values.refuse("rotary positions of a part of each head")
    return rope_parameters(values, truncate=truncate, weighs=weighs)


_GEMMA: dict[str, Any] = {
    "layer": names.WITH_POST_NORMS,
    "offset_norms": True,
    "knows": (*gemma.CAPS, "attention.sliding_window"),
}
_EXPERTS = ("expert_count",)
#: Whether keys have another width than values, since both are compressed.
_LATENT = "attention.kv_lora_rank"
#: How many layers predict several tokens, behind those of the model.
PREDICTED = "nextn_predict_layers"
_SHARED = "expert_shared_count"
_MULTIPLIERS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
_LAYER_NORM, _NORM = ("layer_norm_eps", "attention.layer_norm_epsilon"), ("norm_eps", "attention.layer_norm_rms_epsilon")
_ROUTED = (
    *_EXPERTS, PREDICTED, "expert_shared_count", "expert_group_count", "expert_weights_scale", "expert_weights_norm",
)  # fmt: skip
_DELTA: dict[str, Any] = {"offset_norms": True, "rope": partial_rope}
_DELTA_EXPERTS: dict[str, Any] = {
    "config": "Qwen3_5MoeTextConfig",
    "adjusted": families.delta_and_experts,
    "knows": (*_EXPERTS, PREDICTED),
    **_DELTA,
}
_NEMOTRON_H: dict[str, Any] = {
    "config": "NemotronHConfig",
    "layer": names.NEMOTRON_H,
    "arranged": SCANS_ALONE,
    "rope": lambda values, head_dim: {},  # nothing is rotated
    "epsilon": ("layer_norm_epsilon", _LAYER_NORM[1]),
}
#: The architectures by their names in files.
ARCHITECTURES = {
    "llama": Architecture("LlamaConfig", arranged=ROTATED, adjusted=families.llama),
    "mistral3": Architecture(
        "MistralConfig", arranged=ROTATED, adjusted=families.without_window, rope=partial(_whole_rope, weighs=True)
    ),
    # Positions of pictures have several numbers, which are one in a text.
    **dict.fromkeys(("qwen2", "qwen2vl"), Architecture("Qwen2Config")),
    **dict.fromkeys(("qwen3", "qwen3vl"), Architecture("Qwen3Config")),
    **dict.fromkeys(
        ("qwen3moe", "qwen3vlmoe"),
        Architecture("Qwen3MoeConfig", adjusted=families.qwen_3_experts, layer=names.WITH_EXPERTS, knows=_EXPERTS),
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeConfig", adjusted=families.qwen_2_experts, layer=names.WITH_SHARED_EXPERT, knows=_EXPERTS
    ),
    "olmoe": Architecture("OlmoeConfig", adjusted=families.olmo_experts, layer=names.WITH_EXPERTS, knows=_EXPERTS),
    "minimax-m2": Architecture(
        "MiniMaxM2Config",
        adjusted=families.minimax_experts,
        layer=names.MINIMAX,
        rope=partial_rope,
        knows=(*_EXPERTS, families.GATING),
    ),
    "dots1": Architecture("Dots1Config", adjusted=families.dots, layer=names.WITH_ROUTED_EXPERTS, knows=_ROUTED),
    "exaone4": Architecture(
        "Exaone4Config",
        adjusted=families.exaone_4,
        layer=names.WITH_POST_NORMS_ALONE,
        knows=("attention.sliding_window", PREDICTED),
    ),
    "exaone-moe": Architecture(
        "ExaoneMoeConfig",
        adjusted=families.exaone_experts,
        layer=names.WITH_ROUTED_EXPERTS,
        knows=("attention.sliding_window", *_ROUTED),
    ),
    "mimo2": Architecture(
        "MiMoV2FlashConfig",
        adjusted=families.mimo,
        layer=names.MIMO,
        rope=partial_rope,
        knows=("attention.sliding_window", "attention.value_length", families.VALUE_SCALE, *_ROUTED),
    ),
    "nemotron_h": Architecture(adjusted=families.nemotron_h, **_NEMOTRON_H),
    "nemotron_h_moe": Architecture(adjusted=families.nemotron_h_experts, knows=_ROUTED, **_NEMOTRON_H),
    "mamba2": Architecture(
        "Mamba2Config",
        adjusted=families.mamba_2,
        layer=names.MAMBA_2,
        arranged=SCANS_ALONE,
        attends=False,
        epsilon=("layer_norm_epsilon", _NORM[1]),
    ),
    "llama4": Architecture(
        "Llama4TextConfig", adjusted=families.llama_4, layer=names.LLAMA_4, joined=TURNED_EXPERTS, knows=_EXPERTS
    ),
    "falcon-h1": Architecture("FalconH1Config", adjusted=families.falcon, layer=names.FALCON, arranged=SCANS),
    "seed_oss": Architecture("SeedOssConfig", adjusted=families.seed, layer=names.WITH_NORM_BEHIND_ATTENTION),
    "ernie4_5": Architecture("Ernie4_5Config", adjusted=families.ernie),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1Config", adjusted=families.with_biases, layer=names.HUNYUAN_WITHOUT_EXPERTS
    ),
    "arcee": Architecture("ArceeConfig", arranged=ROTATED, adjusted=families.llama),
    "nemotron": Architecture(
        "NemotronConfig",
        adjusted=families.llama,
        rope=partial_rope,
        offset_norms=True,
        epsilon=("norm_eps", _LAYER_NORM[1]),
    ),
    "phi3": Architecture(
        "Phi3Config",
        adjusted=families.phi_3,
        layer=names.FUSED,
        knows=("attention.sliding_window", "rope.scaling.attn_factor"),
        rope=long_rope,
        apart=(SHORT_FACTORS, LONG_FACTORS),
    ),
    "gpt-oss": Architecture(
        "GptOssConfig",
        adjusted=families.gpt_oss,
        layer=names.WITH_SINKS,
        knows=(*_EXPERTS, "attention.sliding_window"),
        rope=partial(_whole_rope, truncate=False),
    ),
    "qwen35": Architecture(
        "Qwen3_5TextConfig",
        adjusted=families.delta,
        layer={**LAYER, **names.DELTA},
        arranged=DELTA_BY_TURNS,
        knows=(PREDICTED,),
        **_DELTA,
    ),
    "qwen35moe": Architecture(layer={**names.WITH_SHARED_EXPERT, **names.DELTA}, arranged=DELTA_BY_TURNS, **_DELTA_EXPERTS),
    # It computes what Qwen3.5 does. Its folders have one projection for what files, too, have several for.
    "qwen3next": Architecture(
        layer={**names.WITH_SHARED_EXPERT, **names.DELTA, "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")},
        arranged=DELTA_BY_KEYS,
        **_DELTA_EXPERTS,
    ),
    "glm4": Architecture(
        "Glm4Config", adjusted=families.with_biases, layer=names.WITH_NORMS_BEHIND, rope=partial_rope, knows=(PREDICTED,)
    ),
    "glm4moe": Architecture(
        "Glm4MoeConfig",
        adjusted=families.glm_4_experts,
        layer={**names.WITH_ROUTED_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
        rope=partial_rope,
        knows=_ROUTED,
    ),
    # Ling and Ring 2.0, and Sarvam, which compute what GLM-4.5 does. transformers has no classes of their own.
    "bailingmoe2": Architecture(
        "Glm4MoeConfig",
        adjusted=families.glm_4_experts,
        layer=names.LING,
        arranged=QUERIES_KEYS_VALUES,
        rope=partial_rope,
        knows=_ROUTED,
    ),
    "deepseek2": Architecture(
        "DeepseekV2Config",
        adjusted=families.deepseek_2,
        layer=names.WITH_LATENTS,
        joined=UNFOLDING,
        rope=latent_rope,
        knows=(*_ROUTED, _LATENT),
    ),
    "olmo2": Architecture("Olmo2Config", layer=names.WITH_POST_NORMS_ALONE),
    "smollm3": Architecture("SmolLM3Config", arranged=ROTATED, adjusted=families.llama),
    "granite": Architecture("GraniteConfig", arranged=ROTATED, adjusted=families.granite, knows=_MULTIPLIERS),
    "granitemoe": Architecture(
        "GraniteMoeConfig",
        arranged=ROTATED,
        adjusted=families.granite_experts,
        layer=names.WITH_SPARSE_EXPERTS,
        knows=(*_MULTIPLIERS, *_EXPERTS),
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridConfig",
        arranged=ROTATED | SCANS,
        adjusted=families.granite_hybrid,
        layer=names.WITH_SCANS,
        joined=GATES_AND_VALUES,
        knows=(*_MULTIPLIERS, *_EXPERTS),
    ),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeConfig", adjusted=families.ernie_experts, layer=names.ERNIE, knows=(*_EXPERTS, _SHARED)
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1Config", adjusted=families.hunyuan_experts, layer=names.HUNYUAN, knows=(*_EXPERTS, _SHARED)
    ),
    "cohere2": Architecture(
        "Cohere2Config", adjusted=families.cohere_2, knows=("logit_scale", "attention.sliding_window"), epsilon=_LAYER_NORM
    ),
    "starcoder2": Architecture("Starcoder2Config", layer=names.WITHOUT_GATES, epsilon=("norm_epsilon", _LAYER_NORM[1])),
    "phi2": Architecture("PhiConfig", layer=names.PHI_2, rope=partial_rope, epsilon=_LAYER_NORM),
    "stablelm": Architecture(
        "StableLmConfig",
        adjusted=families.stablelm,
        rope=partial_rope,
        knows=("use_parallel_residual",),
        epsilon=_LAYER_NORM,
    ),
    "lfm2": Architecture("Lfm2Config", adjusted=families.convolutions, layer=names.CONVOLUTIONS, epsilon=_NORM),
    "lfm2moe": Architecture(
        "Lfm2MoeConfig", adjusted=families.convolutions_and_experts, layer=names.CONVOLUTIONS, knows=_EXPERTS, epsilon=_NORM
    ),
    # Its positions are distances. transformers knows of no biases of attention to a source, which some files have.
    "t5": Architecture(
        "T5Config",
        adjusted=families.t_5,
        layer=names.T5,
        rope=lambda values, head_dim: {},
        epsilon=("layer_norm_epsilon", _NORM[1]),
        apart=("dec.blk.0.cross_attn_rel_b.weight",),
    ),
    "gemma": Architecture("GemmaConfig", offset_norms=True),
    "gemma2": Architecture("Gemma2Config", adjusted=gemma.gemma_2, **_GEMMA),
    "gemma3": Architecture("Gemma3TextConfig", adjusted=gemma.gemma_3, **_GEMMA),
    "gemma3n": Architecture(
        "Gemma3nTextConfig",
        adjusted=gemma.gemma_3n,
        layer=names.GEMMA_3N,
        knows=(*gemma.CAPS, "attention.sliding_window"),
    ),
    "gemma4": Architecture(
        "Gemma4TextConfig",
        adjusted=gemma.gemma_4,
        layer=names.GEMMA_4,
        knows=(*gemma.CAPS, *_EXPERTS, "attention.sliding_window"),
        scaled=False,
    ),
}
#: Architectures that are other ones where a file has a certain value or tensor.
_WHERE_IT_HAS: tuple[tuple[str, Callable[[Values], bool], Architecture], ...] = (
    (
        "deepseek2",
        lambda values: values.get(families.GATING) == families.SIGMOID,
        replace(ARCHITECTURES["deepseek2"], config="DeepseekV3Config", adjusted=families.deepseek_3),
    ),
    (
        "mistral3",
        lambda values: bool(values.get(TEMPERATURE)),
        Architecture("Ministral3Config", arranged=ROTATED, knows=(TEMPERATURE,), rope=tempered_rope),
    ),
    ("t5", families.has_gates, replace(ARCHITECTURES["t5"], layer=names.GATED_T5)),
)
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
    families.VALUE_SCALE: 1.0,
    "attention.temperature_length": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "use_parallel_residual": False,
    "attention.causal": True,
    PREDICTED: 0,
}


_WHOLE = "Use a file of the whole model, whose architecture is t5."
_NOWHERE = "Run this file in llama.cpp, or use a model of another family."
#: Architectures that llama.cpp knows and that are not read, by their names: why, and what to do.
_NOT_READ = {
    "t5encoder": ("it has no decoder, which writes texts", _WHOLE),
    "step35": ("transformers has no text models of its kind (Step 3.5)", _NOWHERE),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Returns what is known of a file's architecture."""
    values = Values(file)
    name = values.architecture
    if name in _NOT_READ:
        why, remedy = _NOT_READ[name]
        raise UnsupportedModelError(file.path, f"its architecture is {name}, and {why}", remedy)
    if name not in ARCHITECTURES:
        problem = f"its architecture is {name}, and {', '.join(ARCHITECTURES)} are known of GGUF files"
        raise UnsupportedModelError(file.path, problem, ORIGINAL)
    others = (known for one, has, known in _WHERE_IT_HAS if one == name and has(values))
    return next(others, ARCHITECTURES[name])


def read_config(file: GgufFile) -> Any:
    """transformers' configuration of a model."""
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
    """The fields of transformers' configuration that describe the layers of a file."""
    for name, plain in _SPECIAL.items():
        if name not in known.knows and values.get(name) not in (None, plain):
            raise values.refuse(f"{values.architecture}.{name}={values.get(name)!r}")
    return {
        "hidden_size": values.count("embedding_length"),
        "num_hidden_layers": values.check_layers(values.num_layers),
        "max_position_embeddings": values.count("context_length"),
        known.epsilon[0]: values.number(known.epsilon[1]),
    } | (_heads(values, known) if known.attends else {})


def _heads(values: Values, known: Architecture) -> dict[str, Any]:
    """The fields that describe attention and feed-forwards."""
    heads = values.count("attention.head_count")
    head_dim = values.count("attention.key_length", values.count("embedding_length") // heads)
    if (
        not {_LATENT, "attention.value_length"} & {*known.knows}
        and values.count("attention.value_length", head_dim) != head_dim
    ):
        raise values.refuse("values of another width than its keys")
    return {
        "intermediate_size": max(values.each_layer("feed_forward_length", values.get("expert_feed_forward_length"))),
        "num_attention_heads": heads,
        "num_key_value_heads": max(values.each_layer(families.KEY_HEADS)) or heads
        if values.get(families.KEY_HEADS)
        else heads,
        "head_dim": head_dim,
        "rope_parameters": known.rope(values, head_dim),
    }


def _vocab_size(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelLoadError(file.path, "the tensor token_embd.weight is missing", AGAIN)
    return table.shape[0]

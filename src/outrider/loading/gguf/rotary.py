"""The rotary positions of GGUF files, as transformers' configurations describe them.

A scaling is known by its name. Factors of frequencies are tensors of a file: those of "longrope" become lists of the
configuration, and those of Llama 3.1 are divided by when the model is filled.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import ModelLoadError
from outrider.loading.gguf.header import AGAIN
from outrider.loading.gguf.values import Values

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
    """Rotary positions by the scaling that a file names."""
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


def partial_rope(values: Values, head_dim: int) -> dict[str, Any]:
    """Rotary positions of a part of each head."""
    return rope_parameters(values) | {"partial_rotary_factor": partial_rotary(values, head_dim)}


def latent_rope(values: Values, head_dim: int) -> dict[str, Any]:
    """Rotary positions of DeepSeek, whose files have a tenth of the number that scales scores under YaRN."""
    found = rope_parameters(values, weighs=True)
    if found.get("mscale_all_dim"):
        found["mscale"] = found["mscale_all_dim"] = round(10 * found["mscale_all_dim"], 6)
    return found


def long_rope(values: Values, head_dim: int) -> dict[str, Any]:
    """Rotary positions of Phi-3: with factors for short texts and for long ones where the file has these."""
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
    """Rotary positions of Ministral 3, with the number by which queries of later positions grow."""
    rope = rope_parameters(values, weighs=True)
    if partial_rotary(values, head_dim) != 1 or rope["rope_type"] != "yarn":
        raise values.refuse(f"{TEMPERATURE} and other rotary positions than those of YaRN")
    return rope | {"llama_4_scaling_beta": values.number(TEMPERATURE)}


def rotated_part(values: Values, count: int) -> float:
    """The part of `count` frequencies that turn at all, where those of the others are divided by huge factors."""
    turning = [factor == 1.0 for factor in _factors(values, FREQUENCY_FACTORS, count)]
    if turning != sorted(turning, reverse=True):
        raise values.refuse(f"{FREQUENCY_FACTORS} that leave some frequencies between others as they are")
    return sum(turning) / count


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

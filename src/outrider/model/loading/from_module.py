"""Takes over a transformers model that the caller has loaded, merged or trained."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from outrider.config import ModelConfig
from outrider.errors import ContradictionError, InvalidParameterError, ModelLoadError

#: Left on a module whose weights were taken, so that nobody takes it for a model again.
_CONSUMED = "_outrider_consumed"


def check_given(model: Any, config: ModelConfig, field: str = "model") -> None:
    """Refuse a module that is no causal language model with all its weights in one place, and settings it has no use for.

    Args:
        model: What was given.
        config: How it is to be used.
        field: The argument that it was given as.

    Raises:
        InvalidParameterError: The module cannot be used.
        ContradictionError: A setting that says how to load a checkpoint.
    """
    for name in ("revision", "trust_remote_code"):
        value = getattr(config, name)
        if value:
            raise ContradictionError(
                name, value, "the model is loaded already", "Leave it out, or give a folder or a hub id."
            )
    problem = _problem(model)
    if problem is not None:
        raise InvalidParameterError(field, type(model), *problem)


def _problem(model: Any) -> tuple[str, str] | None:
    """What speaks against a module, and what would help."""
    if getattr(model, _CONSUMED, False):
        return "its weights were taken by consume=True", "Load the model again, and leave consume=True out to keep it."
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not hasattr(model, "config") or not hasattr(model, "generate") or head is None:
        return (
            "not a causal language model of transformers: it has no generate, no config or no head over tokens",
            "Load it with AutoModelForCausalLM of transformers, or give a folder or a hub id.",
        )
    if hasattr(model, "merge_and_unload") or getattr(model, "_hf_peft_config_loaded", False):
        return "it has adapters that are not merged into its weights", "Give what merge_and_unload() of PEFT returns."
    places = sorted({str(p.device) for p in model.parameters()})
    if len(places) > 1 or "meta" in places:
        return f"its weights lie on {' and '.join(places)}", "Give a model that lies on one device as a whole."
    return None


def make_own(model: Any, config: ModelConfig, device: torch.device, *, consume: bool) -> Any:
    """A module that we may change: a copy, or with `consume` the module itself, marked as taken.

    Hooks are part of what a module computes, and are copied with it.

    Args:
        model: As `check_given` let it pass.
        config: Its dtype is that of the result, unless it is "auto".
        device: Where the result is to lie.
        consume: Whether the caller has no more use for the module.

    Raises:
        ModelLoadError: It cannot be copied.
    """
    own = model if consume else _copied(model, config.model)
    if consume:
        setattr(model, _CONSUMED, True)
    if config.dtype != "auto":
        _convert(own, getattr(torch, config.dtype))
    return own.to(device)


def _copied(model: nn.Module, name: str) -> nn.Module:
    try:
        return deepcopy(model)
    except Exception as error:  # whatever the parts of a module that was changed by hand may raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            name, f"it cannot be copied ({reason})", "Save it and give the folder, or use consume=True."
        ) from error


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """As loading in this dtype would: what a checkpoint holds is converted, and what a module computes for itself, as
    rotary frequencies, keeps its precision."""
    saved = model.state_dict(keep_vars=True).values()
    for tensor in [*model.parameters(), *saved]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)

"""Recognises folders and files that are no checkpoint of a causal decoder, and says what to do with each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameterError, ModelLoadError, UnsupportedModelError

_ADAPTER, _CONFIG = "adapter_config.json", "config.json"
_NEEDED = "Give the folder that holds config.json and the weights, or a hub id like owner/name."


def check_is_checkpoint(field: str, source: str) -> None:
    """Refuse a file, or a folder without a configuration, by what it is.

    Args:
        field: What the caller named it as.
        source: A path that exists.

    Raises:
        InvalidParameterError: No checkpoint; the message says what it seems to be.
        UnsupportedModelError: An adapter.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix == ".gguf":
            return
        raise InvalidParameterError(field, source, "it is a file, not a folder", _NEEDED)
    if (path / _CONFIG).exists() or not path.is_dir():
        return
    if (path / _ADAPTER).exists():
        raise _adapter(source)
    names = sorted(found.name for found in path.iterdir())
    if any(name.endswith(".gguf") for name in names):
        raise _gguf(source, names)
    holds = f"it holds no {_CONFIG}, but {', '.join(names[:3])}" if names else "the folder is empty"
    raise InvalidParameterError(field, source, holds, _NEEDED)


def missing_head(model: str, hf_config: Any, missing: list[str]) -> UnsupportedModelError | None:
    """The error for a checkpoint that lacks nothing but the output layer, as encoders and base models do."""
    kinds = tuple(getattr(hf_config, "architectures", None) or ())
    if any(kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for kind in kinds):
        return None
    if not kinds or any(".layers." in name or ".layer." in name or ".h." in name for name in missing):
        return None
    problem = (
        f"it is a {kinds[0]} without an output layer over the vocabulary ({missing[0]} is missing), so it writes no text"
    )
    return UnsupportedModelError(model, problem, "Use a causal language model, like one that is called ...ForCausalLM.")


def wrong_shape(model: str, mismatched: list[tuple[str, Any, Any]]) -> ModelLoadError:
    """The error for weights whose shapes are not those of the configuration."""
    name, found, wanted = mismatched[0]
    problem = f"{name} has shape {list(found)}, and {_CONFIG} asks for {list(wanted)}"
    if len(mismatched) > 1:
        problem += f"; so it is with {len(mismatched) - 1} more"
    return ModelLoadError(model, problem, f"Put the {_CONFIG} beside the weights that belongs to them.")


def _gguf(source: str, names: list[str]) -> UnsupportedModelError:
    first = next(name for name in names if name.endswith(".gguf"))
    return UnsupportedModelError(
        source, "it holds GGUF files, and no other checkpoint", f"Give one of them, as {source}/{first}."
    )


def _adapter(source: str) -> UnsupportedModelError:
    try:
        base = json.loads((Path(source) / _ADAPTER).read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    of = f" of {base}" if base else ""
    remedy = "Merge it with its model (merge_and_unload() of the peft package), and give the merged folder or module."
    return UnsupportedModelError(source, f"it is an adapter{of}, and no whole model", remedy)

"""Calls of transformers that read files, whose errors become ours."""

from __future__ import annotations

import os
from typing import Any

from outrider.errors import ModelLoadError
from outrider.model.loading.exclusive import check_wanted, exclusive_transformers


def attempt(model: str, problem: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call into transformers; whatever it raises becomes a ModelLoadError that keeps the first line of the reason."""
    check_wanted()
    try:
        with exclusive_transformers():
            return function(*args, **kwargs)
    except Exception as error:
        raise ModelLoadError(model, f"{problem} ({_reason(error)})", _load_remedy(model, error)) from error


def _reason(error: Exception) -> str:
    """The first line of what an error says, and the second where the first announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def _load_remedy(model: str, error: Exception) -> str:
    from huggingface_hub.errors import LocalEntryNotFoundError

    if "trust_remote_code" in str(error):
        return "It brings code of its own. If you trust that code, pass trust_remote_code=True."
    if os.path.isdir(model):
        return "Check the files in this folder."
    if isinstance(error.__cause__, LocalEntryNotFoundError):  # the hub does not answer
        return (
            "There is no folder of that name here. Give one, or connect to the network; where there is none, "
            "HF_HUB_OFFLINE=1 in the environment spares the retries."
        )
    return "There is no folder of that name here. Give one, or check the hub id."

"""Asks the hub once whether a model is there, so that a wrong name or a missing network is told at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from outrider.errors import ModelLoadError

#: Seconds that the hub has for its answer.
_PATIENCE = 5.0


def hub_options(model: str, revision: str | None) -> dict[str, Any]:
    """What transformers is told about the hub: where it does not answer, files come from its cache alone, without retries.

    Raises:
        ModelLoadError: The hub has no such model.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if os.path.isdir(model) or HF_HUB_OFFLINE:
        return {}
    try:
        HfApi().model_info(model, revision=revision, timeout=_PATIENCE)
    except GatedRepoError:
        return {}  # transformers tells how to get access
    except RevisionNotFoundError as error:
        raise ModelLoadError(
            model, f"the hub has no revision {revision!r} of it", "Use a branch, tag or commit."
        ) from error
    except RepositoryNotFoundError as error:
        remedy = "Check the spelling; for a private model, log in with `hf auth login`."
        raise ModelLoadError(model, "there is no folder of that name here, and no such model on the hub", remedy) from error
    except Exception:  # whatever the network does: a cached model needs none
        return {"local_files_only": True}
    return {}


def local_folder(model: str, options: dict[str, Any]) -> Path:
    """The folder of a checkpoint, or that of what the hub has of it, with its weights.

    Raises:
        ModelLoadError: The hub does not give it.
    """
    from huggingface_hub import snapshot_download

    if os.path.isdir(model):
        return Path(model)
    try:
        return Path(
            snapshot_download(
                model,
                revision=options.get("revision"),
                local_files_only=options.get("local_files_only", False),
                allow_patterns=["*.safetensors", "*.json"],
            )
        )
    except Exception as error:
        raise ModelLoadError(
            model, f"its weights cannot be had ({error})", "Check the network, or give a folder."
        ) from error

"""Folders, files and hub ids that a user gives for a model."""

from __future__ import annotations

import os
from typing import Any

from outrider.config import ModelConfig
from outrider.errors import InvalidParameterError
from outrider.model.loading.hub import hub_options
from outrider.model.loading.kinds import check_is_checkpoint


def check_sources(**sources: str | None) -> None:
    """Refuse what is no checkpoint and cannot be a hub id either, before anything is loaded and without asking the hub.

    Args:
        sources: What was given for each field; None asks for nothing.

    Raises:
        InvalidParameterError: No such folder, a file, or a folder without a configuration.
        UnsupportedModelError: An adapter.
    """
    for name, source in sources.items():
        if source is None:
            continue
        if os.path.exists(source):
            check_is_checkpoint(name, source)
        elif not _may_be_hub_id(source):
            remedy = "Give the folder that holds config.json and the weights, or a hub id like owner/name."
            raise InvalidParameterError(name, source, "no such folder", remedy)


def _may_be_hub_id(source: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def source_options(config: ModelConfig) -> dict[str, Any]:
    """Where transformers finds a checkpoint, and what it may do with it."""
    options = hub_options(config.model, config.revision)
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code, **options}

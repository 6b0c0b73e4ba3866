"""Tokenizers of checkpoints, and those that a user gives."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

from outrider.config import ModelConfig
from outrider.errors import InvalidParameterError
from outrider.loading.exclusive import attempt
from outrider.loading.gguf.header import is_gguf, read_gguf
from outrider.loading.gguf.tokenizer import read_gguf_tokenizer
from outrider.loading.sources import check_files, check_sources, source_options


def read_tokenizer(config: ModelConfig) -> Any | None:
    """The tokenizer of a checkpoint. None where its folder holds none.

    Raises:
        ModelLoadError: Not on the hub, unreadable or corrupt.
    """
    if is_gguf(config.model):
        return read_gguf_tokenizer(read_gguf(config.model))
    return checkpoint_tokenizer(config, source_options(config))


def given_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer that the caller names, or a copy of the one that he gives: ours is used in threads of its own.

    Code that comes with a folder or from the hub is not run.

    Raises:
        InvalidParameterError: It is no tokenizer, or no such folder.
        ModelLoadError: Not on the hub, unreadable or corrupt.
    """
    from transformers import AutoTokenizer

    if isinstance(tokenizer, str | os.PathLike):
        source = os.fspath(tokenizer)
        check_sources(tokenizer=source)
        if is_gguf(source):
            return _tokenizer_of_file(source)
        check_files(source)
        return attempt(source, "its tokenizer cannot be read", AutoTokenizer.from_pretrained, source)
    if callable(tokenizer) and hasattr(tokenizer, "decode"):
        return deepcopy(tokenizer)
    remedy = "Give a tokenizer of transformers, a folder or a hub id."
    raise InvalidParameterError("tokenizer", tokenizer, "neither a tokenizer nor the name of one", remedy)


def checkpoint_tokenizer(config: ModelConfig, source: dict[str, Any]) -> Any | None:
    """The tokenizer of a checkpoint of transformers, found as `source` says; None where its folder holds none."""
    from transformers import AutoTokenizer

    check_files(config.model)
    folder = Path(config.model)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    return attempt(config.model, "its tokenizer cannot be read", AutoTokenizer.from_pretrained, config.model, **source)


def _tokenizer_of_file(source: str) -> Any:
    found = read_gguf_tokenizer(read_gguf(source))
    if found is None:
        raise InvalidParameterError("tokenizer", source, "this file has no vocabulary", "Give one that has.")
    return found

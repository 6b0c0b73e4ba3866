"""Tokenizers of checkpoints, and those that a user gives."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from outrider.config import ModelConfig
from outrider.errors import InvalidParameterError
from outrider.loading.exclusive import attempt
from outrider.loading.file_limits import check_file_limit, file_limits
from outrider.loading.gguf.header import is_gguf, read_gguf
from outrider.loading.gguf.tokenizer import read_gguf_tokenizer
from outrider.loading.sources import check_files, check_sources, source_options


def read_tokenizer(config: ModelConfig) -> Any | None:
    """The tokenizer of a checkpoint. None where its folder holds none."""
    if is_gguf(config.model):
        return read_gguf_tokenizer(read_gguf(config.model))
    return checkpoint_tokenizer(config, source_options(config))


def given_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer that the caller names, or a copy of the one that he gives: ours is used in threads of its own.

    Code that comes with a folder or from the hub is not run.
    """
    from transformers import AutoTokenizer

    if isinstance(tokenizer, str | os.PathLike):
        source = os.fspath(tokenizer)
        check_sources(tokenizer=source)
        if is_gguf(source):
            return _tokenizer_of_file(source)
        check_files(source)
        check_tokenizer_limits(source)
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
    check_tokenizer_limits(config.model)
    return attempt(config.model, "its tokenizer cannot be read", AutoTokenizer.from_pretrained, config.model, **source)


def _tokenizer_of_file(source: str) -> Any:
    found = read_gguf_tokenizer(read_gguf(source))
    if found is None:
        raise InvalidParameterError("tokenizer", source, "this file has no vocabulary", "Give one that has.")
    return found


#: Bytes that an added token takes in a file at least. What is shorter cannot have too many.
_LEAST_BYTES = 8


def check_tokenizer_limits(model: str) -> None:
    """See that the files of a tokenizer in a folder add no more tokens, and have no longer template, than any model has.

    The library that reads them takes much longer than their bytes are worth. What it cannot read is left for it to say.
    """
    folder, most = Path(model), file_limits()["added_tokens"]
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        path = folder / name
        if not path.is_file():
            continue
        if path.stat().st_size > most * _LEAST_BYTES or name == "tokenizer_config.json":
            found = None
            with suppress(ValueError, RecursionError, OSError):
                found = json.loads(path.read_bytes())
            _check_tokenizer_file(model, found, whole=name == "added_tokens.json")
    for path in folder.glob("*.jinja"):
        check_file_limit(model, "template_bytes", path.stat().st_size)


def _check_tokenizer_file(model: str, found: Any, *, whole: bool) -> None:
    """Checks the content of a tokenizer's file; `whole` if it is nothing but added tokens."""
    if not isinstance(found, dict):
        return
    names = ("added_tokens", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
    lists = [found] if whole else [found[name] for name in names if isinstance(found.get(name), list | dict)]
    check_file_limit(model, "added_tokens", max(map(len, lists), default=0))
    templates = found.get("chat_template")
    for template in templates if isinstance(templates, list) else [templates]:
        text = template.get("template") if isinstance(template, dict) else template
        check_file_limit(model, "template_bytes", len(text.encode()) if isinstance(text, str) else 0)

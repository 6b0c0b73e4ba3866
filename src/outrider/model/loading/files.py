"""Checks of a checkpoint's folder before it is read: no devices, no pipes, no absurd sizes, no paths that leave it."""

from __future__ import annotations

import json
import stat
from pathlib import Path, PurePosixPath

from outrider.errors import ModelLoadError

WHOLE = "model.safetensors"
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
#: What loading reads: configurations, vocabularies, templates, weights.
_READ = (".json", ".txt", ".jinja", ".model", ".safetensors", ".bin")
_WEIGHTS = (".safetensors", ".bin")
#: Files of one name are read whole. The index of a thousand billion parameters has ten million bytes, and the largest
#: tokenizers have fifty million.
_LARGEST_CONFIG, _LARGEST_TOKENIZER = 64_000_000, 512_000_000
_DOWNLOAD = "Download or save the checkpoint again."


def check_files(model: str) -> None:
    """Refuse a folder with a file that cannot be a part of a checkpoint. What is no folder is left alone.

    Raises:
        ModelLoadError: A file is no regular file, or far too large, or its index leads out of the folder.
    """
    folder = Path(model)
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_READ):
            _check_file(model, path, path.name)
    index = next((folder / name for name in _INDICES if (folder / name).is_file()), None)
    if index is not None and not (folder / WHOLE).is_file():  # else transformers does not read it
        for name in indexed_files(model, index):
            _check_file(model, folder / name, f"{name}, which {index.name} names,")


def _check_file(model: str, path: Path, name: str) -> None:
    try:
        found = path.stat()
    except OSError:  # not there, or not ours to read: whoever needs it says so
        return
    if stat.S_ISDIR(found.st_mode):
        return
    if not stat.S_ISREG(found.st_mode):  # reading it may never end
        raise ModelLoadError(model, f"{name} is a device or a pipe, and no file", _DOWNLOAD)
    largest = _LARGEST_TOKENIZER if path.name.startswith(("tokenizer", "vocab", "merges")) else _LARGEST_CONFIG
    if found.st_size > largest and not path.name.endswith((*_WEIGHTS, ".model")):
        problem = f"{name} has {found.st_size:,} bytes, and {largest:,} are the most that such a file is read with"
        raise ModelLoadError(model, problem, _DOWNLOAD)


def indexed_files(model: str, index: Path) -> list[str]:
    """The files that an index names, each once and sorted.

    Raises:
        ModelLoadError: It is malformed, or names a file outside of its folder.
    """
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(model, f"{index.name} is no index of weights ({type(error).__name__})", _DOWNLOAD) from error
    for name in names:
        if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            problem = f"{index.name} names {name!r} for weights, which is no file of this folder"
            raise ModelLoadError(model, problem, "Do not use this checkpoint unless you know who made it.")
    return sorted(names)

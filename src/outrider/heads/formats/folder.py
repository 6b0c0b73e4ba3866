"""Reads the folder of a published head: its configuration and its tensors, and nothing that could run code."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from outrider.errors import InvalidParameterError, ModelLoadError
from outrider.model.loading.files import WHOLE, check_files, indexed_files

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DOWNLOAD = "Download the head again."


class HeadTensor(NamedTuple):
    """A tensor and the file that holds it."""

    tensor: Tensor
    file: str


def read_config(folder: str) -> dict[str, Any]:
    """The configuration in a folder.

    Raises:
        InvalidParameterError: No such folder.
        ModelLoadError: It holds no configuration, or one that is no mapping.
    """
    _check_folder(folder, f"Give the folder that holds the head's {CONFIG}.")
    try:
        found = json.loads((Path(folder) / CONFIG).read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(folder, f"it has no {CONFIG}", "Give the folder of a published head.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(folder, f"{CONFIG} cannot be read ({error})", _DOWNLOAD) from error
    if not isinstance(found, dict):
        raise ModelLoadError(folder, f"{CONFIG} holds no mapping", _DOWNLOAD)
    return found


def list_tensors(folder: str) -> list[str]:
    """The names of all tensors in a folder.

    Raises:
        InvalidParameterError: No such folder.
        ModelLoadError: There are none, they are pickled, or a file is corrupt.
    """
    _check_folder(folder, f"Give the folder that holds {WHOLE}.")
    return [key for _, _, keys in _opened(folder) for key in keys]


def read_tensors(folder: str, wanted: Collection[str] | None = None) -> dict[str, HeadTensor]:
    """Tensors in a folder, by name.

    Args:
        folder: Which.
        wanted: Their names; None for all.

    Raises:
        ModelLoadError: There are none, they are pickled, a file is corrupt, or a tensor holds NaN or infinity.
    """
    found: dict[str, HeadTensor] = {}
    for name, file, keys in _opened(folder):
        found |= {key: HeadTensor(file.get_tensor(key), name) for key in keys if wanted is None or key in wanted}
    for key, (tensor, name) in found.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ModelLoadError(folder, f"{key} in {name} holds NaN or infinity", _DOWNLOAD)
    return found


def _check_folder(folder: str, remedy: str) -> None:
    if not Path(folder).is_dir():
        raise InvalidParameterError("model", folder, "no such folder", remedy)
    check_files(folder)


def _opened(folder: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Each file of weights in a folder: its name, the open file, and the names of its tensors."""
    from safetensors import SafetensorError, safe_open

    for name in _weight_files(folder):
        try:
            with safe_open(Path(folder) / name, "pt") as file:
                yield name, file, list(file.keys())
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(folder, f"{name} cannot be read ({error})", _DOWNLOAD) from error


def _weight_files(folder: str) -> list[str]:
    path = Path(folder)
    if (path / WHOLE).is_file():
        return [WHOLE]
    if (path / _INDEX).is_file():
        return indexed_files(folder, path / _INDEX)
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
    if not pickled:
        raise ModelLoadError(folder, f"it has no {WHOLE}", "Give the folder of a published head.")
    problem = f"{pickled[0]} is pickled, and reading such a file may run any code"
    remedy = f"Load it yourself with torch.load(..., weights_only=True), and save it as {WHOLE}."
    raise ModelLoadError(folder, problem, remedy)

"""Keeps what was measured and learnt in files, for later processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from outrider import __version__
from outrider.kernels.library import kernel_library
from outrider.loading.gguf.header import is_gguf, parts_of
from outrider.loading.loaded_model import LoadedModel
from outrider.model.memory import device_name
from outrider.model.probe import Reference
from outrider.model.runner import ModelRunner

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

#: Names the folder of the files, if set; "off" keeps nothing.
VARIABLE = "OUTRIDER_COSTS"


def path_of(kind: str, facts: Mapping[str, Any]) -> Path | None:
    """Returns where something is kept that holds for these facts alone; None where nothing is kept."""
    folder = os.environ.get(VARIABLE) or str(_cache() / "outrider" / "costs")
    if folder == "off":
        return None
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    return Path(folder) / f"{kind}-{digest}.json"


def read(path: Path, parse: Callable[[Any], _T]) -> _T | None:
    """Returns what a file holds; None where there is none, or something else."""
    try:
        return parse(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except Exception as error:  # a file may hold anything
        logger.warning("%s: it is ignored (%r)", path, error)
        return None


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Through a file beside it, so that whoever is interrupted leaves nothing half. A folder that cannot be written does no
    harm."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content), "utf-8")
        os.replace(beside, path)
    except OSError as error:
        logger.warning("%s: it cannot be kept (%s)", path, error)


def number(value: Any) -> float:
    """A number of a file; raises ValueError where it is none."""
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def identity(runner: ModelRunner) -> dict[str, Any]:
    """Which model it is, and how it is rounded: its products then take another time, and its texts differ."""
    loaded = runner.loaded
    config = loaded.model.config.to_json_string(use_diff=True)
    digest = hashlib.sha256(config.encode()).hexdigest()
    rounding = {"rounds_rows": loaded.rounds_rows, "quantization": loaded.quantization}
    return {"model": loaded.name, "config": digest, **rounding}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


# --- Keeps what the stock model says to the texts of the probe, for the next load of the same GGUF file.
#
# A pass of the stock model unfolds every block, and takes about as long as reading the file. What it says depends on
# the file and on the packages alone. The backend is compared with it at every load all the same.


def read_reference(loaded: LoadedModel) -> Reference | None:
    """Returns what was kept of this file; None where nothing was."""
    path = _path(loaded)
    return None if path is None else read(path, lambda content: _parsed(content, loaded))


def keep_reference(loaded: LoadedModel, reference: Reference) -> None:
    """Keep what the stock model said, if the model is from a GGUF file. `reference` is that of a causal model."""
    path = _path(loaded)
    if path is not None:
        logits = reference.logits.to("cpu", torch.float32).numpy()
        write(path, {"shape": logits.shape, "logits": b64encode(logits.tobytes()).decode()})


def _path(loaded: LoadedModel) -> Path | None:
    """Cache file for this checkpoint, load options and kernel build."""
    if not is_gguf(loaded.name):
        return None
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in parts_of(loaded.name)]
    library = kernel_library()
    return path_of(
        "reference",
        {
            "files": files,
            "config": loaded.model.config.to_json_string(use_diff=True),
            "dtype": str(loaded.dtype),
            "rounds_rows": loaded.rounds_rows,
            "quantization": loaded.quantization,  # a file is rounded again where it drafts
            "versions": [__version__, torch.__version__, version("transformers")],
            "machine": [device_name(loaded.device), str(loaded.device), library.instruction_set if library else None],
        },
    )


def _parsed(content: Any, loaded: LoadedModel) -> Reference:
    logits = torch.from_numpy(np.frombuffer(b64decode(content["logits"]), np.float32).copy()).reshape(content["shape"])
    if logits.ndim != 3 or logits.shape[-1] != loaded.vocab_size or not bool(logits.isfinite().all()):
        raise ValueError(f"logits of shape {list(logits.shape)} are none of {loaded.vocab_size} tokens")
    return Reference(logits.to(loaded.device), is_causal=True)

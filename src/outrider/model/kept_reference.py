"""Keeps what the stock model says to the texts of the probe, for the next load of the same GGUF file.

A pass of the stock model unfolds every block, and takes about as long as reading the file. What it says depends on the file
and on the packages alone. The backend is compared with it at every load all the same.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider import __version__
from outrider.kernels.library import kernel_library
from outrider.model import keeping
from outrider.model.loading.gguf.header import is_gguf, parts_of
from outrider.model.loading.loaded_model import LoadedModel
from outrider.model.probe import Reference
from outrider.model.processor import device_name


def read_reference(loaded: LoadedModel) -> Reference | None:
    """What was kept of this file; None where nothing was."""
    path = _path(loaded)
    return None if path is None else keeping.read(path, lambda content: _parsed(content, loaded))


def keep_reference(loaded: LoadedModel, reference: Reference) -> None:
    """Keep what the stock model said, if the model is from a GGUF file. `reference` is that of a causal model."""
    path = _path(loaded)
    if path is not None:
        logits = reference.logits.to("cpu", torch.float32).numpy()
        keeping.write(path, {"shape": logits.shape, "logits": b64encode(logits.tobytes()).decode()})


def _path(loaded: LoadedModel) -> Path | None:
    """Where it lies: by the files, by how they are loaded, and by what computes."""
    if not is_gguf(loaded.name):
        return None
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in parts_of(loaded.name)]
    library = kernel_library()
    return keeping.path_of(
        "reference",
        {
            "files": files,
            "config": loaded.model.config.to_json_string(use_diff=True),
            "dtype": str(loaded.dtype),
            "rounds_rows": loaded.rounds_rows,
            "versions": [__version__, torch.__version__, version("transformers")],
            "machine": [device_name(loaded.device), str(loaded.device), library.instruction_set if library else None],
        },
    )


def _parsed(content: Any, loaded: LoadedModel) -> Reference:
    logits = torch.from_numpy(np.frombuffer(b64decode(content["logits"]), np.float32).copy()).reshape(content["shape"])
    if logits.ndim != 3 or logits.shape[-1] != loaded.vocab_size or not bool(logits.isfinite().all()):
        raise ValueError(f"logits of shape {list(logits.shape)} are none of {loaded.vocab_size} tokens")
    return Reference(logits.to(loaded.device), is_causal=True)

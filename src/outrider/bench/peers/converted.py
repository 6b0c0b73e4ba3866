"""Converted checkpoints, which are kept from one run to the next."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def converted_path(folder: Path, checkpoint: str, kind: str) -> Path:
    """The path in `folder` for `checkpoint`, converted to `kind`. The name changes when the files of the checkpoint change.

    Args:
        folder: The folder, which is made if it is missing.
        checkpoint: Folder or hub id.
        kind: A part of the name, such as "bfloat16.gguf".
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(checkpoint)
    files = sorted(source.iterdir()) if source.is_dir() else []
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = sha256(repr((str(source.resolve()) if files else checkpoint, facts)).encode()).hexdigest()[:12]
    return folder / f"{source.name}-{key}-{kind}"


def gguf_file(folder: Path, checkpoint: str, dtype: str) -> str:
    """The checkpoint as a GGUF file in which no token ends a text. The file is written if it is missing. A checkpoint
    that is a GGUF file is taken as it is.

    Raises:
        UnsupportedModelError: GGUF cannot describe what this model computes.
    """
    if checkpoint.endswith(".gguf"):
        return checkpoint
    from outrider.convert.gguf import write_gguf  # imports torch, which a check of names does not need

    path = converted_path(folder, checkpoint, f"{dtype}.gguf")
    return str(path) if path.exists() else write_gguf(checkpoint, path, dtype)
